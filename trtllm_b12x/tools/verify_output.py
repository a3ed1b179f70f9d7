"""Print the table of ``verify`` line by line, and keep its JSON report up to date."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_b12x.core.version import __version__
from trtllm_b12x.decision import Environment
from trtllm_b12x.decision.families import FAMILIES
from trtllm_b12x.dispatch.schedule import default_crossover

if TYPE_CHECKING:
    from .verify import CaseReport, LayerReport, Tolerances

_NAME_WIDTH = 24
"""Columns are left out before a layer's name is cut below this."""

_UNQUANTIZED = frozenset(row.name for row in FAMILIES if row.features(Environment()).arithmetic == "UNQUANTIZED")
"""Families that do not quantize activations. They have no error against the reference that does."""


def plain(text: object) -> str:
    """Escape what a terminal would interpret or cannot encode. Names come from the checkpoint."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(text))


def worst(cases: list[CaseReport], name: str) -> str:
    values = [value for case in cases if (value := getattr(case, name)) is not None]
    return f"{max(values):.4f}" if values else "-"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


# ---- table -----------------------------------------------------------------------------------------------------------

_COLUMNS: tuple[tuple[str, int, Callable[[LayerReport], str]], ...] = (
    ("served by", 9, lambda r: r.served_by),
    ("E/k/H/I", 16, lambda r: f"{r.num_experts}/{r.top_k}/{r.hidden_size}/{r.intermediate_size}"),
    ("kernel", 6, lambda r: worst(r.cases, "rel_l2_kernel")),
    ("float32", 7, lambda r: worst([case for case in r.cases if case.path not in _UNQUANTIZED], "rel_l2_none")),
    ("ratio", 6, lambda r: worst(r.cases, "ratio")),
    ("bf16 x", 6, lambda r: worst(r.cases, "error")),
    ("padding", 13, lambda r: f"{r.bytes.padding:,}" if r.bytes else "-"),
    ("extra bytes", 11, lambda r: f"{r.bytes.extra_payload + r.bytes.extra_scales:,}" if r.bytes else "-"),
    ("baked scales", 12, lambda r: percent(r.baked_weight_error)),
    ("", 4, lambda r: ("ok" if r.passed else "FAIL") if r.compared or not r.passed else "-"),
)

_DROPPED = ("E/k/H/I", "padding", "baked scales", "bf16 x", "ratio", "extra bytes", "float32", "served by")
"""Columns that a narrow terminal leaves out, in this order. The JSON has them all."""


class Table:
    """Print one line per layer."""

    def __init__(self, names: list[str], tolerances: Tolerances, to_stderr: bool) -> None:
        width, longest = _width(to_stderr), max(len(plain(name)) for name in names)
        dropped = 0
        while dropped < len(_DROPPED) and self._taken(dropped) + min(longest, _NAME_WIDTH) > width:
            dropped += 1
        self._columns = [column for column in _COLUMNS if column[0] not in _DROPPED[:dropped]]
        self._name_width = max(8, min(longest, width - self._taken(dropped)))
        self._to_stderr, self._started, self._tolerances = to_stderr, False, tolerances

    @staticmethod
    def _taken(dropped: int) -> int:
        return sum(2 + width for title, width, _ in _COLUMNS if title not in _DROPPED[:dropped])

    def add(self, report: LayerReport) -> None:
        if not self._started:
            self._started = True
            bounds = self._tolerances
            self.line(
                f"relative L2 (worst case); bounds: kernel {bounds.kernel:g}; float32 {bounds.none:g} and ratio {bounds.ratio:g} "
                "over many tokens; bf16 x: against float32 with unquantized activations"
            )
            self._row("layer", [title for title, *_ in self._columns])
        name = plain(report.name)
        if len(name) > self._name_width:
            name = "..." + name[3 - self._name_width :]
        self._row(name, [cell(report) for _, _, cell in self._columns])
        self._details(report)

    def _row(self, name: str, cells: list[str]) -> None:
        padded = [
            cell.ljust(width) if title == "served by" else cell.rjust(width)
            for cell, (title, width, _) in zip(cells, self._columns, strict=True)
        ]
        self.line("  ".join((name.ljust(self._name_width), *padded)).rstrip())

    def _details(self, report: LayerReport) -> None:
        warnings = (f"warning: {warning}" for warning in report.warnings)
        for text in (*report.reasons, *warnings, *(f"FAIL {failure}" for failure in report.failures)):
            self.line(f"{report.name}: {text}")
        for case in report.cases:
            for failure in case.failures:
                self.line(f"{report.name}: FAIL {case.tokens} tokens, outliers x {case.outliers:g}, on {case.path}: {failure}")
        if report.weight_error is not None:
            outputs = worst([case for case in report.cases if case.outliers <= 1], "original_error")
            self.line(f"{report.name}: against the unquantized model: weights {percent(report.weight_error)}, outputs {outputs}")
        for note in report.notes:
            self.line(f"{report.name}: {note}")

    def line(self, text: str) -> None:
        click.echo(plain(text), err=self._to_stderr)


def _width(to_stderr: bool) -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    stream = sys.stderr if to_stderr else sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else 160


@contextmanager
def progress(
    total: int, about: str = "verifying", what: str = "layer"
) -> Iterator[tuple[Callable[..., None], Callable[[], Any]]]:
    """Show a progress bar on standard error, if that is a terminal.

    Yields:
        A function that sets how many are done (and optionally the total), and a context in which lines may be printed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True, redirect_stdout=False, redirect_stderr=False
    )

    @contextmanager
    def paused() -> Iterator[None]:
        bar.stop()
        try:
            yield
        finally:
            bar.start()

    with bar:
        many = f" {total} {what}{'' if total == 1 else 's'}" if what else ""
        task = bar.add_task(f"{about}{many}", total=total)
        yield (lambda done, of=None: bar.update(task, completed=done, total=of)), paused


# ---- JSON ------------------------------------------------------------------------------------------------------------


class Json:
    """The report as a file that is complete after each layer: written next to ``path``, then renamed.

    ``-``, pipes and devices get it once, at the end.

    Raises:
        OSError: the file cannot be written. Checked before any layer is verified.
    """

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self.path, self._header = path, {"trtllm_b12x": __version__, **header}
        # Replace plain files; write to pipes and devices.
        self._at_once = path is not None and str(path) != "-" and (path.is_file() or not path.exists())
        if path is not None and path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        self.write([], {}, "running")

    def write(self, reports: list[LayerReport], errors: dict[str, str], status: str) -> None:
        """``status``: running, passed, failed, unusable, nothing compared, interrupted."""
        if self.path is None or (status == "running" and not self._at_once):
            return
        content = {
            **self._header,
            "status": status,
            "passed": status == "passed",
            "errors": errors,
            "layers": [
                {
                    **dataclasses.asdict(report),
                    "passed": report.passed,
                    "cases": [{**dataclasses.asdict(case), "ratio": case.ratio} for case in report.cases],
                }
                for report in reports
            ],
        }
        text = json.dumps(_finite(content), indent=2, allow_nan=False, default=str) + "\n"
        if str(self.path) == "-":
            click.echo(text, nl=False)
        elif not self._at_once:
            self.path.write_text(text, encoding="utf-8")
        else:
            from trtllm_b12x.core import disk

            disk.replace(self.path, text)


def header(checkpoint: Path, device: str, tp: int, ep: int, seed: int, algorithms: Iterable[str]) -> dict[str, Any]:
    """Return the head of the report: what the numbers are computed with."""
    from trtllm_b12x.engines.trtllm.eligibility import considered

    from .verify import Tolerances

    kernels = (kernel.features.name for name in algorithms for kernel in considered(device, name).values())
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
