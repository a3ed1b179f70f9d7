# SPDX-License-Identifier: Apache-2.0
"""The engines of a run and their order. Each engine has its own process and its own caches."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.on_card.steps import ROOT, write_json
from benchmarks.served import agreement, models, names
from trtllm_b12x.core import settings

WITH, WITHOUT, FLOAT32 = "with", "without", "float32"
CHILD = (sys.executable, "-m", "benchmarks.served.child")
ESTIMATE_S = {"first": 240, "second": 90, "one-gpu": 90, "judge": 60}
_UTILIZATION = 0.9
"""Share of the card's memory that the engines may take, all together."""
PROMPT = 256
"""Tokens of a prompt whose decoding is measured."""
_EXTRA_TOKENS = 64


@dataclass(frozen=True)
class Plan:
    """Arguments of a run."""

    models: tuple[str, ...]
    requests: tuple[int, ...]
    prompts: tuple[int, ...]
    tokens: int
    layers: int = 0
    tensor_parallel: int = 1
    expert_parallel: bool = False
    without_backends: tuple[str, ...] = ()
    attention: str = ""

    @property
    def sides(self) -> tuple[str, ...]:
        return (WITH, WITHOUT, *self.without_backends)

    @property
    def parallel(self) -> str:
        split = f"TP {self.tensor_parallel}" if self.tensor_parallel > 1 else "one GPU"
        return f"{split}, EP" if self.expert_parallel else split


@dataclass(frozen=True)
class Step:
    """One process: an engine that is started and measured, or the float32 computation."""

    model: str
    side: str
    turn: str
    """``first`` or ``second`` start, ``one-gpu`` for answers to compare with a split model, ``judge`` for float32."""
    tasks: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Steps that must have ended."""

    @property
    def name(self) -> str:
        label = Path(self.model).name if self.model not in models.DRAWN else self.model
        return f"{label}.{self.side}.{self.turn}"

    @property
    def title(self) -> str:
        what = {"first": "first start", "second": "second start", "one-gpu": "answers on one GPU", "judge": "agreement"}[
            self.turn
        ]
        return f"{self.model}: {what}" + ("" if self.side == FLOAT32 else f", {self.side}")


def steps(plan: Plan) -> list[Step]:
    """Return all steps in order: all sides in turn, first starts before second starts."""
    found = []
    for model in plan.models:
        split = plan.tensor_parallel > 1
        tasks = ("decode", "ttft", "answers", *(() if split else ("forced", "kernels")))
        first = [Step(model, side, "first", tasks) for side in plan.sides]
        found += first
        if split:
            found += [Step(model, side, "one-gpu", ("answers",)) for side in (WITH, WITHOUT)]
        else:
            found.append(Step(model, FLOAT32, "judge", ("judge",), tuple(step.name for step in first)))
        found += [Step(model, step.side, "second", ("decode", "ttft"), (step.name,)) for step in first]
    return found


def engine(plan: Plan, step: Step, folder: str, at_once: int) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``."""
    split = step.turn not in ("one-gpu", "judge")
    longest = max(*plan.prompts, PROMPT + max(plan.tokens, 128 + max(plan.requests)))  # requests go on while the profiler runs
    arguments: dict[str, Any] = {
        "model": folder,
        "load_format": names.DRAWN if step.model in models.DRAWN else names.CHECKPOINT,
        "worker_extension_cls": names.EXTENSION,
        "skip_tokenizer_init": True,
        "max_model_len": longest + _EXTRA_TOKENS,
        "max_num_seqs": max(*plan.requests, agreement.REQUESTS),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": _UTILIZATION / at_once,
        "tensor_parallel_size": plan.tensor_parallel if split else 1,
        "enable_expert_parallel": plan.expert_parallel and split,
        "compilation_config": {"cudagraph_capture_sizes": list(plan.requests)},
        "seed": 0,
    }
    if step.model in models.DRAWN:
        arguments["generation_config"] = "vllm"
    if importlib.util.find_spec("flashinfer") is None:  # vLLM uses FlashInfer's prefill of linear attention on SM90 and SM12x
        arguments["additional_config"] = {"gdn_prefill_backend": "triton"}
    if plan.attention:
        arguments["attention_config"] = {"backend": plan.attention}
    if step.side in plan.without_backends:
        arguments["moe_backend"] = step.side
    if at_once > 1:
        arguments["kv_cache_memory_bytes"] = kv_bytes(models.text_config(models.read(folder)), plan)
    return arguments


def kv_bytes(config: dict[str, Any], plan: Plan) -> int:
    """Return the bytes of the largest batch's KV cache in bfloat16, as if every layer had full attention."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head // plan.tensor_parallel
    tokens = max(max(plan.requests) * (PROMPT + plan.tokens + _EXTRA_TOKENS), 2 * max(plan.prompts))
    return max(int(1.25 * tokens * token), 2**29)


def environment(step: Step, caches: Path, card: dict[str, Any], before: dict[str, str] | None = None) -> dict[str, str]:
    """Return the variables of an engine's process. Its caches lie below ``caches``."""
    before = dict(os.environ) if before is None else before
    home = before.get("HF_HOME") or str(Path(before.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    found = {name: value for name, value in before.items() if not name.startswith(settings.ENABLED.name)}
    found |= {
        "HF_HOME": home,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), before.get("PYTHONPATH", "")))),
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are timed in this process
        "VLLM_LOGGING_LEVEL": "INFO",  # INFO lines have the seconds of a start
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "XDG_CACHE_HOME": str(caches / "xdg"),  # for this package's kernels and measurements
        settings.ENABLED.name: "1" if step.side == WITH else "0",
    }
    for name, value in (("VLLM_NO_USAGE_STATS", "1"), ("VLLM_HOST_IP", "127.0.0.1")):
        found.setdefault(name, value)
    if importlib.util.find_spec("flashinfer") is None:
        found.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if step.model in models.DRAWN:
        found["HF_HUB_OFFLINE"] = "1"
    if step.side == WITH and tuple(card.get("capability", ()))[:1] == (9,):
        found[settings.HOPPER.name] = "1"
    return found


@dataclass
class Runner:
    """Runs the steps of a plan in ``out``, and keeps what they measure."""

    plan: Plan
    out: Path
    card: dict[str, Any]
    identity: dict[str, Any] = field(default_factory=dict)
    """Card and versions. Records of a different card or version are measured again."""
    deadline: float = float("inf")
    at_once: int = 1
    child: Sequence[str] = CHILD
    say: Callable[[str], None] = print
    changed: Callable[[], None] = lambda: None
    """Called after every measurement."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why a step did not run or did not end, by name."""

    def path(self, step: Step, suffix: str = ".json") -> Path:
        return self.out / "records" / f"{step.name}{suffix}"

    def record(self, step: Step) -> dict[str, Any]:
        """Return the step's record for exactly this plan and card; empty without measurements."""
        try:
            asked = json.loads(self.path(step, ".asked.json").read_text(encoding="utf-8"))
            record: dict[str, Any] = json.loads(self.path(step).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if asked == self._asked(step) else {}

    def done(self, step: Step) -> bool:
        record = self.record(step)
        if step.turn == "judge":  # valid only if newer than the outputs that it compares
            sides = [Path(path) for files in self.job(step)["sides"].values() for path in files.values()]
            return bool(record) and all(self._time(path) <= self._time(self.path(step)) for path in sides)
        return bool(record.get("finished")) and not record.get("failed")

    def run(self, todo: Sequence[Step]) -> None:
        """Run steps, ``at_once`` of them in a group that starts together and is measured one by one."""
        waiting = list(todo)
        while waiting:
            group: list[Step] = []
            for step in waiting:
                if len(group) == self.at_once or {other.name for other in waiting} & set(step.needs):
                    continue
                if step.turn != "judge":
                    group.append(step)
                elif not group:  # the float32 computation needs the card's memory
                    group = [step]
                    break
            waiting = [step for step in waiting if step not in group]
            if time.monotonic() >= self.deadline:
                self.missing |= {step.name: "--seconds ran out before it" for step in group}
                continue
            self._run_together(group)
            self.changed()

    def _run_together(self, group: list[Step]) -> None:
        running: dict[str, tuple[Step, subprocess.Popen[bytes]]] = {}
        seen: dict[str, float] = {}
        try:
            for step in group:
                self.say(f"{step.title}: started")
                running[step.name] = step, self._start(step, len(group))
            measuring = ""
            while running:
                for name, (step, process) in list(running.items()):
                    if process.poll() is not None:
                        del running[name]
                        _kill(process)  # workers that outlived it
                        self._ended(step, process.returncode)
                    elif time.monotonic() >= self.deadline:
                        _kill(process)
                    changed = self._time(self.path(step))
                    if changed != seen.setdefault(name, changed):
                        seen[name] = changed
                        self.changed()
                if running and measuring not in running and all(self.path(s, ".ready").exists() for s, _ in running.values()):
                    measuring = next(iter(running))
                    self.path(running[measuring][0], ".go").touch()
                time.sleep(0.1)
        finally:
            for _, process in running.values():
                _kill(process)

    def _start(self, step: Step, together: int) -> subprocess.Popen[bytes]:
        record, caches = self.path(step), self.out / "caches" / f"{step.model.replace('/', '+')}.{step.side}"
        before = self.record(step)
        if "start" not in before:
            record.unlink(missing_ok=True)
            if step.turn == "first":
                shutil.rmtree(caches, ignore_errors=True)
        for suffix in (".ready", ".go"):
            self.path(step, suffix).unlink(missing_ok=True)
        self._keep_model_infos(caches)
        write_json(self.path(step, ".asked.json"), self._asked(step))
        job = self.job(step, together)
        write_json(self.path(step, ".job.json"), job)
        with self.path(step, ".log").open("wb") as log:
            return subprocess.Popen(
                [*self.child, str(self.path(step, ".job.json"))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(step, caches, self.card),
                cwd=ROOT,
                start_new_session=True,
            )

    def job(self, step: Step, together: int = 1) -> dict[str, Any]:
        """Return the job that ``benchmarks.served.child`` reads."""
        folder = self._folder(step.model)
        config = models.read(folder)
        text = models.text_config(config)
        files = {kind: str(self.path(step, f".{kind}.pt")) for kind in ("logits", "layer")}
        others = [other for other in steps(self.plan) if other.model == step.model and other.turn == "first"]
        saved = {s.side: {kind: str(self.path(s, f".{kind}.pt")) for kind in ("logits", "layer")} for s in others}
        return {
            "engine": engine(self.plan, step, folder, together),
            "tasks": step.tasks,
            "judge": step.turn == "judge",
            "sides": saved,
            "files": files,
            "record": str(self.path(step)),
            "go": str(self.path(step, ".go")) if together > 1 else "",
            "at_once": together,
            "requests": self.plan.requests,
            "prompts": self.plan.prompts,
            "tokens": self.plan.tokens,
            "config": text,
            "vocabulary": text["vocab_size"],
        }

    def _folder(self, model: str) -> str:
        if model not in models.DRAWN:
            return str(Path(model).absolute()) if Path(model).is_dir() else model
        return str(models.write(model, self.out / "models" / model, self.layers(model)))

    def layers(self, model: str) -> int:
        """Return the number of layers of a model with random weights; 0 for a checkpoint."""
        if model not in models.DRAWN:
            return 0
        fit = models.layers_that_fit(model, self.card.get("total_memory", 80e9) * self.plan.tensor_parallel)
        return min(self.plan.layers or fit, models.config(model)["num_hidden_layers"])

    def _keep_model_infos(self, caches: Path) -> None:
        """Copy vLLM's cached facts about model classes. They take 10 s per class and do not depend on kernels."""
        known = Path(os.environ.get("VLLM_CACHE_ROOT") or Path.home() / ".cache" / "vllm") / "modelinfos"
        if known.is_dir():
            shutil.copytree(known, caches / "vllm" / "modelinfos", dirs_exist_ok=True)

    def _asked(self, step: Step) -> dict[str, Any]:
        asked = {name: value for name, value in vars(self.plan).items() if name not in ("models", "without_backends")}
        asked |= {"step": step.name, "tasks": step.tasks, "on": self.identity}
        return dict(json.loads(json.dumps(asked)))

    def _time(self, path: Path) -> float:
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
        return 0.0

    def _ended(self, step: Step, status: int) -> None:
        self.missing.pop(step.name, None)
        if status == 0:
            return self.say(f"{step.title}: done")
        if time.monotonic() >= self.deadline:
            self.missing[step.name] = "--seconds ran out in it"
        else:
            self.missing[step.name] = f"ended with {status}: {last_error(self.path(step, '.log'))}"
        return self.say(f"{step.title}: {self.missing[step.name]}")


def last_error(log: Path) -> str:
    """Return the last line of a log that names an error, else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line.lower()]
    return ((errors or lines or ["it wrote nothing"])[-1])[-300:] + f" ({log})"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def by_side(found: Sequence[Step]) -> Iterator[tuple[str, list[Step]]]:
    """Yield each side with its first and second start."""
    for side in dict.fromkeys(step.side for step in found if step.turn == "first"):
        yield side, [step for step in found if step.side == side and step.turn in ("first", "second")]
