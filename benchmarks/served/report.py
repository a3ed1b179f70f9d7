# SPDX-License-Identifier: Apache-2.0
"""Build ``served.json`` from the engines' records, its plot, and its tables for pages."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.served import compare, models
from benchmarks.served.sides import FLOAT32, PROMPT, WITH, WITHOUT, Runner, Step, by_side, steps

_SECONDS = {
    "construct": r"Initializing model took ([\d.]+) seconds",
    "load": r"Model loading took .* and ([\d.]+) seconds",
    "compile": r"torch\.compile (?:and initial profiling/warmup run together )?took ([\d.]+) s",
    "capture": r"Graph capturing finished in ([\d.]+) secs",
    "engine": r"init engine \(profile, create kv cache, warmup model\) took ([\d.]+) s",
}
"""Patterns of lines in vLLM's log. The last match counts."""
_SERVED = re.compile(r"(\w+ experts run on trtllm-b12x.*|vLLM's \w+ keeps the .*|vLLM keeps .*)")


def served(runner: Runner, found: dict[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """Return the content of ``served.json``.

    Args:
        found: card, driver and versions.
    """
    plan = runner.plan
    settings = {"prompt": PROMPT, "tokens": plan.tokens, "attention": plan.attention or "vLLM's choice"}
    entries = [{**model(runner, name), "command": list(command)} for name in plan.models]
    return {"form": 1, **found, "settings": settings, "models": entries}


def model(runner: Runner, name: str) -> dict[str, Any]:
    """Return the entry of one model. ``not_measured`` lists missing measurements with their reasons."""
    plan, all_steps = runner.plan, [step for step in steps(runner.plan) if step.model == name]
    records = {step: runner.record(step) for step in all_steps}
    random = name in models.DRAWN
    config = models.config(name, runner.layers(name)) if random else models.read(name)
    missing: list[dict[str, str]] = []
    entry: dict[str, Any] = {
        "model": name if random or not Path(name).is_dir() else Path(name).name,
        "format": models.DRAWN[name].format if random else models.format_of(config),
        "layers": models.text_config(config).get("num_hidden_layers"),
        "parallel": plan.parallel,
        "weights": "random" if random else "checkpoint",
        "requests": {},
        "ttft": {},
        "starts": {},
        "memory": {},
        "kernels": {},
        "served_by": {},
        "not_measured": missing,
    }
    if random and entry["layers"] < models.config(name)["num_hidden_layers"]:
        entry["layers_of"] = models.config(name)["num_hidden_layers"]
    for step, record in records.items():
        if step.name in runner.missing:
            missing.append({"what": step.title, "why": runner.missing[step.name]})
        elif not record:
            missing.append({"what": step.title, "why": "not run yet"})
        missing += [{"what": f"{step.title}, {what}", "why": why} for what, why in record.get("failed", {}).items()]
        lacking = record.get("judge", {}).get("not_measured", {})
        missing += [{"what": f"{name}: {what}", "why": why} for what, why in lacking.items()]
    for part, key in (("decode", "requests"), ("ttft", "ttft")):
        for count in map(str, plan.requests if part == "decode" else plan.prompts):
            if row := _times(all_steps, records, part, count):
                entry[key][count] = row
    for side, (first, *rest) in by_side(all_steps):
        _side(entry, side, first, rest, records, runner)
    entry["agreement"] = _agreement(all_steps, records)
    return entry


def _times(found: list[Step], records: dict[Step, dict[str, Any]], part: str, count: str) -> dict[str, float]:
    """Return the mean of both starts' medians by side, and the ratio of without to with."""
    row: dict[str, float] = {}
    for side, turns in by_side(found):
        cells = [cell for step in turns if (cell := records[step].get(part, {}).get(count))]
        if cells:
            row[f"{side}_ms"] = statistics.fmean(cell["ms"] for cell in cells)
            if part == "decode":
                row[f"{side}_p90_ms"] = statistics.fmean(cell["p90_ms"] for cell in cells)
                row[f"{side}_steps"] = sum(cell["steps"] for cell in cells)
    if f"{WITH}_ms" in row and f"{WITHOUT}_ms" in row:
        row["ratio"] = row[f"{WITHOUT}_ms"] / row[f"{WITH}_ms"]
    return row


def _side(
    entry: dict[str, Any], side: str, first: Step, rest: list[Step], records: dict[Step, dict[str, Any]], runner: Runner
) -> None:
    for step in (first, *rest):
        if start := records[step].get("start"):
            log = runner.path(step, ".log")
            seconds = start_seconds(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else {}
            entry["starts"].setdefault(side, {})[step.turn] = seconds | start
    record = records[first] or records[rest[0]] if rest else records[first]
    if facts := record.get("facts"):
        entry["memory"][side] = facts["memory"]
        log = runner.path(first, ".log")
        lines = _SERVED.findall(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else []
        entry["served_by"][side] = {name: facts[name] for name in ("experts", "backends", "attention", "kernels", "faults")}
        entry["served_by"][side]["log"] = list(dict.fromkeys(lines))
        entry.setdefault("settings", {})[side] = facts["settings"]
        if side == WITH and not facts["kernels"]:
            why = (
                " / ".join(entry["served_by"][side]["log"][-3:]) or "its log has no line; trtllm-b12x doctor may know the reason"
            )
            entry["not_measured"].insert(0, {"what": f"{entry['model']} with the package", "why": f"it served no layer: {why}"})
    if kernels := record.get("kernels"):
        entry["kernels"][side] = kernels


def start_seconds(log: str) -> dict[str, float]:
    """Return the seconds of each part of a start, from vLLM's log."""
    found = {name: re.findall(pattern, log) for name, pattern in _SECONDS.items()}
    return {name: float(values[-1]) for name, values in found.items() if values}


def _agreement(found: list[Step], records: dict[Step, dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    greedy = {
        (step.side, step.turn): row["greedy"] for step in found if (row := records[step].get("answers", {})) and "greedy" in row
    }
    ours = greedy.get((WITH, "first"))
    if ours:
        rows = {side: compare.answers(ours, other) for (side, turn), other in greedy.items() if turn == "first" and side != WITH}
        result["answers"] = rows
    alone = {
        side: compare.answers(greedy[side, "first"], other)
        for (side, turn), other in greedy.items()
        if turn == "one-gpu" and (side, "first") in greedy
    }
    if alone:
        result["answers_beside_one_gpu"] = alone
    judged: dict[str, Any] = next((records[step].get("judge", {}) for step in found if step.side == FLOAT32), {})
    return result | {name: judged[name] for name in ("logits", "layer") if name in judged}


# ---- text for readers ----------------------------------------------------------------------------------------------------


def headline(entry: dict[str, Any]) -> str:
    """Return a model's result in one line. Name the worst number of requests if the package is slower there."""
    ratios = {int(n): row["ratio"] for n, row in entry["requests"].items() if "ratio" in row}
    if not ratios:
        why = next((row["why"] for row in entry["not_measured"]), "nothing is measured yet")
        return f"{entry['model']}: not compared ({why})"
    worst, best = min(ratios, key=lambda n: ratios[n]), max(ratios, key=lambda n: ratios[n])
    text = f"{entry['model']}, {entry['format']}, {entry['layers']} layers: {ratios[best]:.2f} times as fast at {best} requests"
    if ratios[worst] < 1:
        return f"{text}, SLOWER at {worst} ({ratios[worst]:.2f}): TRTLLM_B12X=0 turns the package off"
    return f"{text}, {ratios[worst]:.2f} at {worst}"


def rows(content: dict[str, Any]) -> list[str]:
    """Return the markdown table of ``served.json``: TPOT without and with, and the ratio, by the number of requests."""
    counts = sorted({int(n) for entry in content["models"] for n in entry["requests"]})
    lines = []
    for entry in content["models"]:
        layers = f"{entry['layers']} of {entry['layers_of']}" if "layers_of" in entry else entry["layers"]
        title = f"{entry['model']}, {entry['format']}, {layers} layers, {entry['parallel']}"
        for name, key, form in (("without, ms", "without_ms", ".3f"), ("with, ms", "with_ms", ".3f"), ("ratio", "ratio", ".3f")):
            cells = [entry["requests"].get(str(n), {}).get(key) for n in counts]
            lines.append([title, name, *("-" if cell is None else format(cell, form) for cell in cells)])
    return table(["model", "TPOT at requests", *map(str, counts)], lines)


_BRIEF = 1, 8, 64
"""Requests at a time that the README shows."""


def brief(content: dict[str, Any]) -> list[str]:
    """Return the README's table: tokens a second without and with the package, and the ratio, at 1, 8 and 64 requests."""
    lines = []
    for entry in content["models"]:
        cells = [_rates(n, entry["requests"].get(str(n), {})) for n in _BRIEF]
        if any(cells):
            lines.append([f"{entry['model']}, {entry['format']}, {entry['parallel']}", *(cell or "-" for cell in cells)])
    card = content["card"]["name"]
    return table([f"tokens a second on {card}, without / with", *(f"{n} request{'s' * (n > 1)}" for n in _BRIEF)], lines)


def _rates(requests: int, row: dict[str, float]) -> str:
    if "ratio" not in row:
        return ""
    without, with_it = (1e3 * requests / row[f"{side}_ms"] for side in (WITHOUT, WITH))
    return f"{without:,.0f} / {with_it:,.0f} ({row['ratio']:.2f})"


def page(content: dict[str, Any]) -> list[str]:
    """Return what docs/results.md shows: where, how, the table, starts, and what was not measured with its reason."""
    card, versions = content["card"], content["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    text = [
        f"A token of a model served whole by vLLM, without and with the package, on {card['name']} ({named}).",
        "",
        *(f"- `{command}`" for command in _commands(content)),
        "",
        *rows(content),
        "",
    ]
    for entry in content["models"]:
        for part, what in (("layer", "one layer of experts"), ("logits", "logits under forced tokens")):
            if verdict := entry.get("agreement", {}).get(part, {}).get("verdict"):
                text.append(f"- {entry['model']}, {entry['format']}, {what}, relative error: {verdict}.")
        if yard := entry.get("agreement", {}).get("logits", {}).get("bfloat16"):
            own, given = (yard[name]["error"] for name in ("own routes", "routes of float32"))
            text.append(
                f"- The same logits with exact experts and activations in bfloat16: {own:.3g} from float32, and {given:.3g} "
                "if every token keeps its experts."
            )
        if seconds := _starts(entry):
            text.append(f"- {entry['model']}, {entry['parallel']}, seconds until it serves (to construct the model): {seconds}.")
        text += [f"- Not measured, {row['what']}: {row['why']}." for row in entry["not_measured"]]
    return text


def _starts(entry: dict[str, Any]) -> str:
    turns = {turn: None for side in entry["starts"].values() for turn in side}
    found = []
    for turn in turns:
        sides = {side: starts[turn] for side, starts in entry["starts"].items() if turn in starts}
        found.append(f"{turn} start " + ", ".join(f"{side} {s['ready']:.0f} ({s['construct']:.1f})" for side, s in sides.items()))
    return "; ".join(found)


def without_paths(value: Any) -> Any:
    """Return ``served.json`` as pages keep it: every folder of the machine is reduced to its last name."""
    if isinstance(value, str):
        return re.sub(r"(?<![\w.:])/(?:[\w.+-]+/)+(?=[\w.+-])", "", value)
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return {name: without_paths(item) for name, item in value.items()} if isinstance(value, dict) else value


def _commands(content: dict[str, Any]) -> list[str]:
    """Return the command lines of the runs that measured the models."""
    found = (without_paths(entry["command"]) for entry in content["models"])
    return list(dict.fromkeys(" ".join(["python -m benchmarks.served", *words]) for words in found))


def plot(content: dict[str, Any], path: Path) -> bool:
    """Draw TPOT over requests above, and the ratio below, a column for each model. Return False without matplotlib or numbers."""
    drawn = [entry for entry in content["models"] if any("ratio" in row for row in entry["requests"].values())]
    if not drawn:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(drawn), figsize=(4.4 * len(drawn) + 0.6, 6.4), squeeze=False, sharex="col", height_ratios=[3, 2], facecolor="white"
    )
    for column, entry in enumerate(drawn):
        times, ratios = axes[0][column], axes[1][column]
        counts = sorted(int(n) for n in entry["requests"])
        sides = [key for row in entry["requests"].values() for key in row if key.endswith("_ms") and "_p90" not in key]
        for side in dict.fromkeys(key.removesuffix("_ms") for key in sides):
            points = [(n, row[f"{side}_ms"]) for n in counts if f"{side}_ms" in (row := entry["requests"][str(n)])]
            color = {WITH: "#1f5fbf", WITHOUT: "#d9480f"}.get(side, "#555555")
            times.plot(*zip(*points, strict=True), marker="o", color=color, label=side)
        points = [(n, row["ratio"]) for n in counts if "ratio" in (row := entry["requests"][str(n)])]
        ratios.plot(*zip(*points, strict=True), marker="o", color="#1f5fbf")
        ratios.axhline(1, color="#777777", linestyle="--", linewidth=1)
        for n, ratio in points:
            ratios.annotate(f"{ratio:.2f}", (n, ratio), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=9)
        for axis in (times, ratios):
            axis.set_xscale("log", base=2)
            axis.set_xticks(counts, [str(n) for n in counts])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.margins(y=0.2)
        times.set_ylim(bottom=0)
        times.set_title(f"{entry['model']}\n{entry['format']}, {entry['layers']} layers, {entry['parallel']}", fontsize=12)
        ratios.set_xlabel("requests at a time")
    axes[0][0].set_ylabel("ms a token (TPOT), lower is better")
    axes[1][0].set_ylabel("without / with, higher is better")
    axes[0][0].legend(frameon=False)
    figure.suptitle(f"Served whole by vLLM on {content['card']['name']}", fontsize=14)
    figure.tight_layout()
    figure.savefig(path, dpi=130, facecolor="white")
    pyplot.close(figure)
    return True
