# SPDX-License-Identifier: Apache-2.0
"""Compare a model with the package to the same model without it, in either engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import published
from benchmarks.on_card.recipes import CUTLASS, recipe_for

TPOT = published.TPOT
NOISE = 0.02
"""Relative slowdown up to which a difference is not called worse."""
_METRICS = (
    (TPOT, lambda run: run["tpot_ms"]["p50"], "less"),
    (published.TTFT, lambda run: run["ttft_ms"]["p50"], "less"),
    (published.OUTPUT, lambda run: run["output_tokens_per_second"], "more"),
)


@dataclass(frozen=True)
class Row:
    """One metric of a model under one load."""

    model: str
    lengths: str
    """Tokens in and out."""
    at_once: int | str
    """Requests at a time."""
    metric: str
    better: str
    """``less`` or ``more``."""
    with_it: float | None
    without: float | None
    others: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Values without the package on other backends, by their names."""
    published: str = ""
    same: frozenset[str] = frozenset()
    """Backends in ``others`` that the engine also chose without the package, so that they repeat the same run."""

    @property
    def change(self) -> float | None:
        """Return how much larger the value is with the package, as a share. None if a side is missing."""
        return self.with_it / self.without - 1 if self.with_it and self.without else None

    @property
    def load(self) -> str:
        tokens = f"{self.lengths.replace(' / ', ' in, ')} out, " if self.lengths != "-" else ""
        return f"{tokens}{self.at_once} at a time"

    @property
    def line(self) -> str:
        metric, _, unit = self.metric.partition(", ")
        beside = "".join(f", {value:.2f} {unit} on {name}" for name, value in self.others.items())
        assert self.change is not None
        both = f"{self.with_it:.2f} {unit} with, {self.without:.2f} {unit} without ({100 * self.change:+.1f} %)"
        return f"{self.load}, {metric} {both}{beside}"


def rows(found: dict[str, Any]) -> list[Row]:
    """Return a report's measurements of whole models."""
    return [*_bench(found["bench"]), *(row for model in found["served"] for row in served(model))]


def worse(row: Row) -> list[str]:
    """Return a line if the model is slower with the package than without it, or than on another backend.

    It must be slower than the slowest of equal runs without the package: on a busy host they have differed by 22 %.
    """
    lines, slowest = [], max if row.better == "less" else min
    again = [value for name, value in row.others.items() if name in row.same]
    without = slowest(row.without, *again) if row.without and again else row.without
    others = [(f"without it on {name}", value) for name, value in row.others.items() if name not in row.same]
    for name, value in (("without it", without), *others):
        if not row.with_it or not value:
            continue
        slower = row.with_it / value - 1 if row.better == "less" else value / row.with_it - 1
        if slower > NOISE:
            metric, _, unit = row.metric.partition(", ")
            values = f"{metric} {row.with_it:.2f} {unit}, {name} {value:.2f} {unit}"
            lines.append(f"Slower with the package by {100 * slower:.1f} %: {Path(row.model).name}, {row.load}, {values}")
    return lines


def _bench(runs: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield the metrics of ``trtllm-bench``."""
    by: dict[Any, dict[tuple[bool, str], dict[str, Any]]] = {}
    for run in runs:
        key = run["model"], run["load"]["input_tokens"], run["load"]["output_tokens"], run["load"]["concurrency"] or 0
        by.setdefault(key, {})[run["with"], run.get("backend", CUTLASS)] = run
    for (model, *_), sides in by.items():
        load = next(iter(sides.values()))["load"]
        for metric, read, better in _METRICS:
            values = {side: read(run) for side, run in sides.items()}
            others = {name: value for (with_it, name), value in values.items() if not with_it and name != CUTLASS}
            beside = [f for f in published.of(recipe_for(model).model, load["concurrency"], metric) if _same(f, load)]
            yield Row(
                model,
                f"{load['input_tokens']} / {load['output_tokens']}",
                load["concurrency"] or "all",
                metric,
                better,
                values.get((True, CUTLASS)),
                values.get((False, CUTLASS)),
                others,
                ", ".join(f"{f.value:g} ({f.path}, {f.card})" for f in beside),
            )


def _same(figure: published.Published, load: dict[str, Any]) -> bool:
    """Return whether the load has the lengths that a published figure states."""
    words = figure.recipe.split(", ")
    wanted = {f"{load['input_tokens']} in", f"{load['output_tokens']} out"}
    return all(word in wanted for word in words if word.endswith((" in", " out")))


def served(model: dict[str, Any]) -> Iterator[Row]:
    """Yield the times of ``benchmarks.served``: TPOT by requests at a time, TTFT by the tokens of a prompt."""
    chosen = {name: side.get("backends") for name, side in model.get("served_by", {}).items()}
    same = frozenset(
        name for name, backends in chosen.items() if name != "with" and backends and backends == chosen.get("without")
    )
    for metric, times in ((TPOT, model["requests"]), (published.TTFT, model.get("ttft") or {})):
        for count, sides in times.items():
            values = {
                name.removesuffix("_ms"): value for name, value in sides.items() if name.endswith("_ms") and "_p90" not in name
            }
            with_it, without = values.pop("with", None), values.pop("without", None)
            lengths, at_once = ("-", int(count)) if metric == TPOT else (f"{count} / 1", 1)
            others = {name: value for name, value in values.items() if value}
            yield Row(model["model"], lengths, at_once, metric, "less", with_it, without, others, same=same)
