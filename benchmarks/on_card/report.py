# SPDX-License-Identifier: Apache-2.0
"""Write OUT/report.json, report.md, report.html and plots from what the steps wrote."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.on_card import comparison, greedy, in_vllm, page, plan
from benchmarks.on_card.comparison import Row
from benchmarks.on_card.steps import DONE, Step, write_json, write_text
from benchmarks.peers import pages, plots

FORM = 1
TURN_OFF = "TRTLLM_B12X=0 turns the package off, TRTLLM_B12X_KERNELS=triton,gemm,grouped leaves out one family, here cuda"
_PLOT = "kernels.png"
_ISSUE_VERSIONS = ("trtllm-b12x", "tensorrt-llm", "vllm", "flashinfer-python", "nvidia-cutlass-dsl", "torch", "triton")
_IN_VLLM = ("ours us", "marlin us")
_HELD = 0.9
"""Share of the highest clock. A card that holds less under load was throttled, or is in a slow state."""


def write(
    out: Path,
    facts: dict[str, Any],
    left_out: Sequence[str],
    steps: Sequence[Step],
    records: dict[str, dict[str, Any]],
    engine: str,
) -> dict[str, Any]:
    """Write the files. Return the content of report.json. ``engine`` is empty if no model was requested."""
    done = {name: record for name, record in records.items() if record["state"] == DONE}
    lacking = [
        {"step": s.name, "title": s.title, "because": records.get(s.name, {}).get("because", "the run was interrupted before it")}
        for s in steps
        if s.name not in done
    ]
    for name, record in done.items():
        if name.startswith("kernels-"):
            results = record["result"]["peers"]
            lacking += [{"step": name, "title": "a peer", "because": line} for line in results.get("not_measured", [])]
        if name.startswith("served-"):
            lines = in_vllm.not_measured(record["result"]["served"])
            lacking += [{"step": name, "title": "a part", "because": line} for line in lines]
    if not engine:
        lacking.append({"step": "bench", "title": "a model", "because": "no --model was given"})
    found = {
        "form": FORM,
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "card": facts,
        "settings_left_out": list(left_out),
        "doctor": done["doctor"]["result"] if "doctor" in done else None,
        "kernels": _of(done, "kernels-"),
        "paths": _of(done, "paths-"),
        "in_vllm": _of(done, "vllm-"),
        "engine": engine,
        "bench": [_bench(r) for name, r in done.items() if name.startswith("bench-")],
        "served": [_served(r) for name, r in done.items() if name.startswith("served-")],
        "other_backends": plan.ENGINES[engine].backends() if engine else {},
        "answers": _answers(done),
        "seconds": {name: record["seconds"] for name, record in done.items()},
        "done": list(done),
        "not_measured": lacking,
    }
    found["worse"] = [line for row in comparison.rows(found) for line in comparison.worse(row)]
    found["issue"] = issue(found)
    write_json(out / "report.json", found)
    text = markdown(found, bool(found["kernels"]) and plots.plot([found], out / _PLOT))
    write_text(out / "report.md", text)
    write_text(out / "report.html", page.html(text, out))
    return found


def _of(done: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): record["result"] for name, record in done.items() if name.startswith(prefix)}


def _bench(record: dict[str, Any]) -> dict[str, Any]:
    asked = record["asked"]
    return {
        "model": asked["model"],
        "load": asked["load"],
        "with": asked["with"],
        "backend": asked["backend"],
        **record["result"],
    }


def _served(record: dict[str, Any]) -> dict[str, Any]:
    """Return a model's result from ``benchmarks.served``, under the name that the user gave."""
    return {**record["result"]["served"], "model": record["asked"]["model"], "clocks": record["result"]["clocks"]}


def _answers(done: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the answers of each model that ran with and without the package."""
    by: dict[str, dict[bool, dict[str, Any]]] = {}
    for name, record in done.items():
        if name.startswith("answers-"):
            by.setdefault(record["asked"]["model"], {})[record["asked"]["with"]] = record["result"]
    return [{"model": model, **greedy.compare(runs[True], runs[False])} for model, runs in by.items() if len(runs) == 2]


# ---- markdown ------------------------------------------------------------------------------------------------------------


def markdown(found: dict[str, Any], drawn: bool = False) -> str:
    card = found["card"]
    gpu = card.get("card", {})
    smi = (card.get("nvidia_smi") or [{}])[0]
    title = f"{gpu.get('name', 'No GPU')}, {found['written']}"
    more = len(found["worse"]) - 1
    lines = [f"# {found['worse'][0]}{f', and {more} more' if more else ''}. {TURN_OFF}", "", f"{title}.", ""] if more >= 0 else []
    lines = lines or [f"# {title}", ""]
    lines += [f"- {line}" for line in found["worse"][1:]]
    lines += [
        "",
        f"{gpu.get('multi_processor_count', '?')} multiprocessors, {gpu.get('total_memory', 0) / 1e9:.0f} GB, driver "
        f"{smi.get('driver_version', 'unknown')}, {card['system']}, Python {card['python']}.",
        "",
        ", ".join(f"{name} {version}" for name, version in card["versions"].items()) + ".",
        "",
    ]
    if found["settings_left_out"]:
        lines += [f"Set, and left out of every step: {', '.join(found['settings_left_out'])}.", ""]
    lines += [f"![Microseconds of a layer, by tokens]({_PLOT})", ""] if drawn else []
    lines += _benchmarks(found) + greedy.section(found["answers"]) + _kernels(found) + _clocks(found)
    if found["doctor"]:
        lines += [
            "",
            "## doctor",
            "",
            *(f"- {name}: {value}" if name else f"- {value}" for name, value in found["doctor"]["facts"]),
        ]
    lines += ["", "## Not measured, because", ""]
    lines += [f"- {line['step']} ({line['title']}): {line['because']}" for line in found["not_measured"]] or [
        "Nothing is missing."
    ]
    if found["kernels"] and not drawn:
        lines += ["No plot: matplotlib is not installed (`pip install matplotlib`, then the same command draws it)."]
    lines += ["", "## Line for an issue", "", "```", issue(found), "```"]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def issue(found: dict[str, Any]) -> str:
    """Write the result of a card as one line: card, driver, versions, and for each model TPOT and answers."""
    card, versions = found["card"], found["card"]["versions"]
    driver = (card.get("nvidia_smi") or [{}])[0].get("driver_version", "unknown")
    parts = [f"{card.get('card', {}).get('name', 'no GPU')}, driver {driver}"]
    parts[0] += "".join(f", {name} {versions[name]}" for name in _ISSUE_VERSIONS if name in versions)
    rows = [row for row in comparison.rows(found) if row.metric == comparison.TPOT and row.change is not None]
    for model in dict.fromkeys([row.model for row in rows] + [one["model"] for one in found["answers"]]):
        of_model = [row for row in rows if row.model == model]
        said = [row.line for row in dict.fromkeys([*of_model[:1], *of_model[-1:]])]
        for one in (each for each in found["answers"] if each["model"] == model):
            said.append(f"{one['equal']} of {one['prompts']} greedy answers equal, worst margin {greedy.worst(one)}")
        parts.append(f"{Path(model).name}: {', '.join(said)}")
    return "; ".join(parts if len(parts) > 1 else [*parts, "no model measured with and without the package"])


def _benchmarks(found: dict[str, Any]) -> list[str]:
    rows = comparison.rows(found)
    if not rows:
        return []
    others = list(dict.fromkeys(name for row in rows for name in row.others))
    cells = [
        [Path(row.model).name, row.lengths, row.at_once, row.metric, *_values(row), row.better, row.published or "-"]
        + [_number(row.others.get(name)) for name in others]
        for row in rows
    ]
    titles = ["model", "in / out", "at a time", "metric", "with", "without", "change", "better", "published, others' kernels"]
    how = "trtllm-bench" if found["bench"] else "benchmarks.served"
    lines = [
        f"## {how}, with and without the package",
        "",
        *table([*titles, *(f"without, on {name}" for name in others)], cells),
        "",
    ]
    for run in found["bench"]:
        if run["with"] or run["backend"] in others:
            load = run["load"]
            lines.append(
                f"- {Path(run['model']).name}, {load['input_tokens']} / {load['output_tokens']}: {'; '.join(run['served'])}"
            )
    lines += [f"- {name} is not measured: {why}" for name, why in found["other_backends"].items() if why]
    return [*lines, ""]


def _values(row: Row) -> list[str]:
    change = "-" if row.change is None else f"{100 * row.change:+.1f} %"
    return [_number(row.with_it), _number(row.without), change]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _kernels(found: dict[str, Any]) -> list[str]:
    """Return each layer's times from ``benchmarks.peers``, ``tune`` and ``benchmarks.vllm``."""
    lines: list[str] = []
    for name, result in found["kernels"].items():
        results = result["peers"]
        head = f"A layer in a captured graph, random routing; the copy of the same run moves {results['copy'] / 1e12:.2f} TB/s."
        lines += [f"## {name}, one MoE layer", "", head, "", *pages.every_kernel(results), ""]
        tables = found["paths"][name]["tune"]["tables"] if name in found["paths"] else []
        times = {int(tokens): paths for one in tables for tokens, paths in one["microseconds"].items()}
        paths = list(dict.fromkeys(path for at in times.values() for path in at))
        if paths:
            lines += ["Microseconds of each path as a server calls it (`trtllm-b12x tune`); `host` is its CUTLASS:", ""]
            rows = [[tokens, *(pages.number(at.get(path)) for path in paths)] for tokens, at in sorted(times.items())]
            lines += [*table(["tokens", *paths], rows), ""]
        if name in found["in_vllm"]:
            layers = found["in_vllm"][name]["vllm"]["layers"]
            lines += ["Microseconds of the layer as vLLM calls it (`benchmarks.vllm`), with our experts and with its Marlin:", ""]
            cells = [[row["format"], row["tokens"], row["kernel"], *(pages.number(row[us]) for us in _IN_VLLM)] for row in layers]
            lines += [*table(["experts", "tokens", "kernel", "ours", "Marlin"], cells), ""]
    return lines


def _clocks(found: dict[str, Any]) -> list[str]:
    """Return the card's clocks before the run and under load."""
    rows = [[name, value] for name, value in (found["card"].get("clocks") or [{}])[0].items()]
    none = ["nvidia-smi gives no clocks here (WSL2, GB10 and some drivers hide them)."]
    lines = ["## Clocks", "", *(table(("before the run", ""), rows) if rows else none), ""]
    most = (found["card"].get("clocks") or [{}])[0].get("clocks.max.sm")
    loaded = [(r["load"], r["with"], r["clocks"]) for r in found["bench"]]
    runs = [(f"bench {load['input_tokens']}/{load['output_tokens']}, with={w}", clocks) for load, w, clocks in loaded]
    runs += [(f"served {Path(one['model']).name}", one["clocks"]) for one in found["served"]]
    runs += [(f"kernels {name}", result["clocks"]) for name, result in found["kernels"].items()]
    shown = [(name, clocks) for name, clocks in runs if clocks]
    if shown:
        names = list(dict.fromkeys(key for _, clocks in shown for key in clocks))
        cells = [[_range(clocks.get(key)) for key in names] for _, clocks in shown]
        titles = ["step (least, median, most)", *names]
        lines += [*table(titles, [[name, *row] for (name, _), row in zip(shown, cells, strict=True)]), ""]
    known = isinstance(most, (int, float))
    slow = [name for name, clocks in shown if known and clocks.get("clocks.sm", {}).get("most", most) < _HELD * most]
    if slow:
        lines += [
            f"Never at {_HELD:.0%} of {most:.0f} MHz: {', '.join(slow)}. Lock the clock (`sudo nvidia-smi -lgc {most:.0f}`; a "
            "DGX Spark has a slow state) and measure again with `--again`.",
            "",
        ]
    return lines


def _range(values: dict[str, float] | None) -> str:
    return "-" if values is None else f"{values['least']:g}, {values['median']:g}, {values['most']:g}"
