"""``python -m benchmarks.on_card.compare OUT DECODE.json``: are the report's kernel numbers those of the benchmark run by itself?

DECODE.json is what ``python -m benchmarks.moe_decode`` wrote on the same card.  What does not go by time has to be equal, times
within ``--within``.  Prints JSON; exit status 0 equal, 1 not, 2 nothing in common.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

EXACT = ("experts", "megabytes", "launches", "tiles", "error")
_KEY = ("geometry", "split", "routing", "tokens")


def compared(report: dict[str, Any], alone: dict[str, Any], within: float) -> dict[str, Any]:
    own = {_key(line): line for result in report["kernels"].values() for line in result["moe_decode"]["lines"]}
    other = {_key(line): line for line in alone["lines"]}
    common = [key for key in own if key in other]
    differ = [
        [*key, name, own[key][name], other[key][name]]
        for key in common
        for name in EXACT
        if not _same(own[key], other[key], name)
    ]
    ratios = {key: own[key]["us"] / other[key]["us"] for key in common}
    apart = [[*key, "us", own[key]["us"], other[key]["us"]] for key, ratio in ratios.items() if abs(ratio - 1) > within]
    return {
        "gpu": [report["card"].get("card", {}).get("name"), alone["gpu"]],
        "lines": len(common),
        "only_one": len(own) + len(other) - 2 * len(common),
        "differ": differ,
        "apart": apart,
        "median_ratio": statistics.median(ratios.values()) if ratios else None,
        "worst_ratio": max(ratios.values(), key=lambda ratio: abs(ratio - 1)) if ratios else None,
        "equal": bool(common) and not differ and not apart,
    }


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in _KEY)


def _same(a: dict[str, Any], b: dict[str, Any], name: str) -> bool:
    return a[name] == b[name] or (a[name] != a[name] and b[name] != b[name])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_card.compare", description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the report")
    parser.add_argument("decode", type=Path, help="what benchmarks.moe_decode wrote")
    parser.add_argument("--within", type=float, default=0.05, help="of the time alone (default 0.05)")
    given = parser.parse_args(arguments)
    report, alone = (json.loads(path.read_text(encoding="utf-8")) for path in (given.out / "report.json", given.decode))
    found = compared(report, alone, given.within)
    print(json.dumps(found, indent=1))
    return 0 if found["equal"] else 1 if found["lines"] else 2


if __name__ == "__main__":
    sys.exit(main())
