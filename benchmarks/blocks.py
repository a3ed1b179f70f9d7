"""Parts of pages that are written from files of runs and from the code: what stands between their begin and end lines.

``python -m benchmarks.results`` writes them; a test compares.
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
    names = {"mxfp8": "`triton` and `grouped`, MXFP8"}
    rows = [
        [
            names.get(r["kernels"], f"`{r['kernels']}`, NVFP4"),
            r["number"],
            f"{r['compiled in s']:.0f}",
            f"{r['planned in s']:.1f}",
        ]
        for r in found["warmup.json"]["rows"]
    ]
    return table(["kernels", "number", "compiled in s", "planned by a server in s"], rows)


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
    head = f"{run['gpu']}, {run['date']}, torch {run['torch']}, triton {run['triton']} ([every number](own-on-hopper.json)):"
    columns = ("layer", "format", "family", "forms", "kernels", "calls")
    rows = [
        [*(f"`{r[name]}`" if name == "family" else r[name] for name in columns), f"{r['error']:.4f}", r["bound"]]
        for r in run["own"]
    ]
    total = [
        "all",
        "",
        "",
        *(sum(r[name] for r in run["own"]) for name in columns[3:]),
        f"{max(r['error'] for r in run['own']):.4f}",
        "",
    ]
    return [head, "", *table([*columns, "worst error", "bound"], [*rows, total])]


def mutations(found: Found) -> list[str]:
    """Return what a broken replacement of an instruction does to the numbers."""
    lines = found.get("own-on-hopper.json", {}).get("mutations", [])
    rows = [[r["format"], r["what"], f"{r['error']:.2f}", f"{r['error'] / r['bound']:.0f}"] for r in lines]
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
