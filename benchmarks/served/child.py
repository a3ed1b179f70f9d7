# SPDX-License-Identifier: Apache-2.0
"""One engine: ``python -m benchmarks.served.child JOB.json`` starts ``vllm.LLM`` and measures what the job names.

The job's ``record`` is written after every measurement. Values in the record are not measured again.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_card.steps import write_json
from benchmarks.served import agreement, kernels, names, worker
from benchmarks.served.sides import PROMPT

REPEATS = 5
"""Prompts of each length for the time to the first token."""
ANSWERS, ANSWER = 8, 64
"""Greedy answers that are compared, and tokens per answer."""
PROFILED = 10
"""Steps that the profiler records."""


def prompt(number: int, length: int, vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randint(min(100, vocabulary - 1), vocabulary, (length,), generator=generator).tolist()


class Engine:
    """``vllm.LLM`` in this process, driven step by step."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm: Any = LLM(**job["engine"])
        self.core = self.llm.llm_engine
        self.vocabulary = job["vocabulary"]
        self._requests = 0

    def rpc(self, method: str, *arguments: Any) -> Any:
        """Call a method of ``worker.ServedWorker`` on every rank. Return the first rank's answer."""
        return self.llm.collective_rpc(method, args=arguments)[0]

    def add(self, tokens: list[int], new: int, name: str = "", **more: Any) -> str:
        """Add a greedy request of ``new`` tokens. Return its name."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        name = name or f"request-{self._requests}"
        kind = RequestOutputKind.DELTA
        parameters = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=kind, **more)
        self.core.add_request(name, {"prompt_token_ids": tokens}, parameters)
        return name

    def step(self) -> list[Any]:
        return list(self.core.step())

    @property
    def busy(self) -> bool:
        return bool(self.core.has_unfinished_requests())

    def drain(self) -> None:
        while self.busy:
            self.step()


def decode(engine: Engine, batch: int, new: int) -> dict[str, float]:
    """Serve ``batch`` requests. Return times of steps in which every request gets a token and no prompt is prefilled."""
    for i in range(batch):
        engine.add(prompt(i, PROMPT, engine.vocabulary), new)
    tokens: Counter[str] = Counter()
    times: list[tuple[float, bool]] = []
    while engine.busy:
        outputs = engine.step()
        now = time.perf_counter()
        if outputs:
            tokens.update({output.request_id: len(output.outputs[0].token_ids) for output in outputs})
            pure = len(outputs) == batch and all(len(output.outputs[0].token_ids) == 1 for output in outputs)
            times.append((now, pure and len(tokens) == batch and min(tokens.values()) >= 2))
    steps = sorted(1e3 * (b - a) for (a, was), (b, now) in pairwise(times) if was and now)
    if len(steps) < 2:
        raise RuntimeError(f"{len(steps)} pure decode steps of {batch} requests: --tokens gives more")
    deciles = statistics.quantiles(steps, n=10, method="inclusive")
    return {"ms": statistics.median(steps), "p90_ms": deciles[-1], "mean_ms": statistics.fmean(steps), "steps": len(steps)}


def first_token(engine: Engine, length: int) -> dict[str, Any]:
    """Return the time from a request to its first token, one request at a time."""
    found = []
    for i in range(REPEATS + 1):
        begun = time.perf_counter()
        engine.add(prompt(10_000 + i, length, engine.vocabulary), 1)
        while not engine.step():
            pass
        found.append(1e3 * (time.perf_counter() - begun))
        engine.drain()
    return {"ms": statistics.median(found[1:]), "all_ms": found}  # the first request may compile


def answers(engine: Engine) -> list[dict[str, Any]]:
    """Return greedy tokens with their log-probabilities, a request at a time."""
    found = []
    for i in range(ANSWERS):
        engine.add(prompt(20_000 + i, PROMPT, engine.vocabulary), ANSWER, logprobs=1)
        row: dict[str, list[Any]] = {"tokens": [], "logprobs": []}
        while engine.busy:
            for output in engine.step():
                part = output.outputs[0]
                row["tokens"] += part.token_ids
                row["logprobs"] += [at[token].logprob for token, at in zip(part.token_ids, part.logprobs, strict=True)]
        found.append(row)
    return found


def forced(engine: Engine, path: str) -> dict[str, Any]:
    """Decode requests with forced tokens. Write the logits to ``path``. Raise RuntimeError if a request took other tokens."""
    sequences = agreement.sequences(engine.vocabulary)
    engine.rpc("served_force", sequences, agreement.PROMPT)
    tokens: dict[str, list[int]] = {}

    def step() -> None:
        for output in engine.step():
            name = next(n for n in tokens if output.request_id == n or output.request_id.startswith(f"{n}-"))
            tokens[name] += output.outputs[0].token_ids

    for i, sequence in enumerate(sequences):
        name = f"{worker.FORCED}{i}"
        tokens[name] = []
        engine.add(sequence[: agreement.PROMPT], agreement.STEPS, name)
        while not tokens[name]:
            step()
    while engine.busy:
        step()
    found: dict[str, Any] = engine.rpc("served_forced", path)
    wrong = sum(taken != sequence[agreement.PROMPT :] for taken, sequence in zip(tokens.values(), sequences, strict=True))
    if wrong:
        raise RuntimeError(f"{wrong} of {len(sequences)} requests did not take the tokens that they were given")
    return found


def profiled(engine: Engine, batch: int) -> dict[str, Any]:
    """Return the kernels of a step that decodes ``batch`` requests, and the share of time of each part."""
    for i in range(batch):
        engine.add(prompt(i, PROMPT, engine.vocabulary), PROFILED + 100 + batch)
    tokens: Counter[str] = Counter()
    while len(tokens) < batch or min(tokens.values()) < 3:
        tokens.update(output.request_id for output in engine.step())
    engine.rpc("served_profile", True)
    steps = 0
    while steps < PROFILED:
        steps += bool(engine.step())
    found = engine.rpc("served_profile", False)
    engine.drain()
    return kernels.summary(found, steps)


class Record:
    """The job's record, written to its file after each change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.content["failed"] = {}

    def measure(self, part: str, key: str, function: Callable[[], Any]) -> None:
        """Measure a value unless the record has it. Record a failure with its reason, and continue."""
        if key in self.content.get(part, {}):
            return
        try:
            self.content.setdefault(part, {})[key] = function()
        except Exception as error:
            self.content["failed"][f"{part} {key}".strip()] = f"{type(error).__name__}: {error}"[:500]
        self.write()

    def write(self) -> None:
        write_json(self.path, self.content)


def measure(engine: Engine, job: dict[str, Any], record: Record) -> None:
    tasks, files = job["tasks"], job["files"]
    engine.add(prompt(0, PROMPT, engine.vocabulary), 16)
    engine.drain()
    if "decode" in tasks:
        for batch in job["requests"]:
            record.measure("decode", str(batch), partial(decode, engine, batch, job["tokens"]))
    if "ttft" in tasks:
        for length in job["prompts"]:
            record.measure("ttft", str(length), partial(first_token, engine, length))
    if "answers" in tasks:
        record.measure("answers", "greedy", partial(answers, engine))
    if "forced" in tasks:
        record.measure("forced", "logits", partial(forced, engine, files["logits"]))
        record.measure("forced", "layer", partial(engine.rpc, "served_layer", files["layer"]))
    if "kernels" in tasks:
        for batch in [n for n in (1, 8, 64) if n <= max(job["requests"])]:
            record.measure("kernels", str(batch), partial(profiled, engine, batch))


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has ended, even if a kill kept the parent from ending this process."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(path: str) -> int:
    _end_with_parent(os.getppid())
    os.environ[names.JOB] = path
    job = worker.job()
    begun = time.perf_counter()
    try:
        engine = Engine(job)
    except worker.JudgedError:
        return 0
    record = Record(Path(job["record"]))
    facts = engine.rpc("served_facts")
    cache = getattr(engine.core.vllm_config, "cache_config", None)
    facts["memory"] |= {"kv_blocks": getattr(cache, "num_gpu_blocks", None), "block_size": getattr(cache, "block_size", None)}
    compilation = engine.core.vllm_config.compilation_config
    facts["settings"] = {
        "cuda_graphs": str(compilation.cudagraph_mode).rpartition(".")[2],
        "torch_compile": str(compilation.mode).rpartition(".")[2],
        "capture_sizes": list(compilation.cudagraph_capture_sizes or []),
        "max_num_batched_tokens": engine.core.vllm_config.scheduler_config.max_num_batched_tokens,
    }
    record.content.setdefault("start", facts.pop("seconds") | {"ready": time.perf_counter() - begun, "at_once": job["at_once"]})
    record.content["facts"] = facts
    record.write()
    if job["go"]:  # engines that start together are measured one by one
        Path(job["go"]).with_suffix(".ready").touch()
        while not Path(job["go"]).exists():
            time.sleep(0.05)
    measure(engine, job, record)
    record.content["finished"] = True
    record.write()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # vLLM's threads may keep the interpreter from ending
