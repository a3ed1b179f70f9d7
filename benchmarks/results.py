# SPDX-License-Identifier: Apache-2.0
"""Write docs/results.md and the blocks of other pages: ``python -m benchmarks.results``.

Every number comes from a file that a run wrote. The page lists missing files. ``--take FILE ...`` first copies files that
benchmarks wrote into docs/, without details of the machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import blocks, floor
from benchmarks.markdown import table
from benchmarks.on_card import comparison, greedy
from benchmarks.on_card.recipes import CUTLASS
from benchmarks.peers import pages as of_peers
from benchmarks.peers.others import PEERS
from benchmarks.served import report as of_served

ROOT = Path(__file__).parents[1]
NOWHERE = "not measured"
_FACTS = {"gpu", "copy", "format", "lines"}


@dataclass(frozen=True)
class Source:
    """A file in docs/ and the run that writes it."""

    file: str
    what: str
    command: str
    is_it: Callable[[dict[str, Any]], bool]


def _of_peers(file: str, form: str, kernels: str) -> Source:
    command = "python -m benchmarks.peers" + (f" --format {form.lower()}" if form != "NVFP4" else "")

    def is_it(found: dict[str, Any]) -> bool:
        return found.keys() >= _FACTS and found["format"] == form and "split" in (found["lines"] or [{}])[0]

    return Source(file, f"time of whole {form} layers on the {kernels}", command, is_it)


SOURCES = (
    Source(
        "decode.json",
        "host time and scratch memory of the driver of FlashInfer's kernels",
        "python -m benchmarks.decode",
        lambda found: "host microseconds" in found,
    ),
    Source(
        "warmup.json",
        "time of kernels that are compiled ahead of time",
        "python -m benchmarks.warmup",
        lambda found: found.keys() >= {"rows", "geometry"},
    ),
    Source(
        "sm12x-on-hopper.json",
        "numbers of FlashInfer's SM120 kernels, translated, and of the ways to prepare weights",
        "make device",
        lambda found: "GB10" in found,
    ),
    Source(
        "own-on-hopper.json",
        "numbers of our kernels for SM120 and SM121, translated",
        "make device-own",
        lambda found: found.keys() >= {"own", "mutations", "starts"},
    ),
    _of_peers("moe-decode.json", "NVFP4", "decode kernels"),
    _of_peers("moe-w4a16.json", "W4A16_NVFP4", "decode kernels"),
    _of_peers("moe-mxfp4.json", "MXFP4", "decode kernels"),
    _of_peers("moe-mxfp8.json", "MXFP8", "decode and grouped kernels"),
    Source(
        "vllm.json",
        "time of whole layers inside vLLM, beside its Marlin",
        "python -m benchmarks.vllm",
        lambda found: found.keys() >= {"gpu", "versions", "layers"},
    ),
    Source(
        "served.json",
        "time of a token of whole models in vLLM, with and without",
        "python -m benchmarks.served",
        lambda found: found.keys() >= {"card", "versions", "models"},
    ),
)


def load(docs: Path) -> dict[str, dict[str, Any]]:
    """Return the content of the existing files by name. Reports of cards are ``on-card/NAME.json``."""
    names = [source.file for source in SOURCES] + [f"on-card/{path.name}" for path in sorted(docs.glob("on-card/*.json"))]
    return {name: json.loads((docs / name).read_text(encoding="utf-8")) for name in names if (docs / name).exists()}


class WrongNumbersError(ValueError):
    """A number that kernels computed is beyond its bound."""


def beyond_bounds(found: dict[str, Any]) -> list[str]:
    """Return a line for each number of a run of ``make device-own`` that is beyond its bound or missing (NaN).

    A mutation must be found: its error is at least 10 times the bound.
    """

    def within(value: float | None, bound: float) -> bool:
        return value is not None and value <= bound

    wrong = []
    for r in found.get("own", []):
        for name, bound in (("error", "bound"), ("token error", "token bound")):
            if bound in r and not within(r[name], r[bound]):
                wrong.append(f"{r['layer']}, {r['format']}, {r['family']}, {r['target']}: {name} {r[name]}, at most {r[bound]}")
    for r in found.get("mutations", []):
        if r["what"] == "nothing" and not within(r["error"], r["bound"]):
            wrong.append(f"{r['format']}, small layer: error {r['error']}, at most {r['bound']}")
        if r["what"] != "nothing" and within(r["error"], 10 * r["bound"]):
            wrong.append(f"{r['format']}, {r['what']}: error {r['error']}, at least {10 * r['bound']}")
    starts = (r for r in found.get("starts", []) if not r.get("captured", True))
    return wrong + [f"{r['card']}, {r['format']}, {r['caches']}: a graph computes something else" for r in starts]


def take(path: Path, docs: Path) -> Path:
    """Copy the file of a run into ``docs``. Return the new path.

    Raises:
        ValueError: the file is not one of the known files, or has wrong numbers.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: None)  # NaN to None
        source = next((source for source in SOURCES if source.is_it(found)), None)
        wrong = beyond_bounds(found) if source is not None and source.file == "own-on-hopper.json" else []
        if wrong:
            raise WrongNumbersError(f"{path} is not taken, as it has wrong numbers:\n" + "\n".join(wrong))
        if source is not None:
            found = of_served.without_paths(found) if source.file == "served.json" else found
            target, kept = docs / source.file, _with_other_models(found, docs / source.file)
        elif {"form", "card", "kernels", "bench", "not_measured"} <= found.keys():
            name = re.sub(r"[^a-z0-9]+", "-", found["card"]["card"]["name"].lower()).strip("-")
            target, kept = docs / "on-card" / f"{name}.json", _of_a_card(found)
        else:
            raise ValueError("it has not the form of any")
    except WrongNumbersError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: not a file that a benchmark wrote: {error}") from None
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return target


_BY_MODEL = {"vllm.json": ("gpu", "layers", ("model", "format")), "served.json": ("card", "models", ("model", "parallel"))}
"""Files to which a run of some models adds rows: key of the card, key of the rows, and keys that name a row's model."""


def _with_other_models(found: dict[str, Any], earlier: Path) -> dict[str, Any]:
    """Return a run with an earlier run's rows of other models before it, if both have the same card and versions."""
    if earlier.name not in _BY_MODEL or not earlier.exists():
        return found
    card, rows, names = _BY_MODEL[earlier.name]
    before = json.loads(earlier.read_text(encoding="utf-8"))
    if any(before[name] != found[name] for name in (card, "versions")):
        return found
    run = [[line[name] for name in names] for line in found[rows]]
    others = [line for line in before[rows] if [line[name] for name in names] not in run]
    return {**found, rows: others + found[rows]}


def _of_a_card(found: dict[str, Any]) -> dict[str, Any]:
    """Return a card's report without serial numbers, paths and logs."""
    card = {name: found["card"].get(name) for name in ("card", "versions", "clocks", "python", "cuda_of_torch")}
    card["card"] = {name: value for name, value in card["card"].items() if name != "gpu"}
    card["driver"] = (found["card"].get("nvidia_smi") or [{}])[0].get("driver_version")
    runs = [
        {name: value for name, value in run.items() if name not in ("command", "said")} | {"model": Path(run["model"]).name}
        for run in found["bench"]
    ]
    lacking = [{"step": line["step"], "title": line["title"]} for line in found["not_measured"]]
    kept = {name: found[name] for name in ("form", "written", "kernels", "paths")}
    served = [one | {"model": Path(one["model"]).name} for one in found.get("served", [])]
    answers = [one | {"model": Path(one["model"]).name} for one in found.get("answers", [])]
    return {**kept, "card": card, "bench": runs, "served": served, "answers": answers, "not_measured": lacking}


# ---- the numbers ---------------------------------------------------------------------------------------------------------


_LAYERS = (
    ("moe-decode.json", "Qwen3-30B-A3B", ""),
    ("moe-decode.json", "Qwen3-30B-A3B", "marlin"),
    ("moe-decode.json", "Qwen3-30B-A3B", "triton_kernels"),
    ("moe-w4a16.json", "Qwen3.6-35B-A3B", "dequantize"),
    ("moe-mxfp4.json", "gpt-oss-120b", "triton_kernels"),
)
"""Layers of the short table in docs/results.md: file, layer and peer, or "" for the bandwidth of a copy."""
_WHOSE = {
    "marlin": "vLLM's Marlin, NVFP4",
    "triton_kernels": "OpenAI's triton_kernels, MXFP4",
    "dequantize": "experts written to bfloat16, then multiplied, as TensorRT-LLM does",
}


def gains(found: dict[str, dict[str, Any]], short: bool) -> list[list[str]]:
    """Return what a user gains, from the files that exist, most useful first. ``short``: only the lines of the README.

    A line has the subject, the value with the package, the value and source of the alternative, the card, and the file.
    """
    lines = _of_cards(found)
    for file, name, peer in _LAYERS[1:2] if short else _LAYERS:
        lines += _of_a_layer(found[file], file, name, peer) if file in found else []
    if "decode.json" in found and not short:
        lines += _of_the_driver(found["decode.json"])
    return lines


def _of_cards(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    lines = []
    for file, report in found.items():
        if not file.startswith("on-card/"):
            continue
        card = report["card"]["card"]["name"]
        for one in report.get("answers", []):
            said = f"{one['equal']} of {one['prompts']} as without, worst margin {greedy.worst(one)}"
            lines.append([f"greedy answers of {one['model']}", said, "-", card, file])
        for row in (row for model in report.get("served", []) for row in comparison.served(model)):
            if row.metric == comparison.TPOT and row.with_it and row.without:
                both = [f"{row.with_it:.2f} ms", f"{row.without:.2f} ms: vLLM's own choice"]
                lines.append([f"a token of {row.model}, {row.load} in vLLM (TPOT P50)", *both, card, file])
        own = [run for run in report["bench"] if run.get("backend", CUTLASS) == CUTLASS]
        runs = {(r["model"], _load(r["load"]), r["with"]): r for r in own}
        for (model, load, with_it), run in runs.items():
            other = runs.get((model, load, False))
            if with_it and other:
                times = [f"{r['tpot_ms']['p50']:.2f} ms, {r['output_tokens_per_second']:.0f} tokens/s" for r in (run, other)]
                lines.append([f"a token of {model}, {load} (TPOT P50)", times[0], f"{times[1]}: the host's CUTLASS", card, file])
    return lines


def _load(load: dict[str, Any]) -> str:
    return f"{load['input_tokens']} in, {load['output_tokens']} out, {load['concurrency'] or 'all'} at a time"


def _of_a_layer(found: dict[str, Any], file: str, name: str, peer: str) -> list[list[str]]:
    ours = of_peers.whole_layers(found).get(name, {})
    theirs = {line["tokens"]: line["us"] for line in found.get(peer) or [] if line["geometry"] == name and line["us"]}
    counts = [tokens for tokens in (1, 8, 64) if tokens in ours and (not peer or tokens in theirs)]
    if not counts:
        return []
    form = "" if found["format"] == "NVFP4" else f"{found['format']} "
    here = ", ".join(f"{ours[n]['us']:.0f}" for n in counts) + " us"
    other = "-"
    if peer:
        other = ", ".join(f"{theirs[n]:.0f}" for n in counts) + f" us: {_WHOSE[peer]}"
    else:
        here += ": " + ", ".join(f"{ours[n]['fraction']:.0%}" for n in counts) + " of the bandwidth of a copy"
    return [[f"decode of a {form}{name} layer, {' / '.join(map(str, counts))} tokens", here, other, found["gpu"], file]]


def _of_the_driver(found: dict[str, Any]) -> list[list[str]]:
    lines = []
    for row in found["memory"]:
        what = f"scratch memory, {row['layers']} layers of {row['layer']} on b12x, up to {row['capacity']} tokens"
        total = row["layers"] * row["B12xMoEWrapper per layer, sized by the crossover"]
        other = f"{_size(total)}: FlashInfer's B12xMoEWrapper for as many tokens, one a layer"
        lines.append([what, _size(row["ours, all layers"]), other, found["gpu"], "decode.json"])
    row = next((r for r in found["host microseconds"] if r["tokens"] == 1 and "B12xMoEWrapper.run" in r), None)
    if row:
        other = f"{row['B12xMoEWrapper.run']:.0f} us: B12xMoEWrapper.run"
        what = f"host time of a call of 1 token outside graphs, {row['layer']}"
        lines.append([what, f"{row['run_moe']:.0f} us", other, found["gpu"], "decode.json"])
    return lines


def _size(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"


# ---- pages ---------------------------------------------------------------------------------------------------------------

_HEAD = """# Results

What was measured and where, what is inferred, and what nobody has measured. Written by `python -m benchmarks.results` of the
files that runs wrote; a number that no file has is not here.

## Measured
"""
_INFERRED = """
## Inferred

- From bytes and bandwidths: the least time of a decode step on each card, [floor.md](floor.md).
- From the translation to Hopper: that what b12x computes there it computes on SM12x, product for product. Not its speed.

## Measured by nobody
"""


def page(found: dict[str, dict[str, Any]]) -> str:
    """Return the text of docs/results.md."""
    rows = []
    for source in SOURCES:
        if source.file in found:
            rows.append([source.what, _where(found[source.file]), f"[{source.file}]({source.file})"])
        else:
            rows.append([source.what, f"no file: `{source.command} OUT`, then `--take`", source.file])
    cards = {name: report for name, report in found.items() if name.startswith("on-card/")}
    for name, report in cards.items():
        what = (
            "kernels and whole models, with and without the package"
            if report["bench"] or report.get("served")
            else "time of layers, no model served"
        )
        rows.append([what, _where_card(report), f"[{name}]({name})"])
    text = [_HEAD]
    if "served.json" in found:
        text += ["### Models served whole", "", *of_served.page(found["served.json"]), "", "### All", ""]
    text += [*table(["what", "where", "file"], rows), "", "In short:", "", *_table(gains(found, False)), ""]
    text += [*_every_layer(found), _INFERRED.strip(), ""]
    return "\n".join([*text, *_open(found, cards)]) + "\n"


def _by_tokens(head: str, cells: Mapping[tuple[str, str, int], str]) -> list[str]:
    """Return a table with a row for each layer and kernel and a column for each token count."""
    counts = sorted({tokens for _, _, tokens in cells})
    rows = [[*key, *(cells.get((*key, n), "-") for n in counts)] for key in dict.fromkeys(key[:2] for key in cells)]
    return [head, "", *table(["layer", "kernel", *map(str, counts)], rows), ""]


def _every_layer(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table for each file of peers, and one of the layers that vLLM calls."""
    text = []
    for file in ("moe-decode.json", "moe-w4a16.json", "moe-mxfp4.json", "moe-mxfp8.json"):
        results = found.get(file, {"lines": []})
        cells: dict[tuple[str, str, int], str] = {}
        for line in results["lines"]:
            if line["split"] == "TP1":
                cells[line["geometry"], f"`{line['kernel']}`", line["tokens"]] = f"{line['us']:.0f} ({line['fraction']:.2f})"
        for peer in PEERS if cells else ():
            for line in results.get(peer) or []:
                if line["us"] is not None:
                    cells[line["geometry"], of_peers.label(peer, line), line["tokens"]] = f"{line['us']:.0f}"
        if cells:
            head = f"One {results['format']} layer by tokens, microseconds (share of the bandwidth of a copy), [{file}]({file}):"
            text += _by_tokens(head, dict(sorted(cells.items())))
    if "vllm.json" in found:
        letters = {"cuda": "c", "triton": "t", "gemm": "m", "grouped": "g"}
        families = ", ".join(f"`{family}` ({letter})" for family, letter in letters.items())
        head = f"One layer inside vLLM by tokens, microseconds, by {families}, [vllm.json](vllm.json):"
        cells = {}
        for line in found["vllm.json"]["layers"]:
            name = f"{line['model']}, {line['format']}"
            cells[name, "ours", line["tokens"]] = f"{line['ours us']:.0f} {letters[line['kernel'].split()[0]]}"
            cells[name, "vLLM's Marlin", line["tokens"]] = f"{line['marlin us']:.0f}"
        text += _by_tokens(head, cells)
    return text


def _where(found: dict[str, Any]) -> str:
    versions = found.get("versions") or {name: found[name] for name in ("torch", "triton")}
    gpu = found.get("gpu") or found.get("card", {}).get("name") or versions.get("GPU") or "no GPU"
    return f"{gpu}; " + ", ".join(f"{name} {version}" for name, version in versions.items() if name != "GPU")


def _where_card(report: dict[str, Any]) -> str:
    card = report["card"]
    versions = ", ".join(f"{name} {version}" for name, version in card["versions"].items())
    return f"{card['card']['name']}, driver {card['driver']}, {report['written'][:10]}; {versions}"


def _open(found: dict[str, dict[str, Any]], cards: dict[str, Any]) -> list[str]:
    """Return a line for each result that no file has."""
    real = [name for name, report in cards.items() if report["card"]["card"]["capability"][0] == 12]
    lines = []
    if not real:
        lines.append(
            "- Any time on an SM12x card: no TTFT, TPOT or tokens a second. `python -m benchmarks.on_card` measures them."
        )
    models = {run["model"] for name in real for run in found[name]["bench"] + found[name].get("served", [])}
    for model in floor.MODELS:
        if not any(model.lower() in name.lower() for name in models):
            lines.append(f"- {model} served whole, with and without the package, on any card.")
    lines += [f"- {source.what}: not in a file ({source.file})." for source in SOURCES if source.file not in found]
    if not any(report["paths"] for report in cards.values()):
        lines.append("- The host's own CUTLASS beside any of these kernels on the same card.")
    lines.append("- More than one card, in time: tensor and expert parallelism are measured as shares of a layer on one.")
    return lines


def in_short(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the README's table: models served whole, or else one decode layer, and the measurements on SM12x cards."""
    served = of_served.brief(found["served.json"]) if "served.json" in found else []
    lines = _of_cards(found) if served else gains(found, True)
    return [*served, *([""] if served and lines else []), *(_table(lines, "docs/") if lines or not served else [])]


def _table(lines: list[list[str]], link: str = "") -> list[str]:
    rows = [[*cells, f"[{file}]({link}{file})"] for *cells, file in lines]
    if not any(row[0].startswith("a token of") for row in rows):
        rows.insert(0, ["time of a token, served whole", NOWHERE, "-", "no SM12x card yet", "`python -m benchmarks.on_card`"])
    return table(["", "with the package", "otherwise", "measured on", "in"], rows)


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Return the expected text of every page with generated figures or tables."""
    docs = root / "docs"
    found = load(docs)
    written = {docs / "results.md": page(found)}
    parts = {**blocks.BLOCKS, "results": in_short}
    for path in sorted([*root.glob("*.md"), *docs.glob("*.md")]):
        if path not in written:
            written[path] = blocks.fill(path.read_text(encoding="utf-8"), found, parts)
    return written


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("--take", type=Path, nargs="+", default=[], metavar="FILE", help="first copy these results into docs/")
    given = parser.parse_args(arguments)
    try:
        for path in given.take:
            print(f"{path} -> {take(path, root / 'docs')}")
        stale = {
            path: text for path, text in pages(root).items() if not path.exists() or path.read_text(encoding="utf-8") != text
        }
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
        print(f"{path} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
