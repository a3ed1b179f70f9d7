# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.served OUT MODEL ...``: serve models with vLLM, with and without the package; write OUT/served.json."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import finish, folder, positive, utf8
from benchmarks.on_card import card
from benchmarks.on_card.steps import StepError, write_json
from benchmarks.served import models, report, sides
from trtllm_b12x.core.errors import first_line
from trtllm_b12x.environment import packages
from trtllm_b12x.tools.progress import print_line, progress_bar

_ALL, _SOME, _NOTHING, _INTERRUPTED = 0, 1, 2, 130
_PACKAGES = ("trtllm-b12x", "vllm", "torch", "triton", "flashinfer-python", "triton-kernels", "transformers")
_SPLITS = ("qwen3_moe", "gpt_oss")
"""``model_type`` whose random weights can be split over GPUs."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.served",
        description="Serve models with vLLM on this card, with and without the package, each side in its own process: time of a "
        "token (TPOT), time to the first token, kernels, memory, seconds of starts, and agreement with float32. "
        "OUT/served.json and OUT/served.png have it all.",
        epilog=f"Names with random weights: {', '.join(models.DRAWN)}.  Run it with the Python of vLLM, in which the package is "
        "installed (pip install .).  A second start with the same OUT goes on where the first was interrupted.  "
        "Exit status: 0 all was measured, 1 served.json says what was not, 2 wrong usage or no GPU, 130 interrupted.",
    )
    made.add_argument("out", type=folder, metavar="OUT", help="folder of the results, caches and logs")
    made.add_argument(
        "models", type=utf8, nargs="+", metavar="MODEL", help="a checkpoint's folder or Hugging Face name, or a name below"
    )
    made.add_argument(
        "--requests", type=_counts, default=(1, 2, 4, 8, 16, 32, 64), help="requests at a time (default: 1,2,...,64)"
    )
    made.add_argument(
        "--prompts", type=_counts, default=(256, 2048, 8192), help="prompts of TTFT (default: 256,2048,8192 tokens)"
    )
    made.add_argument("--tokens", type=positive, default=256, help="tokens that each request decodes (default: 256)")
    made.add_argument("--layers", type=positive, default=0, help="layers of models with random weights (default: what fits)")
    made.add_argument("--tensor-parallel", type=positive, default=1, metavar="N", help="GPUs that share a model (default: 1)")
    made.add_argument("--enable-expert-parallel", action="store_true", help="split the experts, not each expert, over the GPUs")
    made.add_argument(
        "--without-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="one more side: vLLM's --moe-backend NAME, such as marlin",
    )
    made.add_argument("--attention", default="", metavar="NAME", help="vLLM's attention backend (default: its own choice)")
    made.add_argument(
        "--parallel", type=positive, default=1, metavar="N", help="engines that start at once; one is measured at a time"
    )
    made.add_argument("--seconds", type=positive, default=0, metavar="N", help="stop after so many seconds; the rest is named")
    made.add_argument("--again", action="store_true", help="measure everything again")
    made.add_argument("--dry-run", action="store_true", help="print the engines and how long they may take, measure nothing")
    made.add_argument("--json", action="store_true", help="print the plan or the result as JSON")
    made.add_argument("--plot", choices=("png", "none"), default="png", help="write OUT/served.png (default), or no plot")
    return made


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive(word) for word in text.split(",")}))


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parser().parse_args(arguments)
    plan = sides.Plan(
        models=tuple(dict.fromkeys(given.models)),
        requests=given.requests,
        prompts=given.prompts,
        tokens=given.tokens,
        layers=given.layers,
        tensor_parallel=given.tensor_parallel,
        expert_parallel=given.enable_expert_parallel,
        without_backends=tuple(dict.fromkeys(name.lower().replace("-", "_") for name in given.without_backend)),
        attention=given.attention,
    )
    if why := _refusal(plan):
        return _wrong(why)
    todo = sides.steps(plan)
    if given.dry_run:
        return _dry_run(todo, given.json)
    if why := _lacking() or _unreadable(plan):
        return _wrong(why)
    try:
        found = _card()
    except StepError as error:
        return _wrong(str(error))
    if "card" not in found:
        return _wrong("torch sees no GPU. Run this where torch.cuda.is_available() is True; --dry-run prints the plan anywhere")
    if plan.tensor_parallel > found["gpus"]:
        return _wrong(f"--tensor-parallel {plan.tensor_parallel}: torch sees {found['gpus']} GPUs; choose a smaller number")
    out: Path = given.out.absolute()
    try:
        (out / "records").mkdir(parents=True, exist_ok=True)
        if given.again:
            for name in ("records", "caches"):
                shutil.rmtree(out / name, ignore_errors=True)
            (out / "records").mkdir()
    except OSError as error:
        return _wrong(f"OUT {out} must be a folder that can be written ({error.strerror}); choose another one")
    identity = {name: found[name] for name in ("card", "versions")}
    deadline = time.monotonic() + given.seconds if given.seconds else float("inf")

    def say(text: str) -> None:
        print_line(f"{time.strftime('%H:%M:%S')} {text}", err=given.json)

    runner = sides.Runner(plan, out, found["card"], identity, deadline, given.parallel, say=say)
    status, content = _measure(runner, todo, lambda: _write(runner, found, arguments, say))
    if content is None:
        content = _write(runner, found, arguments, say)
    if given.plot == "png" and not report.plot(content, out / "served.png"):
        say("no plot: matplotlib is not installed, or no model was measured on both sides")
    if given.json:
        print(json.dumps(content))
    else:
        for entry in content["models"]:
            print_line(report.headline(entry))
        print_line(str(out / "served.json"))
    return status or (_SOME if any(entry["not_measured"] for entry in content["models"]) else _ALL)


def _measure(runner: sides.Runner, todo: list[sides.Step], write: Any) -> tuple[int, Any]:
    """Run the steps that are not measured yet. Return the exit status and the last content of ``served.json``."""
    content = None
    left = [step for step in todo if not runner.done(step)]
    try:
        with progress_bar("engines") as set_progress:

            def changed() -> None:
                nonlocal content
                content = write()
                set_progress(sum(map(runner.done, todo)), len(todo))

            runner.changed = changed
            set_progress(len(todo) - len(left), len(todo))
            runner.run(left)
    except KeyboardInterrupt:
        runner.say("interrupted: what was measured is kept, the same command goes on")
        return _INTERRUPTED, content
    return _ALL, content


def _write(runner: sides.Runner, found: dict[str, Any], arguments: list[str], say: Any) -> dict[str, Any]:
    """Write ``served.json``, and print what is new in it."""
    path = runner.out / "served.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": []}
    content = report.served(runner, found, arguments)
    write_json(path, content)
    known = {entry["model"]: entry["requests"] for entry in before["models"]}
    for entry in content["models"]:
        for count, row in entry["requests"].items():
            for key in row:
                if key.endswith("_ms") and "p90" not in key and key not in known.get(entry["model"], {}).get(count, {}):
                    say(f"{entry['model']}, {count} requests, {key.removesuffix('_ms')}: {row[key]:.3f} ms a token")
    return content


def _refusal(plan: sides.Plan) -> str:
    """Return what is wrong with the arguments, or an empty string."""
    for model in plan.models:
        if why := models.refusal(model):
            return why
        kind = models.DRAWN[model].base["model_type"] if model in models.DRAWN else ""
        if plan.tensor_parallel > 1 and kind not in ("", *_SPLITS):
            return f"--tensor-parallel: random weights of {model} are not split over GPUs; name a checkpoint"
    if plan.expert_parallel and plan.tensor_parallel == 1:
        return "--enable-expert-parallel needs more than one GPU: add --tensor-parallel 2"
    if len({sides.Step(model, "", "", ()).name for model in plan.models}) < len(plan.models):
        return "two checkpoints have the same name: run them with an OUT of their own"
    if taken := set(plan.without_backends) & {sides.WITH, sides.WITHOUT, sides.FLOAT32}:
        return f"--without-backend {taken.pop()} is not a backend of vLLM; name one such as marlin"
    if plan.tokens < 8:
        return f"--tokens {plan.tokens} leaves no steps to measure; 8 or more do"
    return ""


def _lacking() -> str:
    """Return what this Python lacks to serve, or an empty string."""
    if importlib.util.find_spec("vllm") is None:
        return (
            "vLLM is not installed in this Python: run this with the environment that serves; --dry-run prints the plan anywhere"
        )
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(entry.name == "trtllm_b12x" for entry in entries):
        return "the package is not installed beside vLLM, so nothing would be compared: pip install ."
    return ""


def _unreadable(plan: sides.Plan) -> str:
    """Return why a checkpoint has no configuration of a language model, or an empty string."""
    for model in plan.models:
        try:
            config = models.DRAWN[model].base if model in models.DRAWN else models.text_config(models.read(model))
            vocabulary = config["vocab_size"]
        except Exception as error:
            return f"{model}: its configuration cannot be read ({first_line(error)}); check the name, or download it first"
        if not isinstance(vocabulary, int):
            return f"{model}: its config.json has no vocab_size, so it is not a language model"
    return ""


def _card() -> dict[str, Any]:
    """Return card, driver and versions."""
    found = card.look()
    smi = (found.get("nvidia_smi") or [{}])[0]
    result = {
        "versions": packages.versions(_PACKAGES),
        "python": found["python"],
        "gpus": found["gpus"],
        "clocks": found["clocks"],
    }
    if "card" in found:
        result["card"] = {**{k: v for k, v in found["card"].items() if k != "gpu"}, "driver": smi.get("driver_version")}
    return result


def _dry_run(todo: list[sides.Step], as_json: bool) -> int:
    seconds = [sides.ESTIMATE_S[step.turn] for step in todo]
    if as_json:
        print(json.dumps([{"step": s.name, "title": s.title, "seconds": n} for s, n in zip(todo, seconds, strict=True)]))
        return _ALL
    for step, n in zip(todo, seconds, strict=True):
        print_line(f"{n:5} s  {step.name}: {step.title}")
    print_line(f"about {sum(seconds) / 60:.0f} minutes, and the loads of checkpoints that are not in memory's cache")
    return _ALL


def _wrong(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return _NOTHING


if __name__ == "__main__":
    finish(main)
