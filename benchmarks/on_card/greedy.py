# SPDX-License-Identifier: Apache-2.0
"""Compare a model's greedy answers with and without the package: the first different token, and its margin."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.on_card import package_log
from benchmarks.on_card.prompts import PROMPTS
from benchmarks.on_card.steps import Runner, StepError

SCRIPT = Path(__file__).with_name("answers.py")
MAX_TOKENS = 64
SMALL = 0.5
"""Margin in nats. Below it, a different order of additions in a layer may choose the other token."""
_SHOWN = 40
"""Characters of a prompt or an answer in the report."""


def ask(runner: Runner, name: str, engine: str, model: str, options: dict[str, Any], with_it: bool) -> dict[str, Any]:
    """Run ``answers.py`` in a process of its own.

    Raises:
        StepError: the engine is not installed, the model does not fit, or the package was not on or off as asked.
    """
    request, answers = runner.path(name, ".request.json"), runner.path(name, ".answers.json")
    local = str(Path(model).absolute()) if Path(model).is_dir() else model
    content = {"engine": engine, "model": local, "options": options, "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
    request.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    answers.unlink(missing_ok=True)
    command = [sys.executable, str(SCRIPT), str(request), str(answers)]
    done = runner.command(name, command, TRTLLM_B12X="1" if with_it else "0")
    if not answers.exists():
        raise StepError(f"the process ended with 0 and wrote no answers; out of memory looks so: {done.log}")
    found: dict[str, Any] = json.loads(answers.read_text(encoding="utf-8"))
    answers.unlink()
    served, said = package_log.served(done.log, with_it)
    return {**found, "served": served, "said": said, "clocks": done.clocks}


def compare(with_it: dict[str, Any], without: dict[str, Any]) -> dict[str, Any]:
    """Count equal answers and describe each difference, the largest margin first."""
    both = zip(PROMPTS, with_it["answers"], without["answers"], strict=True)
    parted = [{"prompt": prompt, **found} for prompt, ours, theirs in both if (found := difference(ours, theirs))]
    parted.sort(key=lambda each: math.inf if each["margin"] is None else each["margin"], reverse=True)
    return {
        "prompts": len(PROMPTS),
        "equal": len(PROMPTS) - len(parted),
        "differences": parted,
        "repeated": {"with": sum(with_it["repeated"]), "without": sum(without["repeated"])},
    }


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first token that differs, or None.

    ``token`` counts from 0. ``margin`` is the difference of the two tokens' log-probabilities in the run without the package,
    in nats. If ``bound`` is true, it is a lower bound: our token is not one of the likeliest tokens that the engine listed.
    ``margin`` is None if the engine listed too few tokens.
    """
    pairs = itertools.zip_longest(ours["tokens"], theirs["tokens"])
    at = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        return None
    tokens = [answer["tokens"][at] if at < len(answer["tokens"]) else None for answer in (ours, theirs)]
    listed = theirs["logprobs"][at] if at < len(theirs["logprobs"]) else {}
    listed = {token: value for token, value in listed.items() if math.isfinite(value)}
    our_value, their_value = (listed.get(str(token)) for token in tokens)
    margin, bound = None, False
    if their_value is not None and our_value is not None:
        margin = their_value - our_value
    elif their_value is not None and len(listed) > 1:
        margin, bound = their_value - min(listed.values()), True
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours["text"], theirs["text"], strict=False)))
    texts = [answer["text"][max(0, same - _SHOWN // 2) :][:_SHOWN] for answer in (ours, theirs)]
    return {"token": at, "tokens": tokens, "margin": margin, "bound": bound, "with": texts[0], "without": texts[1]}


def margin(each: dict[str, Any]) -> str:
    """Format a difference's margin."""
    if each["margin"] is None:
        return "not known"
    return f"{'at least ' if each['bound'] else ''}{each['margin']:.2f} nats"


def worst(compared: dict[str, Any]) -> str:
    """Format the largest margin at which the answers differ."""
    parted = compared["differences"]
    return margin(parted[0]) if parted else "none"


def section(answers: list[dict[str, Any]]) -> list[str]:
    """Return the report's lines on greedy answers."""
    if not answers:
        return []
    rows = []
    for one in answers:
        exact = [each["margin"] for each in one["differences"] if each["margin"] is not None and not each["bound"]]
        small = sum(1 for value in exact if value < SMALL)
        count, repeated = one["prompts"], one["repeated"]
        counts = [f"{one['equal']} of {count}", small, count - one["equal"] - small, worst(one)]
        rows.append([Path(one["model"]).name, *counts, f"{repeated['with']} of {count}", f"{repeated['without']} of {count}"])
    titles = ["model", "equal to the end", f"differ below {SMALL} nats", "differ above, or unknown", "worst margin"]
    lines = [f"## {len(PROMPTS)} greedy prompts, with and without the package", ""]
    lines += [*table([*titles, "repeated with", "repeated without"], rows), ""]
    lines += [
        f"Each answer has up to {MAX_TOKENS} tokens. The margin belongs to the first token that differs: it is the difference of",
        f"the two tokens' log-probabilities in the run without the package. Below {SMALL} nats, other arithmetic explains it.",
        "Repeated: a second round of the same run gave the same answer. CUTLASS may differ from itself: its fused finalize is",
        "not deterministic with top-k above 2 (`disable_finalize_fusion` in TensorRT-LLM's reference of `MoeConfig`).",
        "",
    ]
    for one in answers:
        rows = [
            [_code(each["prompt"]), each["token"], margin(each), _code(each["with"]), _code(each["without"])]
            for each in one["differences"]
        ]
        if rows:
            lines += [f"### {Path(one['model']).name}: where answers part", ""]
            lines += [*table(["prompt", "token", "margin", "with", "without"], rows), ""]
    return lines


def _code(text: str) -> str:
    """Quote a model's text for a table's cell: one line without Markdown."""
    line = " ".join(text[:_SHOWN].replace("`", "'").replace("|", r"\|").split())
    return f"`{line}`" if line else "-"
