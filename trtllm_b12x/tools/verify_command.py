"""``trtllm-b12x verify``: check that our kernels compute a checkpoint's MoE layers right, to the bit and to the number."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_b12x import formats
from trtllm_b12x.core import settings
from trtllm_b12x.decision import Environment
from trtllm_b12x.decision.families import FAMILIES
from trtllm_b12x.dispatch.schedule import default_crossover

from .options import Ranks
from .progress import Progress, UnusableError, expect_folder, interruptible
from .verify_output import JsonReport, Table, header, percent

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, MoELayer
    from .verify import Case, LayerReport

PASSED, FAILED, UNUSABLE, NOTHING_COMPARED, INTERRUPTED = 0, 1, 2, 3, 130
_STATUS = {PASSED: "passed", FAILED: "failed", UNUSABLE: "unusable", NOTHING_COMPARED: "nothing compared"}

_DEFAULT_TOKENS = sorted({1, 8, default_crossover() - 1, default_crossover(), 200})

UNSEEN = "without --original verify cannot see swapped experts, layers, or gate and up, nor weights of another model"


class _Numbers(click.ParamType):
    """Convert ``0,2,5-7`` to a sorted list of integers."""

    name = "numbers"

    def __init__(self, minimum: int, maximum: int, max_count: int) -> None:
        self.minimum, self.maximum, self.max_count = minimum, maximum, max_count

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        shown = repr(value[:40] + "..." if len(value) > 40 else value)
        numbers: set[int] = set()
        try:
            for part in value.split(","):
                first, _, last = part.partition("-")
                bounds = int(first), int(last or first)
                if min(bounds) < self.minimum or max(bounds) > self.maximum:
                    self.fail(f"must be numbers from {self.minimum} to {self.maximum}; got {shown}", param, ctx)
                numbers.update(range(bounds[0], bounds[1] + 1))
        except ValueError:
            self.fail(f"must be a list of numbers such as 1,8,60-64; got {shown}", param, ctx)
        if not 0 < len(numbers) <= self.max_count:
            self.fail(f"must be 1 to {self.max_count} numbers; got {len(numbers)} in {shown}", param, ctx)
        return sorted(numbers)


def _device(ctx: click.Context, param: click.Parameter, name: str | None) -> str:
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch("cpu|cuda(:[0-9]{1,3})?", name):
        raise click.BadParameter(f"must be cpu, cuda, cuda:1, ...; got {name[:40]!r}")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise click.BadParameter(f"{name} cannot be used here ({reason}); choose cpu") from None
    return name


def _families(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...]:
    if text is None:
        return settings.KERNELS.listed()
    names = tuple(dict.fromkeys(settings.KERNELS.read(word) for word in text.split(",")))
    unknown = [name for name in names if name not in settings.KERNELS.values]
    if unknown:
        raise click.BadParameter(f"must be of {', '.join(settings.KERNELS.values)}; got {unknown[0][:40]!r}")
    return names


@click.command(short_help="Check the MoE layers of a quantized checkpoint.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--layers", type=_Numbers(0, 99_999, 10_000), help="Layer indices such as 0,4-7.  [default: every MoE layer]")
@click.option("--sample", type=click.IntRange(1), help="Check only this many layers, evenly spread, for a first answer.")
@click.option(
    "--tokens",
    type=_Numbers(1, 16_384, 64),
    help=f"Token counts; each family runs those it serves.  [default: {','.join(map(str, _DEFAULT_TOKENS))}]",
)
@click.option(
    "--kernels", callback=_families, help=f"Kernel families, checked in turn.  [default: {settings.KERNELS.name}, or all]"
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of activations and routing.")
@click.option("--tp", type=click.IntRange(1, 1024), default=1, show_default=True, help="Tensor-parallel ranks to simulate.")
@click.option("--ep", type=click.IntRange(1, 1024), default=1, show_default=True, help="Expert-parallel ranks to simulate.")
@click.option("--original", type=click.Path(path_type=Path), help="Unquantized model to compare weights and outputs with.")
@click.option("--require-b12x", is_flag=True, help="Fail layers that none of the kernel families serves.")
@click.option("--device", callback=_device, help="cpu, cuda, cuda:1, ...  [default: cuda if available]")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every number to this file; - for stdout.")
@click.pass_context
def verify(ctx: click.Context, kernels: tuple[str, ...], **options: Any) -> None:
    """Check the MoE layers of a quantized CHECKPOINT (a folder that nvidia-modelopt exported).

    Each layer is loaded as TensorRT-LLM loads it, once for each kernel family that serves it, run at token counts that the
    family serves, and compared with a float32 reference that dequantizes the checkpoint's own tensors. Kernels that keep
    activations in bf16 (triton) are compared with a reference that does so too. One more case has outliers four times as large
    as calibrated. The tokens of a case go to 16 experts. The bits and scales of every expert are compared.

    A checkpoint alone cannot show swapped experts, layers, or gate and up, nor weights of another model. --original can.

    Exit status: 0 passed, 1 a number is out of tolerance, 2 the input cannot be used, 3 nothing was compared (CUTLASS serves
    every layer), 130 interrupted.
    """
    if not os.environ.get(settings.LOG.name):
        logging.disable(logging.INFO)  # the log of a server with one layer at a time
    try:
        with settings.KERNELS.only(kernels), settings.CROSSOVER.set(str(default_crossover())):
            status = _verify(**options)
    finally:
        logging.disable(logging.NOTSET)
    ctx.exit(status)


def _verify(checkpoint: Path, json_file: Path | None, original: Path | None, tp: int, ep: int, **options: Any) -> int:
    from trtllm_b12x.engines.trtllm.host import use_embedded

    from .checkpoint import Checkpoint

    use_embedded()  # also if TensorRT-LLM is installed: our code is the same there
    expect_folder(json_file)
    source = Checkpoint(checkpoint)
    count, plain_model = len(source.layers), Checkpoint(original) if original else None
    if plain_model is not None:
        _ = plain_model.layers
    chosen, tokens = _chosen(source, options.pop("layers"), options.pop("sample")), options.pop("tokens")
    algorithms = sorted({layer.quant_algo for layer in chosen})
    report = JsonReport(json_file, header(checkpoint, options["device"], tp, ep, options["seed"], algorithms))
    options |= {"original": plain_model, "ranks": Ranks(tp, ep)}
    with source, Progress(f"verifying {len(chosen)} layer{'' if len(chosen) == 1 else 's'}", len(chosen)) as bar:
        table = Table([layer.name for layer in chosen], str(json_file) == "-", bar.line)
        run = _Run(report, table, bar, options)
        try:
            with interruptible():
                run.verify(source, chosen, tokens or _DEFAULT_TOKENS)
        except KeyboardInterrupt:
            table.line(f"interrupted: {len(run.reports)} of {len(chosen)} layers were verified")
            run.write("interrupted")
            return INTERRUPTED
    status = run.status()
    run.write(_STATUS[status])
    if run.reports:
        if plain_model is None and any(layer.compared for layer in run.reports):
            table.line(UNSEEN)
        table.line(_summary(run, status, count))
    return UNUSABLE if run.unwritable else status


class _Run:
    """Verify the layers one after the other. Finished reports are kept if a later layer fails."""

    def __init__(self, report: JsonReport, table: Table, bar: Progress, options: dict[str, Any]) -> None:
        self.reports: list[LayerReport] = []
        self.errors: dict[str, str] = {}
        self.unwritable = False
        self._report, self._table, self._bar, self._options = report, table, bar, options

    def verify(self, source: Checkpoint, chosen: list[MoELayer], counts: list[int]) -> None:
        from .verify import Case

        limit = min(default_crossover(layer.top_k, [family.features(Environment())]) for layer in chosen for family in FAMILIES)
        cases = [Case(count) for count in counts] + [Case(max(c for c in counts if c < limit or c == counts[0]), 4.0)]
        for done, layer in enumerate(chosen):
            try:
                self._verify_layer(source, layer, cases, done)
            except (UnusableError, MemoryError, RuntimeError) as error:
                message = str(error)
                if not isinstance(error, UnusableError):
                    if not isinstance(error, MemoryError) and "out of memory" not in message:
                        raise
                    message = f"{self._options['device']}: out of memory; choose --device cpu or smaller --tokens"
                self._bar.line(f"error: {message}", err=True)
                self.errors[layer.name] = message
                self.write("running")

    def _verify_layer(self, source: Checkpoint, layer: MoELayer, cases: list[Case], done: int) -> None:
        """Verify a layer once for each family that serves it."""
        from .verify import resolve_on_ranks, verify_layer

        verdict = resolve_on_ranks(source, layer, self._options["ranks"], self._options["device"])
        families: list[tuple[str, ...]] = [(family,) for family in verdict.families]
        row = formats.find(layer.quant_algo)
        if families and row is not None and not row.hosts_path:  # the families only serve every count together
            families = [verdict.families]
        for number, family in enumerate(families or [settings.KERNELS.listed()]):

            def progress(share: float, number: int = number) -> None:
                self._bar.set(done + (number + share) / max(len(families), 1))

            with settings.KERNELS.only(family):
                report = verify_layer(source, layer, cases, progress=progress, **self._options)
            if verdict.served and not number:
                report.reasons += [f"not {name}: {rejection}" for name, rejection in verdict.refused]
            self.reports.append(report)
            self._table.add(report)
            self.write("running")

    def write(self, status: str) -> None:
        if self.unwritable:
            return
        try:
            self._report.write(self.reports, self.errors, status)
        except UnusableError as error:
            self.unwritable = True
            error.show()

    def status(self) -> int:
        if self.errors:
            return UNUSABLE
        if not all(layer.passed for layer in self.reports):
            return FAILED
        return PASSED if any(layer.compared for layer in self.reports) else NOTHING_COMPARED


def _chosen(source: Checkpoint, indices: list[int] | None, sample: int | None) -> list[MoELayer]:
    from .checkpoint import CheckpointError
    from .checkpoint.quantization import OTHER_ALGORITHMS

    chosen, names = source.layers, formats.names()
    if indices is not None:
        known = sorted({layer.index for layer in chosen})
        unknown = sorted(set(indices) - set(known))
        if unknown:
            raise CheckpointError(f"--layers {unknown[0]}", "no MoE layer", f"choose of {', '.join(map(str, known))}")
        chosen = [layer for layer in chosen if layer.index in indices]
    if not any(layer.quant_algo in names for layer in chosen):
        algorithms = ", ".join(sorted({OTHER_ALGORITHMS.get(layer.quant_algo, layer.quant_algo) for layer in chosen}))
        raise CheckpointError(
            source.directory,
            f"not an {' or '.join(names)} checkpoint, its experts are {algorithms}",
            f"quantize it with nvidia-modelopt's {' or '.join(row.recipe for row in formats.FORMATS)}",
        )
    if sample is not None and sample < len(chosen):
        chosen = [layer for layer in chosen if layer.quant_algo in names]
        last = len(chosen) - 1
        chosen = [chosen[i] for i in sorted({round(last * n / max(sample - 1, 1)) for n in range(min(sample, last + 1))})]
    return chosen


def _summary(run: _Run, status: int, in_all: int) -> str:
    from .verify import Tolerances

    served = [report for report in run.reports if report.served_by != "cutlass"]
    on = "+".join(dict.fromkeys(report.served_by for report in served)) or "+".join(settings.KERNELS.listed())
    names = {report.name for report in run.reports}
    if status == NOTHING_COMPARED:
        return f"NOTHING COMPARED: 0 of {len(names)} MoE layers on {on}, CUTLASS serves every one for the reasons above"
    cases = [case for report in served for case in report.cases if case.rel_l2_kernel is not None]
    errors = [(case.rel_l2_kernel, max(Tolerances().kernel, case.rounding)) for case in cases]
    sizes = {report.name: report.bytes for report in served[::-1] if report.bytes}  # the first family's
    baked = [report.baked_weight_error for report in run.reports if report.baked_weight_error is not None]
    looked_at = len(names | run.errors.keys())
    parts = [f"{len({report.name for report in served})} of {looked_at} MoE layers on {on}"]
    if in_all != looked_at:
        parts[0] += f" ({in_all} in all)"
    if errors:
        worst, bound = max(errors)
        parts.append(f"worst relative L2 {worst:.4f} (bound {bound:.3g})")
    extra = sum(report.bytes.extra for report in served if report.bytes)
    parts.append(f"extra bytes {extra} (padding {sum(size.padding for size in sizes.values())})")
    if baked:
        parts.append(f"baked scales would have moved the weights by {percent(max(baked))}")
    if run.errors:
        parts.append(f"{len(run.errors)} could not be used")
    return f"{'PASS' if status == PASSED else 'FAIL'}: " + ", ".join(parts)
