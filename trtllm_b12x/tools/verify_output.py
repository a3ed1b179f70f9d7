"""Print the table of ``verify`` line by line, and keep its JSON report up to date."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_b12x.core.version import __version__
from trtllm_b12x.decision import Environment
from trtllm_b12x.decision.families import FAMILIES
from trtllm_b12x.dispatch.schedule import default_crossover

from .progress import UnusableError, is_replaceable, plain, write

if TYPE_CHECKING:
    from .verify import CaseReport, LayerReport

_NAME_WIDTH = 24
"""Columns are left out before a layer's name is cut below this."""

_UNQUANTIZED = frozenset(row.name for row in FAMILIES if row.features(Environment()).arithmetic == "UNQUANTIZED")
"""Families that do not quantize activations. They have no error against the reference that does."""


def _worst(cases: list[CaseReport], name: str) -> str:
    values = [value for case in cases if (value := getattr(case, name)) is not None]
    return f"{max(values):.4f}" if values else "-"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


_COLUMNS: dict[str, tuple[int, Callable[[LayerReport], str]]] = {
    "served by": (9, lambda r: r.served_by),
    "E/k/H/I": (16, lambda r: f"{r.num_experts}/{r.top_k}/{r.hidden_size}/{r.intermediate_size}"),
    "kernel": (6, lambda r: _worst(r.cases, "rel_l2_kernel")),
    "float32": (7, lambda r: _worst([case for case in r.cases if case.path not in _UNQUANTIZED], "rel_l2_none")),
    "ratio": (6, lambda r: _worst(r.cases, "ratio")),
    "bf16 x": (6, lambda r: _worst(r.cases, "error")),
    "padding": (13, lambda r: f"{r.bytes.padding:,}" if r.bytes else "-"),
    "extra bytes": (11, lambda r: f"{r.bytes.extra:,}" if r.bytes else "-"),
    "baked scales": (12, lambda r: percent(r.baked_weight_error)),
    "": (4, lambda r: ("ok" if r.passed else "FAIL") if r.compared or not r.passed else "-"),
}
"""Title to width and cell."""

_DROPPED = ["E/k/H/I", "padding", "baked scales", "bf16 x", "ratio", "extra bytes", "float32", "served by"]
"""Columns that a narrow terminal leaves out, in this order. The JSON has them all."""


class Table:
    """Print one line per layer with ``line``."""

    def __init__(self, names: list[str], to_stderr: bool, line: Callable[[str, bool], None]) -> None:
        width, longest = _width(to_stderr), max(len(plain(name)) for name in names)
        self._titles, dropped = list(_COLUMNS), iter(_DROPPED)
        while self._left(width) < min(longest, _NAME_WIDTH) and (title := next(dropped, None)):
            self._titles.remove(title)
        self._name_width = max(8, min(longest, self._left(width)))
        self._started = False
        self.line = lambda text: line(text, to_stderr)

    def _left(self, width: int) -> int:
        """Return the columns of the terminal that are left for names."""
        return width - sum(2 + _COLUMNS[title][0] for title in self._titles)

    def add(self, report: LayerReport) -> None:
        from .verify import Tolerances

        if not self._started:
            self._started = True
            bounds = Tolerances()
            self.line(
                f"relative L2 (worst case); bounds: kernel {bounds.kernel:g}; float32 {bounds.none:g} and ratio {bounds.ratio:g} "
                "over many tokens; bf16 x: against float32 with unquantized activations"
            )
            self._row("layer", self._titles)
        name = plain(report.name)
        if len(name) > self._name_width:
            name = "..." + name[3 - self._name_width :]
        self._row(name, [_COLUMNS[title][1](report) for title in self._titles])
        details = [*report.reasons, *(f"warning: {warning}" for warning in report.warnings)]
        details += [f"FAIL {failure}" for failure in report.failures]
        for case in report.cases:
            about = f"FAIL {case.tokens} tokens, outliers x {case.outliers:g}, on {case.path}"
            details += [f"{about}: {failure}" for failure in case.failures]
        if report.weight_error is not None:
            outputs = _worst([case for case in report.cases if case.outliers <= 1], "original_error")
            details.append(f"against the unquantized model: weights {percent(report.weight_error)}, outputs {outputs}")
        for text in (*details, *report.notes):
            self.line(f"{report.name}: {text}")

    def _row(self, name: str, cells: list[str]) -> None:
        padded = [
            cell.ljust(_COLUMNS[title][0]) if title == "served by" else cell.rjust(_COLUMNS[title][0])
            for cell, title in zip(cells, self._titles, strict=True)
        ]
        self.line("  ".join((name.ljust(self._name_width), *padded)).rstrip())


def _width(to_stderr: bool) -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    stream = sys.stderr if to_stderr else sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else 160


class JsonReport:
    """The report as a file that is complete after each layer. ``-``, pipes and devices get it once, at the end.

    Raises:
        UnusableError: the file cannot be written. Checked before any layer is verified.
    """

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self._path, self._header = path, {"trtllm_b12x": __version__, **header}
        if path is not None and path.is_dir():
            raise UnusableError(f"{path}: cannot be written (it is a folder); choose another file")
        self.write([], {}, "running")

    def write(self, reports: list[LayerReport], errors: dict[str, str], status: str) -> None:
        """``status``: running, passed, failed, unusable, nothing compared, interrupted."""
        if self._path is None or (status == "running" and not is_replaceable(self._path)):
            return
        layers = [
            {
                **dataclasses.asdict(report),
                "passed": report.passed,
                "cases": [{**dataclasses.asdict(case), "ratio": case.ratio} for case in report.cases],
            }
            for report in reports
        ]
        content = {**self._header, "status": status, "passed": status == "passed", "errors": errors, "layers": layers}
        write(self._path, json.dumps(_finite(content), indent=2, allow_nan=False, default=str) + "\n")


def header(checkpoint: Path, device: str, tp: int, ep: int, seed: int, algorithms: Iterable[str]) -> dict[str, Any]:
    """Return the head of the report: what the numbers are computed with."""
    from trtllm_b12x.engines.trtllm.machine import candidate_kernels

    from .verify import Tolerances

    kernels = (kernel.features.name for name in algorithms for kernel in candidate_kernels(device, name).values())
    return {
        "checkpoint": checkpoint,
        "device": device,
        "tp": tp,
        "ep": ep,
        "seed": seed,
        "kernel": "+".join(dict.fromkeys(kernels)),
        "crossover": default_crossover(),
        "tolerances": dataclasses.asdict(Tolerances()),
    }


def _finite(value: Any) -> Any:
    """Replace floats that JSON cannot hold by the strings ``inf`` and ``nan``."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
