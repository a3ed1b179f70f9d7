# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.on_card OUT``: measure, then write OUT/report.html, report.md, report.json and plots."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import finish, folder, positive, utf8
from benchmarks.geometries import GEOMETRIES
from benchmarks.on_card import card, host, plan, recipes, refusals, report
from benchmarks.on_card.steps import DONE, FAILED, Runner, Step, StepError
from trtllm_b12x.tools.progress import UnusableError

_USUAL = ("Qwen3-30B-A3B", "Nemotron-3-Super", "Qwen3.6-35B-A3B")
_HOPPER = 9
"""Major compute capability. In vLLM the package serves Hopper only for measurements, if TRTLLM_B12X_HOPPER is set."""
_ALL, _SOME, _NOTHING, _INTERRUPTED = 0, 1, 2, 130


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.on_card",
        description="Measure the package on this card: kernels beside their peers, then each model with the package, without it, "
        "and on the engine's other backends: trtllm-bench or benchmarks.served, and the answers to 32 greedy prompts. "
        "OUT/report.html has it all in one file.",
        epilog="Run it in a checkout with the Python of the engine, in which the package is installed (pip install .).  "
        "A second start with the same OUT goes on where the first was interrupted.  "
        "Exit status: 0 all was measured, 1 the report says what was not, 2 wrong usage or no GPU, 130 interrupted.",
    )
    made.add_argument("out", type=folder, metavar="OUT", help="folder of the report")
    made.add_argument(
        "--engine",
        choices=list(plan.ENGINES),
        default=default_engine(),
        help="engine of the models (default: tensorrt-llm where it is installed and vLLM is not, else vllm; here %(default)s)",
    )
    made.add_argument(
        "--model", type=utf8, action="append", default=[], help="a checkpoint's folder or Hugging Face name; again for more"
    )
    made.add_argument("--concurrency", type=positive, nargs="+", default=[], help="only runs with so many requests at a time")
    made.add_argument(
        "--geometry",
        action="append",
        choices=list(GEOMETRIES),
        help=f"layers to time; again for more (default: those of the models, or {', '.join(_USUAL)})",
    )
    made.add_argument(
        "--vllm", type=utf8, metavar="FOLDER", default="", help="parts of vLLM's wheel (python -m benchmarks.peers --parts)"
    )
    made.add_argument("--no-kernels", action="store_true", help="skip the kernels: models alone")
    made.add_argument("--timeout", type=positive, default=90, metavar="MINUTES", help="limit for one command (default: 90)")
    made.add_argument("--again", nargs="*", metavar="STEP", help="measure all steps again, or those named")
    made.add_argument("--dry-run", action="store_true", help="print the steps and how long they may take, measure nothing")
    made.add_argument("--json", action="store_true", help="print the plan or the report as JSON")
    return made


def default_engine() -> str:
    """Return the default engine of this Python."""
    installed = [name for name, engine in plan.ENGINES.items() if importlib.util.find_spec(engine.module) is not None]
    return "tensorrt-llm" if installed == ["tensorrt-llm"] else "vllm"


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    of_models = [name for model in given.model if (name := recipes.recipe_for(model).model) in GEOMETRIES]
    geometries = [] if given.no_kernels else given.geometry or of_models or list(_USUAL)
    models, geometries, concurrency = (list(dict.fromkeys(values)) for values in (given.model, geometries, given.concurrency))
    for model in models:
        if not host.is_model(model):
            name = recipes.RECIPES[0].hf_name
            return _wrong(f"--model {model} is neither a folder that exists nor a Hugging Face name such as {name}")
        try:
            why = refusals.refusal(model, given.engine)
        except UnusableError as error:
            return _wrong(f"--model {error}")
        if why:
            return _wrong(f"--model {model}: {why}. With and without the package would be the same; choose another model")
    engine = plan.ENGINES[given.engine]
    known = {count for model in models for count in engine.requests(model)}
    if models and set(concurrency) - known:
        return _wrong(
            f"--concurrency {' '.join(map(str, concurrency))}: these models are run at {sorted(known)}; choose among them"
        )
    vllm = str(Path(given.vllm).absolute()) if given.vllm else ""
    steps = plan.steps(given.engine, models, geometries, concurrency, vllm)
    unknown = sorted(set(given.again or ()) - {step.name for step in steps})
    if unknown:
        names = ", ".join(step.name for step in steps)
        return _wrong(f"--again {' '.join(unknown)}: no such step; with these options the steps are {names}")
    out: Path = given.out.absolute()
    left_out = sorted(name for name in os.environ if name.startswith("TRTLLM_B12X"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRTLLM_B12X")}
    say: Callable[[str], None] = (lambda text: print(text, file=sys.stderr, flush=True)) if given.json else _say
    runner = Runner(out, 60.0 * given.timeout, say, environment)
    try:
        facts = card.look(environment)
    except StepError as error:
        return _wrong(str(error))
    except KeyboardInterrupt:
        return _INTERRUPTED
    runner.on, runner.gpu = card.identity(facts), facts.get("card", {}).get("gpu", "")
    if given.engine == "vllm" and facts.get("card", {}).get("capability", [0])[0] == _HOPPER:
        runner.environment["TRTLLM_B12X_HOPPER"] = "1"
    anew = {step.name for step in steps} if given.again == [] else set(given.again or ())
    records = {step.name: found for step in steps if step.name not in anew and (found := runner.stored(step))}
    todo = [step for step in steps if step.name not in records]
    if given.dry_run:
        _plan(steps, todo, given.json)
        for model in models:
            print(host.fits(model, facts.get("card", {}).get("total_memory")), file=sys.stderr if given.json else sys.stdout)
        return _ALL
    if not facts.get("card"):
        return _wrong(
            "torch sees no GPU. Run this where torch.cuda.is_available() is True (trtllm-b12x doctor shows the driver); "
            "--dry-run prints the plan anywhere"
        )
    try:
        (out / "steps").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _wrong(f"OUT {out} must be a folder that can be written ({error.strerror}); choose another one")
    status = _ALL
    try:
        try:
            _measure(runner, todo, records)
        except KeyboardInterrupt:
            status = _INTERRUPTED
            say("interrupted: what was measured is kept, the same command goes on")
        found = report.write(out, facts, left_out, steps, records, given.engine if models else "")
    except OSError as error:
        return _wrong(f"{error.filename or out}: cannot be written ({error.strerror}); fix that, then run the same command again")
    for line in found["worse"][:1]:
        say(f"{line}. {report.TURN_OFF}")
    if given.json:
        print(json.dumps(found))
    else:
        say(f"{out / 'report.html'}: {len(found['done'])} of {len(steps)} steps measured; report.md and report.json say the same")
        print(f"Line for an issue:\n{found['issue']}", flush=True)
    return status or (_SOME if found["not_measured"] else _ALL)


def _measure(runner: Runner, todo: list[Step], records: dict[str, dict[str, Any]]) -> None:
    """Run the steps, and add the record of each step to ``records``."""
    left = sum(step.minutes for step in todo)
    for number, step in enumerate(todo):
        runner.say(f"[{number}/{len(todo)}] {step.minutes:g} of {left:.0f} min: {step.title}")
        missing = [name for name in step.needs if records.get(name, {}).get("state") != DONE]
        if missing:
            because = f"{missing[0]}: {records.get(missing[0], {}).get('because', 'not done')}"
            records[step.name] = {"state": FAILED, "because": because}
        else:
            records[step.name] = runner.run(step)
        left -= step.minutes
        runner.say(f"{step.name}: {_told(step.name, records[step.name])}")


def _told(step: str, record: dict[str, Any]) -> str:
    """Return a step's outcome as one line."""
    if record["state"] != DONE:
        return f"not measured: {record['because']}"
    result = record["result"]
    if step.startswith("served-"):
        times = result["served"]["requests"].items()
        return "TPOT P50 with / without: " + ", ".join(
            f"{count}: {one['with_ms']:.2f} / {one['without_ms']:.2f} ms"
            for count, one in times
            if {"with_ms", "without_ms"} <= one.keys()
        )
    if "tpot_ms" not in result:
        return f"done in {record['seconds']:.0f} s"
    tpot, ttft, rate = result["tpot_ms"]["p50"], result["ttft_ms"]["p50"], result["output_tokens_per_second"]
    return f"TPOT P50 {tpot:.2f} ms, TTFT P50 {ttft:.1f} ms, {rate:.1f} output tokens/s"


def _plan(steps: list[Step], todo: list[Step], as_json: bool) -> None:
    if as_json:
        print(json.dumps([{"step": s.name, "title": s.title, "minutes": s.minutes, "done": s not in todo} for s in steps]))
        return
    for step in steps:
        print(f"{'  done' if step not in todo else f'{step.minutes:4g} m'}  {step.name}: {step.title}")
    print(f"about {sum(step.minutes for step in todo):.0f} minutes, and the loads of models that are not in memory's cache")


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _wrong(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return _NOTHING


if __name__ == "__main__":
    finish(main)
