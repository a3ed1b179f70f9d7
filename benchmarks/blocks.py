# SPDX-License-Identifier: Apache-2.0
"""Blocks of pages, between begin and end lines, that are generated from result files and from the code.

``python -m benchmarks.results`` writes the blocks; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from benchmarks import floor, models
from benchmarks.markdown import table

Found = dict[str, dict[str, Any]]
"""Content of the files in docs/, by name."""
_BLOCK = re.compile(r"(<!-- (\w+): begin, written by python -m benchmarks\.results -->\n).*?(<!-- \2: end -->)", re.DOTALL)
NOT_MEASURED = "Not measured yet: no file of a run holds it."


def fill(text: str, found: Found, blocks: dict[str, Callable[[Found], list[str]]]) -> str:
    """Return the page with every block written anew.

    Raises:
        ValueError: the page names a block that does not exist.
    """

    def replaced(match: re.Match[str]) -> str:
        name = match[2]
        if name not in blocks:
            raise ValueError(f"no block {name}; there are {', '.join(blocks)}")
        return "\n".join([match[1], *(blocks[name](found) or [NOT_MEASURED]), "", match[3]])

    return _BLOCK.sub(replaced, text)


def warmup(found: Found) -> list[str]:
    """Return what ahead-of-time compilation costs."""
    if "warmup.json" not in found:
        return []
    rows = [
        [
            r["card"],
            r["format"],
            ", ".join(f"`{name}` {number}" for name, number in r["kernels"].items()),
            f"{r['compiled in s']:.0f}",
            f"{r['planned in s']:.1f}",
        ]
        for r in found["warmup.json"]["rows"]
    ]
    return table(["card", "format", "kernels", "compiled in s", "planned by a server in s"], rows)


def hopper(found: Found) -> list[str]:
    """Return the numbers of FlashInfer's kernels on a Hopper GPU: the worst over all token counts of a layer."""
    if "sm12x-on-hopper.json" not in found:
        return []
    run = found["sm12x-on-hopper.json"]
    rows = []
    for title, lines in (("", run["numbers"]), (", 48 SMs", run["GB10"]), (", staggered", run["staggered"])):
        for case, kernel in dict.fromkeys((line["case"], line["kernel"]) for line in lines):
            of = [line for line in lines if (line["case"], line["kernel"]) == (case, kernel)]
            worst = [max(line[column] for line in of) for column in ("kernel_points", "unquantized", "torch_kernel", "reruns")]
            tokens = sorted({line["tokens"] for line in of})
            span = f"{tokens[0]} to {tokens[-1]}" if len(tokens) > 1 else str(tokens[0])
            cells = [f"{worst[0]:.2g}", f"{worst[1]:.3f}", *(f"{value:.2g}" for value in worst[2:])]
            rows.append([f"{case}{title}", "direct micro" if kernel == "direct" else kernel, span, *cells])
    versions = run["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("flashinfer-python", "nvidia-cutlass-dsl", "torch", "triton"))
    head = f"{versions['GPU']}, {versions['date']}, {packages} ([every number](sm12x-on-hopper.json)):"
    return [head, "", *table(["layer", "kernel", "tokens", "kernel points", "unquantized", "torch kernel", "reruns"], rows)]


def own(found: Found) -> list[str]:
    """Return the numbers of our kernels for SM12x on a Hopper GPU: a row for each family of a layer."""
    if "own-on-hopper.json" not in found:
        return []
    run = found["own-on-hopper.json"]
    makers = {(f"Triton {r['triton']}" if "triton" in r else f"NVRTC {r['nvrtc']}", r["target"]) for r in run["own"]}
    compilers = ", ".join(f"{maker} for `{target}`" for maker, target in sorted(makers))
    gpus = " and ".join(sorted({r["gpu"] for r in run["own"]}))
    head = f"{gpus}, {run['date']}, torch {run['torch']}, {compilers} ([every number](own-on-hopper.json)):"
    names, numbers = ("layer", "format", "family"), ("forms", "kernels", "calls")
    merged: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in run["own"]:
        merged.setdefault(tuple(r[name] for name in names), []).append(r)

    def summed(rows: list[dict[str, Any]]) -> list[Any]:
        tokens = [r["token error"] for r in rows if "token error" in r]
        worst = [max(r["error"] for r in rows), max(tokens)]
        return [*(sum(r[name] for r in rows) for name in numbers), *(f"{error:.4f}" for error in worst)]

    rows = [
        [layer, form, f"`{family}`", *summed(of), f"{of[0]['bound']}, {max(r.get('token bound', 0) for r in of)}"]
        for (layer, form, family), of in merged.items()
    ]
    head_row = [*names, *numbers, "worst error", "of a token", "bounds"]
    return [head, "", *table(head_row, [*rows, ["all", "", "", *summed(run["own"]), ""]])]


def mutations(found: Found) -> list[str]:
    """Return the errors that a broken replacement of an instruction causes."""
    lines = found.get("own-on-hopper.json", {}).get("mutations", [])
    rows = [[r["format"], r["what"], f"{r['error']:.3g}", f"{r['error'] / r['bound']:.3g}"] for r in lines]
    return table(["format", "broken", "error", "times the bound"], rows) if rows else []


def starts(found: Found) -> list[str]:
    """Return seconds of a layer's first start, by card, format and caches."""
    lines = found.get("own-on-hopper.json", {}).get("starts", [])
    rows = []
    for card, form in dict.fromkeys((line["card"], line["format"]) for line in lines):
        by = {line["caches"]: line["seconds"] for line in lines if (line["card"], line["format"]) == (card, form)}
        cells = [
            f"{by[name]['load']:.1f} + {by[name]['first call']:.1f}" if name in by else "-"
            for name in ("empty", "second", "filled")
        ]
        rows.append([card, form, *cells, f"{by['warmup']:.0f}" if "warmup" in by else "-"])
    return table(["card", "format", "empty caches", "second start", "caches of `warmup`", "`warmup`"], rows) if rows else []


def baked(found: Found) -> list[str]:
    """Return the error of weights whose ``weight_scale_2`` is multiplied into the block scales."""
    if "sm12x-on-hopper.json" not in found:
        return []
    rows = [
        [
            f"{r['export']}, {'direct micro' if r['kernel'] == 'direct' else r['kernel']}",
            r["preparation"],
            f"{r['weight_error']:.1%}",
            f"{r['unquantized']:.3f}",
            f"{r['reference']:.3f}",
        ]
        for r in found["sm12x-on-hopper.json"]["exports"]
    ]
    return table(["export, kernel", "scales", "weights moved by", "output error", "the reference's own"], rows)


BLOCKS: dict[str, Callable[[Found], list[str]]] = {
    "models": lambda found: models.served(),
    "capabilities": lambda found: models.capabilities(),
    "warmup": warmup,
    "hopper": hopper,
    "baked": baked,
    "own": own,
    "mutations": mutations,
    "starts": starts,
    "reads": lambda found: floor.reads(),
    "steps": lambda found: floor.steps(),
    "published": lambda found: floor.beside(),
}
