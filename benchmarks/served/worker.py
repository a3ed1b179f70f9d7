# SPDX-License-Identifier: Apache-2.0
"""Code that runs in vLLM's workers: weight loaders, and methods that ``LLM.collective_rpc`` calls.

vLLM imports this module in every worker, because ``worker_extension_cls`` names its class. The environment variable
``SERVED_JOB`` names the job's file.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from benchmarks.served import agreement, drawn
from benchmarks.served.names import CHECKPOINT, DRAWN, JOB

FORCED = "forced-"
"""Prefix of the requests whose tokens are given."""


class JudgedError(Exception):
    """Raised instead of serving: the float32 computation is done."""


def job() -> dict[str, Any]:
    return dict(json.loads(Path(os.environ[JOB]).read_text(encoding="utf-8")))


def seconds() -> dict[str, float]:
    """Return how long the parts of loading took in this process, in seconds."""
    return dict(_seconds)


_seconds: dict[str, float] = {}


class _Timed(BaseModelLoader):
    """Loader that times its parts. If the job says so, it computes in float32 instead of serving."""

    def create_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        begun = time.perf_counter()
        model = super().create_model(*args, **kwargs)
        _seconds["construct"] = time.perf_counter() - begun
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        begun = time.perf_counter()
        self.put_weights(model, model_config)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        _seconds["weights"] = time.perf_counter() - begun
        if job().get("judge"):
            agreement.judge(model, job())
            raise JudgedError

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        begun = time.perf_counter()
        model = super().load_model(*args, **kwargs)
        _seconds["load"] = time.perf_counter() - begun
        return model

    def put_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        raise NotImplementedError


@register_model_loader(DRAWN)
class DrawnLoader(_Timed):
    """Loader that fills the model with random weights."""

    def download_model(self, model_config: Any) -> None:
        pass

    def put_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        drawn.fill(model)


@register_model_loader(CHECKPOINT)
class CheckpointLoader(_Timed, DefaultModelLoader):
    """vLLM's own loader of checkpoints, timed."""

    def __init__(self, load_config: Any) -> None:
        load_config.load_format = "auto"
        super().__init__(load_config)

    def put_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        DefaultModelLoader.load_weights(self, model, model_config)


class ServedWorker:
    """Methods that ``worker_extension_cls`` adds to vLLM's worker."""

    model_runner: Any

    def served_facts(self) -> dict[str, Any]:
        """Return which classes serve this rank's experts and attention, and the memory that the model takes."""
        model = self.model_runner.get_model()
        found: dict[str, Any] = {"experts": {}, "backends": {}, "attention": {}, "kernels": {}, "faults": []}
        for module in model.modules():
            if name := getattr(getattr(module, "attn_backend", None), "get_name", None):
                _count(found["attention"], name())
            method = getattr(module, "quant_method", None)
            if not hasattr(module, "moe_config") or method is None:
                continue
            experts: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
            _count(found["experts"], type(experts or method).__name__)
            for name, value in vars(method).items():
                if name.endswith("_backend") and hasattr(value, "name"):
                    _count(found["backends"], value.name)
            experts = getattr(experts, "experts", experts)  # vLLM's router wraps the experts
            if hasattr(experts, "dispatch"):
                schedule = experts.dispatch.schedule
                found["kernels"] = {str(n): _kernel(schedule.at(n)) for n in job()["requests"]}
                found["faults"] += [str(experts.fault)] if experts.fault else []
        free, total = torch.cuda.mem_get_info()
        return found | {
            "seconds": seconds(),
            "memory": {
                "allocated": torch.cuda.memory_allocated(),
                "peak": torch.cuda.max_memory_allocated(),
                "used_on_card": total - free,
            },
        }

    def served_force(self, sequences: list[list[int]], first: int) -> None:
        """Force requests ``forced-I`` to take the tokens of ``sequences[I]`` from ``first`` on, and keep their logits."""
        runner = self.model_runner
        kept: list[list[torch.Tensor]] = [[] for _ in sequences]
        names: list[str] = []
        compute: Any = runner.model.compute_logits
        sample: Any = getattr(runner, "sample", None)

        def computed(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute(hidden)
            for row, name in enumerate(names if sample else runner.input_batch.req_ids[: len(logits)]):
                if (match := re.match(rf"{FORCED}(\d+)", name)) is None:
                    continue
                i = int(match[1])
                if (n := len(kept[i])) < len(sequences[i]) - first:
                    kept[i].append(logits[row, : job()["vocabulary"]].clone())
                    logits[row] = -1e30
                    logits[row, sequences[i][first + n]] = 0
            return logits

        def sampled(hidden: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> Any:
            names[:] = list(batch.req_ids)
            try:
                return sample(hidden, batch, *args, **kwargs)
            finally:
                names.clear()

        runner.model.compute_logits = computed
        if sample:  # vLLM's second model runner
            runner.sample = sampled
        self._served_kept = kept

    def served_forced(self, path: str) -> dict[str, Any]:
        """Stop forcing. Write the logits ``(B, steps, V)``; return their shape and whether all are finite."""
        runner = self.model_runner
        del runner.model.compute_logits
        if "sample" in vars(runner):
            del runner.sample
        logits = torch.stack([torch.stack(rows) for rows in self._served_kept])
        del self._served_kept
        torch.save(logits.cpu(), path)
        return {"shape": list(logits.shape), "finite": bool(logits.isfinite().all())}

    def served_layer(self, path: str) -> dict[str, str]:
        """Call single layers of experts on the inputs of ``agreement``. Write the outputs; return why calls failed."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        outputs: dict[str, dict[int, torch.Tensor]] = {}
        failed = {}
        config = self.model_runner.vllm_config
        for name, layer in agreement.layers(self.model_runner.get_model()):
            outputs[name] = {}
            for tokens in agreement.TOKENS:
                x, weights, ids = (t.to(layer.w13_weight.device) for t in agreement.inputs(layer, tokens))
                try:
                    with torch.no_grad(), set_current_vllm_config(config), set_forward_context(None, config, num_tokens=tokens):
                        outputs[name][tokens] = agreement.call(layer, x, weights, ids).clone().cpu()
                except Exception as error:
                    failed[f"{name}, {tokens} tokens"] = f"{type(error).__name__}: {error}"[:300]
        torch.save(outputs, path)
        return failed

    def served_profile(self, start: bool) -> dict[str, list[float]]:
        """Start the profiler, or stop it and return each kernel's count and microseconds."""
        from torch.profiler import ProfilerActivity, profile

        torch.accelerator.synchronize()
        if start:
            self._served_profiler = profile(activities=[ProfilerActivity.CUDA])
            self._served_profiler.start()
            return {}
        self._served_profiler.stop()
        kernels: dict[str, list[float]] = {}
        for event in self._served_profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                row = kernels.setdefault(event.name[:160], [0, 0.0])
                row[0] += 1
                row[1] += event.time_range.elapsed_us()
        del self._served_profiler
        return kernels


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _kernel(kernel: Any) -> str:
    return "" if kernel is None else str(kernel.features.name)
