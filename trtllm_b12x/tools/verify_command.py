# SPDX-License-Identifier: Apache-2.0
"""``trtllm-b12x verify``: check every weight bit, and the outputs, of our kernels on a checkpoint's MoE layers."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_b12x import formats
from trtllm_b12x.core import settings
from trtllm_b12x.core.version import __version__
from trtllm_b12x.decision import Environment
from trtllm_b12x.decision.families import FAMILIES
from trtllm_b12x.dispatch.schedule import default_crossover

from .options import CHECKPOINT, Ranks, as_json, out_file
from .progress import UnusableError, expect_writable, is_replaceable, plain, print_line, progress_bar, write

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, MoELayer
    from .verify import Case, CaseReport, LayerReport

_EXIT_STATUS = {"passed": 0, "failed": 1, "unusable": 2, "nothing compared": 3, "interrupted": 130}

_DEFAULT_TOKENS = sorted({1, 8, default_crossover() - 1, default_crossover(), 200})


class _Numbers(click.ParamType):
    """Convert ``0,2,5-7`` to a sorted list of integers."""

    name = "numbers"

    def __init__(self, minimum: int, maximum: int, max_count: int) -> None:
        self.minimum, self.maximum, self.max_count = minimum, maximum, max_count

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        shown = repr(value[:40] + "..." if len(value) > 40 else value)
        numbers: set[int] = set()
        try:
            for part in value.split(","):
                first, _, last = part.partition("-")
                bounds = int(first), int(last or first)
                if min(bounds) < self.minimum or max(bounds) > self.maximum:
                    raise ValueError
                numbers.update(range(bounds[0], bounds[1] + 1))
            if not 0 < len(numbers) <= self.max_count:
                raise ValueError
        except ValueError:
            limits = f"1 to {self.max_count} numbers from {self.minimum} to {self.maximum}"
            self.fail(f"must be {limits}, such as 1,8,60-64; got {shown}", param, ctx)
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


def _families(ctx: click.Context, param: click.Parameter, text: str | None) -> str:
    try:
        return ",".join(settings.KERNELS() if text is None else settings.KERNELS.parse(text))
    except ValueError as expected:
        raise click.BadParameter(f"must be {expected}; got {str(text)[:40]!r}") from None


@click.command(short_help="Check the MoE layers of a quantized checkpoint.")
@click.argument("checkpoint", type=CHECKPOINT)
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
@click.option("--original", type=CHECKPOINT, help="Unquantized model to compare weights and outputs with.")
@click.option("--require-b12x", is_flag=True, help="Fail layers that none of the kernel families serves.")
@click.option("--device", callback=_device, help="cpu, cuda, cuda:1, ...  [default: cuda if available]")
@as_json
@out_file
@click.pass_context
def verify(ctx: click.Context, kernels: str, **options: Any) -> None:
    """Check the MoE layers of a quantized CHECKPOINT (a folder with config.json and *.safetensors).

    Each layer is loaded as TensorRT-LLM loads it, once for each kernel family that serves it, run at token counts that the
    family serves, and compared with a float32 reference that dequantizes the checkpoint's own tensors. Kernels that keep
    activations in bf16 (cuda, triton) are compared with a reference that does so too. One more case has outliers four times as
    large as calibrated. The tokens of a case go to 16 experts. The bits and scales of every expert are compared.

    A checkpoint alone cannot show swapped experts, layers, or gate and up, nor weights of another model. --original can.

    Exit status: 0 passed, 1 a number is out of tolerance, 2 the input cannot be used, 3 nothing was compared (CUTLASS serves
    every layer), 130 interrupted.
    """
    if not os.environ.get(settings.LOG.name):
        logging.disable(logging.INFO)  # a server logs these lines once, verify would for each layer
    try:
        with settings.KERNELS.set(kernels), settings.CROSSOVER.set(str(default_crossover())):
            status = _verify(**options)
    finally:
        logging.disable(logging.NOTSET)
    ctx.exit(status)


def _verify(checkpoint: Path, as_json: bool, out: Path | None, original: Path | None, tp: int, ep: int, **options: Any) -> int:
    from torch import OutOfMemoryError

    from trtllm_b12x.engines.trtllm.host import use_embedded
    from trtllm_b12x.engines.trtllm.machine import candidate_kernels

    from .checkpoint import Checkpoint
    from .verify import Case, Tolerances

    use_embedded()  # even if TensorRT-LLM is installed: our code runs unchanged in both
    expect_writable(out)
    source = Checkpoint(checkpoint)
    plain_model = Checkpoint(original) if original else None
    if plain_model is not None:
        _ = plain_model.layers  # raises if the original cannot be used
    chosen, counts = _chosen(source, options.pop("layers"), options.pop("sample")), options.pop("tokens") or _DEFAULT_TOKENS
    features = [f for f in (family.features(Environment()) for family in FAMILIES) if f.most_tokens is None]
    limit = min(default_crossover(layer.top_k, [feature]) for layer in chosen for feature in features)
    cases = [Case(count) for count in counts] + [Case(max(c for c in counts if c < limit or c == counts[0]), 4.0)]
    device, algorithms = options["device"], sorted({layer.quant_algo for layer in chosen})
    kernels = [kernel.features.name for algo in algorithms for kernel in candidate_kernels(device, algo).values()]
    head = {
        "trtllm_b12x": __version__,
        "checkpoint": checkpoint,
        "device": device,
        "tp": tp,
        "ep": ep,
        "seed": options["seed"],
        "kernel": "+".join(dict.fromkeys(kernels)),
        "crossover": default_crossover(),
        "tolerances": asdict(Tolerances()),
        "warnings": source.remarks,
    }
    options |= {"original": plain_model, "ranks": Ranks(tp, ep)}
    reports: list[LayerReport] = []
    errors: dict[str, str] = {}

    def line(text: str) -> None:
        """Print a line of the table, on standard error if the JSON report goes to standard output."""
        print_line(text, err=as_json)

    def write_report(status: str) -> None:
        """Write the report if ``out`` names a file. Pipes and devices get the report once, at the end."""
        if out is not None and (status != "running" or is_replaceable(out)):
            write(out, _report(head, reports, errors, status))

    write_report("running")
    name_width, verified = max(len(plain(layer.name)) for layer in chosen), 0
    try:
        with progress_bar("verifying layers") as set_progress:
            for done, layer in enumerate(chosen):
                set_progress(done, len(chosen))
                try:
                    for report in _reports(source, layer, cases, options):
                        title = [] if reports else _heading(name_width)
                        reports.append(report)  # before printing, so that an interrupt loses no report that was shown
                        for text in (*title, *_lines(report, name_width)):
                            line(text)
                    verified += 1
                except (UnusableError, MemoryError, OutOfMemoryError) as error:  # the other layers may still be verified
                    set_progress(done, len(chosen))  # raises if Ctrl-C caused the error
                    no_memory = f"{device}: out of memory; choose --device cpu or smaller --tokens"
                    text = str(error) if isinstance(error, UnusableError) else no_memory
                    if text not in errors.values():  # print once, for example if the ranks divide no layer
                        print_line(f"error: {text}", err=True)
                    errors[layer.name] = text
                write_report("running")
        status = _status(reports, errors)
        if reports:
            if plain_model is None and any(report.compared for report in reports):
                line("without --original verify cannot see swapped experts, layers, or gate and up, nor weights of another model")
            for remark in source.remarks:
                line(f"warning: {remark}")
            line(_summary(reports, errors, status, len(source.layers), device))
    except KeyboardInterrupt:
        line(f"interrupted: {verified} of {len(chosen)} layers were verified")
        status = "interrupted"
    write_report(status)
    if as_json:
        click.echo(_report(head, reports, errors, status), nl=False)
    return _EXIT_STATUS[status]


def _reports(source: Checkpoint, layer: MoELayer, cases: list[Case], options: dict[str, Any]) -> Iterator[LayerReport]:
    """Verify a layer once for each family that serves it. ``options``: other arguments of ``verify_layer``."""
    from .verify import resolve_on_ranks, verify_layer

    verdict = resolve_on_ranks(source, layer, options["ranks"], options["device"])
    families: list[tuple[str, ...]] = [(family,) for family in verdict.families] or [settings.KERNELS()]
    row = formats.find(layer.quant_algo)
    if verdict.served and row is not None and not row.hosts_path:  # only all families together serve every count
        families = [verdict.families]
    for number, family in enumerate(families):
        with settings.KERNELS.set(",".join(family)):
            report = verify_layer(source, layer, cases, **options)
        if verdict.served and not number:
            report.reasons += [f"not {name}: {rejection}" for name, rejection in verdict.refused]
        yield report


def _status(reports: list[LayerReport], errors: dict[str, str]) -> str:
    if errors:
        return "unusable"
    if not all(report.passed for report in reports):
        return "failed"
    return "passed" if any(report.compared for report in reports) else "nothing compared"


def _chosen(source: Checkpoint, indices: list[int] | None, sample: int | None) -> list[MoELayer]:
    from .checkpoint import CheckpointError

    chosen = source.layers
    if indices is not None:
        known = sorted({layer.index for layer in chosen})
        unknown = sorted(set(indices) - set(known))
        if unknown:
            raise CheckpointError(f"--layers {unknown[0]}", "no MoE layer", f"choose from {', '.join(map(str, known))}")
        chosen = [layer for layer in chosen if layer.index in indices]
    if not any(formats.find(layer.quant_algo) for layer in chosen):
        algorithms = ", ".join(sorted({layer.quant_algo for layer in chosen})).replace("none", "not quantized")
        raise CheckpointError(
            source.directory,
            f"its experts are {algorithms}, none of {', '.join(formats.names())}",
            f"quantize it with nvidia-modelopt's {' or '.join(row.recipe for row in formats.FORMATS)}",
        )
    if sample is not None and sample < len(chosen):
        chosen = [layer for layer in chosen if formats.find(layer.quant_algo)]
        last = len(chosen) - 1
        chosen = [chosen[i] for i in sorted({round(last * n / max(sample - 1, 1)) for n in range(min(sample, last + 1))})]
    return chosen


def _summary(reports: list[LayerReport], errors: dict[str, str], status: str, in_all: int, device: str) -> str:
    served = [report for report in reports if report.served_by != "cutlass"]
    on = "+".join(dict.fromkeys(report.served_by for report in served)) or "+".join(settings.KERNELS())
    names = {report.layer.name for report in reports}
    if status == "nothing compared":
        return f"NOTHING COMPARED: 0 of {len(names)} MoE layers on {on}, CUTLASS serves every one for the reasons above"
    cases = [case for report in served for case in report.cases if case.rel_l2_kernel is not None]
    distances = [(case.rel_l2_kernel, case.bound) for case in cases]
    sizes = {report.layer.name: report.bytes for report in served[::-1] if report.bytes}  # the first family's entry wins
    looked_at = len(names | errors.keys())
    parts = [f"{len({report.layer.name for report in served})} of {looked_at} MoE layers on {on}"]
    if in_all != looked_at:
        parts[0] += f" ({in_all} in all)"
    if distances:
        worst, bound = max(distances)
        parts.append(f"worst relative L2 {worst:.4f} (bound {bound:.3g})")
    extra = sum(report.bytes.extra for report in served if report.bytes)
    parts.append(f"extra bytes {extra} (padding {sum(size.padding for size in sizes.values())})")
    if errors:
        parts.append(f"{len(errors)} could not be used")
    if served and device == "cpu":
        parts.append("computed in torch: no kernel ran")
    verdict = "PASS" if status == "passed" else "FAIL"
    if off := [report.cutlass_error for report in served if report.cutlass_error is not None]:
        verdict += ", but" if status == "passed" else ", and"
        verdict += f" prompts on CUTLASS are off by up to {100 * max(off):.0f} % (gate and up have different scales)"
    return f"{verdict}: " + ", ".join(parts)


# ---- table and JSON report -----------------------------------------------------------------------------------------------

_UNQUANTIZED = frozenset((row.name, row.format) for row in FAMILIES if row.features(Environment()).arithmetic == "UNQUANTIZED")
"""Family and format of kernels that do not quantize activations. The table omits their error against a reference that does."""


def _worst(cases: list[CaseReport], name: str) -> str:
    values = [value for case in cases if (value := getattr(case, name)) is not None]
    return f"{max(values):.4f}" if values else "-"


def _quantizes(report: LayerReport, case: CaseReport) -> bool:
    form = formats.find(report.layer.quant_algo)
    return form is not None and (case.path, form.name) not in _UNQUANTIZED


_COLUMNS: dict[str, tuple[int, Callable[[LayerReport], str]]] = {
    "served by": (14, lambda r: r.served_by),
    "E/k/H/I": (16, lambda r: f"{r.layer.num_experts}/{r.layer.top_k}/{r.layer.hidden_size}/{r.layer.intermediate_size}"),
    "kernel": (6, lambda r: _worst(r.cases, "rel_l2_kernel")),
    "float32": (7, lambda r: _worst([case for case in r.cases if _quantizes(r, case)], "rel_l2_none")),
    "ratio": (6, lambda r: _worst(r.cases, "ratio")),
    "bf16 x": (6, lambda r: _worst(r.cases, "error")),
    "padding": (13, lambda r: f"{r.bytes.padding:,}" if r.bytes else "-"),
    "extra bytes": (11, lambda r: f"{r.bytes.extra:,}" if r.bytes else "-"),
    "": (4, lambda r: ("ok" if r.passed else "FAIL") if r.compared or not r.passed else "-"),
}
"""Width of a column, and function that returns its cell, by title."""


def _heading(name_width: int) -> list[str]:
    """Return the first lines of the table: the bounds, and a title over each column."""
    from .verify import Tolerances

    bounds = Tolerances()
    return [
        f"relative L2 (worst case); bounds: kernel {bounds.kernel:g}, with bf16 activations {bounds.unquantized:g}; "
        f"float32 {bounds.none:g} and ratio {bounds.ratio:g} over many tokens; bf16 x: against float32 with bf16 activations",
        _row("layer".ljust(name_width), _COLUMNS),
    ]


def _lines(report: LayerReport, name_width: int) -> list[str]:
    """Return the row of a layer, and a line for each reason, warning, failure and note."""
    texts = [*report.reasons, *(f"warning: {warning}" for warning in report.warnings)]
    texts += [f"FAIL {failure}" for failure in report.failures]
    for case in report.cases:
        about = f"FAIL {case.tokens} tokens, outliers x {case.outliers:g}, on {case.path}"
        texts += [f"{about}: {failure}" for failure in case.failures]
    if report.weight_error is not None:
        outputs = _worst([case for case in report.cases if case.outliers <= 1], "original_error")
        texts.append(f"against the unquantized model: weights {100 * report.weight_error:.1f} %, outputs {outputs}")
    row = _row(plain(report.layer.name).ljust(name_width), [cell(report) for _, cell in _COLUMNS.values()])
    return [row, *(f"{report.layer.name}: {text}" for text in (*texts, *report.notes))]


def _row(name: str, cells: Iterable[str]) -> str:
    padded = (cell.rjust(width) for cell, (width, _) in zip(cells, _COLUMNS.values(), strict=True))
    return "  ".join((name, *padded)).rstrip()


def _report(head: dict[str, Any], reports: list[LayerReport], errors: dict[str, str], status: str) -> str:
    """Return the report as JSON. ``errors`` maps a layer to the reason why it could not be verified."""
    layers = [
        {
            **asdict(report.layer),
            **{name: value for name, value in asdict(report).items() if name != "layer"},
            "passed": report.passed,
            "cases": [{**asdict(case), "ratio": case.ratio} for case in report.cases],
        }
        for report in reports
    ]
    content = {**head, "status": status, "passed": status == "passed", "errors": errors, "layers": layers}
    return json.dumps(_finite(content), indent=2, allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    """Replace floats that JSON cannot hold by the strings ``inf`` and ``nan``."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
