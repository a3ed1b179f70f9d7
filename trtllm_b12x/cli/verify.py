"""``trtllm-b12x verify``: is this checkpoint right on b12x, to the bit and to the number?"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_b12x import __version__
from trtllm_b12x.crossover import crossover

if TYPE_CHECKING:
    from trtllm_b12x.checkpoint import Checkpoint, MoELayer
    from trtllm_b12x.verification import LayerReport


class _Numbers(click.ParamType):
    """``0,2,5-7`` to a sorted list of integers."""

    name = "numbers"

    def __init__(self, minimum: int) -> None:
        self.minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        numbers: set[int] = set()
        try:
            for part in value.split(","):
                first, _, last = part.partition("-")
                numbers.update(range(int(first), int(last or first) + 1))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers; write for instance 1,8,60-64", param, ctx)
        if not numbers or min(numbers) < self.minimum:
            self.fail(f"{value!r}: numbers from {self.minimum} up are meant", param, ctx)
        return sorted(numbers)


def _default_tokens() -> list[int]:
    return sorted({1, 8, crossover() - 1, crossover(), 200})


@click.command(short_help="Check the MoE layers of an NVFP4 checkpoint.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--layers", type=_Numbers(0), help="Layer indices, for instance 0,4-7.  [default: every MoE layer]")
@click.option(
    "--tokens",
    type=_Numbers(1),
    help=f"Token counts.  [default: {','.join(map(str, _default_tokens()))}; b12x serves fewer than {crossover()}]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the activations and the routing.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks to simulate.")
@click.option("--ep", type=click.IntRange(1), default=1, show_default=True, help="Expert-parallel ranks to simulate.")
@click.option("--original", type=click.Path(path_type=Path), help="The unquantized model: adds true weight and output error.")
@click.option("--require-b12x", is_flag=True, help="A layer that CUTLASS serves fails.")
@click.option("--device", help="cpu, cuda, cuda:1, ...  [default: cuda where there is one]")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every number to this file.")
@click.pass_context
def verify(
    ctx: click.Context,
    checkpoint: Path,
    layers: list[int] | None,
    tokens: list[int] | None,
    tp: int,
    ep: int,
    seed: int,
    original: Path | None,
    require_b12x: bool,
    device: str | None,
    json_file: Path | None,
) -> None:
    """Check the MoE layers of an NVFP4 CHECKPOINT (a folder that nvidia-modelopt exported).

    Each layer is loaded as TensorRT-LLM loads it, run through b12x (few tokens) and CUTLASS (many), and compared with a
    float32 reference that dequantizes the checkpoint's own tensors.  One further case has outliers four times as large as
    calibrated.

    Exit status: 0 passed, 1 a number is out of tolerance, 2 the input cannot be used.
    """
    from trtllm_b12x.checkpoint import Checkpoint, CheckpointError
    from trtllm_b12x.host import use_embedded

    use_embedded()  # also where TensorRT-LLM is installed: the code that is verified is the same, its numbers come from torch
    from trtllm_b12x.verification import Case, Ranks, Tolerances, verify_layer

    try:
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise CheckpointError(f"{json_file}: its folder does not exist; create it first")
        device = _device(device)
        source = Checkpoint(checkpoint)
        chosen = _chosen(source, layers)
        if not any(layer.quant_algo == "NVFP4" for layer in chosen):
            algorithms = ", ".join(sorted({"not quantized" if c.quant_algo == "none" else c.quant_algo for c in chosen}))
            raise CheckpointError(
                f"{checkpoint}: not an NVFP4 checkpoint, its experts are {algorithms}; "
                "quantize it with nvidia-modelopt's NVFP4_DEFAULT_CFG"
            )
        plain = None if original is None else Checkpoint(original)
        counts = tokens or _default_tokens()
        limit = min(crossover(layer.top_k) for layer in chosen)
        cases = [Case(count) for count in counts] + [Case(max(c for c in counts if c < limit or c == counts[0]), 4.0)]
        reports: list[LayerReport] = []
        with _progress(sum(layer.num_experts for layer in chosen)) as advance:
            for layer in chosen:
                reports.append(
                    verify_layer(
                        source,
                        layer,
                        cases,
                        ranks=Ranks(tp, ep),
                        seed=seed,
                        device=device,
                        require_b12x=require_b12x,
                        original=plain,
                        on_expert=advance,
                    )
                )
    except CheckpointError as error:
        click.echo(f"error: {error}", err=True)
        ctx.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "out of memory" not in str(error):
            raise
        click.echo(f"error: {device}: out of memory; choose --device cpu or smaller --tokens", err=True)
        ctx.exit(2)
    _print(reports, Tolerances())
    passed = all(report.passed for report in reports)
    if json_file is not None:
        try:
            _write_json(
                json_file, {"checkpoint": checkpoint, "device": device, "tp": tp, "ep": ep, "seed": seed}, reports, passed
            )
        except OSError as error:
            click.echo(f"error: {json_file}: cannot be written ({error.strerror}); free space or choose another file", err=True)
            ctx.exit(2)
    click.echo(_summary(reports, Tolerances(), passed))
    ctx.exit(0 if passed else 1)


def _device(name: str | None) -> str:
    import torch

    from trtllm_b12x.checkpoint import CheckpointError

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"--device {name}: not usable here ({reason}); choose cpu") from None
    return name


def _chosen(source: Checkpoint, layers: list[int] | None) -> list[MoELayer]:
    from trtllm_b12x.checkpoint import CheckpointError

    if layers is None:
        return source.layers
    known = {layer.index for layer in source.layers}
    unknown = sorted(set(layers) - known)
    if unknown:
        raise CheckpointError(f"--layers {unknown[0]}: no MoE layer; there are {', '.join(map(str, sorted(known)))}")
    return [layer for layer in source.layers if layer.index in layers]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, one step per call of what it yields; quiet where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("verifying experts", total=total)
        yield lambda: bar.advance(task)


def _print(reports: list[LayerReport], bounds: Any) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1), pad_edge=False)
    table.title = f"relative L2 (worst case); bounds: kernel {bounds.kernel:g}, float32 {bounds.none:g}, ratio {bounds.ratio:g}"
    columns: dict[str, Callable[[LayerReport], str]] = {
        "layer": lambda report: report.name,
        "served by": lambda report: report.served_by,
        "E/k/H/I": lambda r: f"{r.num_experts}/{r.top_k}/{r.hidden_size}/{r.intermediate_size}",
        "b12x\nkernel": lambda report: _worst(_cases(report, "b12x"), "rel_l2_kernel"),
        "b12x\nfloat32": lambda report: _worst(_cases(report, "b12x"), "rel_l2_none"),
        "b12x\nratio": lambda report: _worst(_cases(report, "b12x"), "ratio"),
        "cutlass\nfloat32": lambda report: _worst(_cases(report, "cutlass"), "rel_l2_none"),
        "cutlass\nratio": lambda report: _worst(_cases(report, "cutlass"), "ratio"),
        "padding": lambda report: f"{report.bytes.padding:,}" if report.bytes else "-",
        "extra\nbytes": lambda r: f"{r.bytes.extra_payload + r.bytes.extra_scales:,}" if r.bytes else "-",
        "baked\nscales": lambda report: _percent(report.baked_weight_error),
        "": lambda report: "ok" if report.passed else "FAIL",
    }
    # What a narrow terminal leaves out is in the JSON.
    for width, titles in ((130, ("E/k/H/I", "padding", "baked\nscales")), (100, ("b12x\nratio", "cutlass\nratio"))):
        if console.width < width:
            columns = {title: cell for title, cell in columns.items() if title not in titles}
    for title in columns:
        longest = max(len(line) for line in title.split("\n"))
        shrinks = title == "layer"
        table.add_column(
            title,
            justify="left" if title in ("layer", "served by") else "right",
            no_wrap=True,
            min_width=0 if shrinks else longest,
        )
    for report in reports:
        table.add_row(*(cell(report) for cell in columns.values()))
    console.print(table)
    for report in reports:
        for reason in report.reasons:
            click.echo(f"{report.name}: {reason}")
        for failure in report.failures:
            click.echo(f"{report.name}: FAIL {failure}")
        for case in report.cases:
            for failure in case.failures:
                click.echo(f"{report.name}: FAIL {case.tokens} tokens, outliers x {case.outliers:g}, on {case.path}: {failure}")
        if report.weight_error is not None:
            worst = _worst([case for case in report.cases if case.outliers <= 1], "original_error")
            click.echo(f"{report.name}: against the unquantized model: weights {_percent(report.weight_error)}, outputs {worst}")


def _cases(report: LayerReport, path: str) -> list[Any]:
    return [case for case in report.cases if case.path == path]


def _worst(cases: list[Any], name: str) -> str:
    values = [value for case in cases if (value := getattr(case, name)) is not None]
    return f"{max(values):.4f}" if values else "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _summary(reports: list[LayerReport], bounds: Any, passed: bool) -> str:
    served = [report for report in reports if report.served_by == "b12x"]
    errors = [
        (case.rel_l2_kernel, max(bounds.kernel, case.rounding))
        for report in served
        for case in report.cases
        if case.rel_l2_kernel is not None
    ]
    extra = sum(report.bytes.extra_payload + report.bytes.extra_scales for report in served if report.bytes)
    padding = sum(report.bytes.padding for report in served if report.bytes)
    baked = [report.baked_weight_error for report in reports if report.baked_weight_error is not None]
    parts = [f"{len(served)} of {len(reports)} MoE layers on b12x"] + ([] if served else ["nothing was compared"])
    if errors:
        worst, bound = max(errors)
        parts.append(f"worst relative L2 {worst:.4f} (bound {bound:.3g})")
    parts.append(f"extra bytes {extra} (padding {padding})")
    if baked:
        parts.append(f"baked scales would have moved the weights by {_percent(max(baked))}")
    return f"{'PASS' if passed else 'FAIL'}: " + ", ".join(parts)


def _write_json(path: Path, call: dict[str, Any], reports: list[LayerReport], passed: bool) -> None:
    """Whole or not at all: written beside ``path``, then renamed."""
    from trtllm_b12x.kernels import kernel_class
    from trtllm_b12x.verification import Tolerances

    content = {
        "trtllm_b12x": __version__,
        **call,
        "kernel": kernel_class(call["device"]).features.name,
        "crossover": crossover(),
        "tolerances": dataclasses.asdict(Tolerances()),
        "passed": passed,
        "layers": [
            {**dataclasses.asdict(report), "passed": report.passed, "cases": [_case_json(case) for case in report.cases]}
            for report in reports
        ],
    }
    text = json.dumps(_finite(content), indent=2, allow_nan=False, default=str) + "\n"
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a pipe or a device is written to, not replaced
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _case_json(case: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(case), "ratio": case.ratio}


def _finite(value: Any) -> Any:
    """Floats that JSON has no word for as strings, ``inf`` and ``nan``."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
