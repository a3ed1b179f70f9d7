"""Format the table of ``verify``, and write its JSON report."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_b12x import formats
from trtllm_b12x.decision import Environment
from trtllm_b12x.decision.families import FAMILIES

from .progress import is_replaceable, plain, write

if TYPE_CHECKING:
    from .verify import CaseReport, LayerReport

_UNQUANTIZED = frozenset(row.key for row in FAMILIES if row.features(Environment()).arithmetic == "UNQUANTIZED")
"""Family and format of kernels that do not quantize activations. They have no error against the reference that does."""


def _worst(cases: list[CaseReport], name: str) -> str:
    values = [value for case in cases if (value := getattr(case, name)) is not None]
    return f"{max(values):.4f}" if values else "-"


def _quantizes(report: LayerReport, case: CaseReport) -> bool:
    form = formats.find(report.layer.quant_algo)
    return form is not None and (case.path, form.name) not in _UNQUANTIZED


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


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
"""Title to width and cell."""


def heading(name_width: int) -> list[str]:
    """Return the first lines of the table: the bounds, and a title over each column."""
    from .verify import Tolerances

    bounds = Tolerances()
    return [
        f"relative L2 (worst case); bounds: kernel {bounds.kernel:g}, with bf16 activations {bounds.unquantized:g}; "
        f"float32 {bounds.none:g} and ratio {bounds.ratio:g} over many tokens; bf16 x: against float32 with bf16 activations",
        _row("layer".ljust(name_width), _COLUMNS),
    ]


def lines(report: LayerReport, name_width: int) -> list[str]:
    """Return the row of a layer, and a line for each reason, warning, failure and note."""
    texts = [*report.reasons, *(f"warning: {warning}" for warning in report.warnings)]
    texts += [f"FAIL {failure}" for failure in report.failures]
    for case in report.cases:
        about = f"FAIL {case.tokens} tokens, outliers x {case.outliers:g}, on {case.path}"
        texts += [f"{about}: {failure}" for failure in case.failures]
    if report.weight_error is not None:
        outputs = _worst([case for case in report.cases if case.outliers <= 1], "original_error")
        texts.append(f"against the unquantized model: weights {percent(report.weight_error)}, outputs {outputs}")
    row = _row(plain(report.layer.name).ljust(name_width), [cell(report) for _, cell in _COLUMNS.values()])
    return [row, *(f"{report.layer.name}: {text}" for text in (*texts, *report.notes))]


def _row(name: str, cells: Iterable[str]) -> str:
    padded = (cell.rjust(width) for cell, (width, _) in zip(cells, _COLUMNS.values(), strict=True))
    return "  ".join((name, *padded)).rstrip()


def write_report(
    file: Path | None, head: dict[str, Any], reports: list[LayerReport], errors: dict[str, str], status: str
) -> None:
    """Write the report, if there is a file for it. ``-``, pipes and devices get it once, at the end.

    ``errors`` maps a layer to the reason why it could not be verified. Raise UnusableError if the file cannot be written.
    """
    if file is None or (status == "running" and not is_replaceable(file)):
        return
    layers = [
        {
            **dataclasses.asdict(report.layer),
            **{name: value for name, value in dataclasses.asdict(report).items() if name != "layer"},
            "passed": report.passed,
            "cases": [{**dataclasses.asdict(case), "ratio": case.ratio} for case in report.cases],
        }
        for report in reports
    ]
    content = {**head, "status": status, "passed": status == "passed", "errors": errors, "layers": layers}
    write(file, json.dumps(_finite(content), indent=2, allow_nan=False, default=str) + "\n")


def _finite(value: Any) -> Any:
    """Replace floats that JSON cannot hold by the strings ``inf`` and ``nan``."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
