# SPDX-License-Identifier: Apache-2.0
"""A worker of vLLM that runs a small model on the CPU in float32: for the engine, scheduler and loaders around it.

``worker_cls`` names it. It loads the model with vLLM's loader, and computes logits with ``benchmarks.served.reference``, of whole
sequences. The runner calls ``compute_logits`` and ``sample`` as vLLM's own does.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from benchmarks.served import models, reference


class Served(torch.nn.Module):
    """A model whose hidden states are its logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()


class Runner:
    """What ``benchmarks.served.worker`` uses of vLLM's model runner."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.model: Any = None
        self.config = models.read(vllm_config.model_config.model)
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def get_model(self) -> torch.nn.Module:
        found: torch.nn.Module = self.model.model
        return found

    def logits(self, names: list[str]) -> torch.Tensor:
        """Return logits of the last token of each request."""
        rows = []
        for name in names:
            tokens = torch.tensor(self.tokens[name])[None]
            with torch.no_grad():
                logits, _ = reference.logits(self.get_model(), self.config, tokens, tokens.shape[1] - 1)
            rows.append(logits[0, 0])
        return torch.stack(rows)

    def sample(self, hidden: torch.Tensor, batch: Any, grammar: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model.compute_logits(hidden)
        return logits, logits.argmax(-1)


class CpuWorker(WorkerBase):
    """One rank on the CPU."""

    def init_device(self) -> None:
        from vllm.distributed import parallel_state
        from vllm.v1.worker.workspace import init_workspace_manager

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, self.distributed_init_method, 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        self.device_config.device = torch.device("cpu")
        init_workspace_manager(self.device_config.device)
        self.model_runner: Any = Runner(self.vllm_config)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        from vllm.model_executor.model_loader import get_model_loader

        model = get_model_loader(self.load_config).load_model(self.vllm_config, self.model_config)
        self.model_runner.model = Served(model)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        return {"layer": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)}

    def determine_available_memory(self) -> int:
        return 1 << 24

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def execute_model(self, scheduler_output: Any) -> Any:
        runner = self.model_runner
        for name in scheduler_output.finished_req_ids:
            runner.tokens.pop(name, None)
        for request in scheduler_output.scheduled_new_reqs:
            runner.tokens[request.req_id] = list(request.prompt_token_ids)
            runner.computed[request.req_id] = request.num_computed_tokens
        self._scheduled = dict(scheduler_output.num_scheduled_tokens)
        return None if self._scheduled else self._output([], torch.empty(0, 1), torch.empty(0, dtype=torch.long))

    def sample_tokens(self, grammar_output: Any) -> Any:
        runner, ready = self.model_runner, []
        for name, count in self._scheduled.items():
            runner.computed[name] += count
            if runner.computed[name] >= len(runner.tokens[name]):
                ready.append(name)
        names = list(self._scheduled)
        if not ready:
            return self._output(names, torch.empty(0, 1), torch.empty(0, dtype=torch.long), ready)
        batch = types.SimpleNamespace(req_ids=ready)
        logits, tokens = runner.sample(runner.logits(ready), batch, grammar_output)
        for name, token in zip(ready, tokens.tolist(), strict=True):
            runner.tokens[name].append(token)
        return self._output(names, logits, tokens, ready)

    def _output(self, names: list[str], logits: torch.Tensor, tokens: torch.Tensor, ready: Any = ()) -> Any:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        found = dict(zip(ready, tokens.tolist(), strict=True))
        rows = {name: i for i, name in enumerate(ready)}
        order = [rows.get(name, 0) for name in names]
        logprobs = None
        if ready:
            chosen = tokens[order, None]
            values = logits[order].log_softmax(-1).gather(1, chosen)
            logprobs = LogprobsLists(
                chosen.repeat(1, 2).numpy(), values.repeat(1, 2).numpy(), np.ones(len(names), dtype=np.int64)
            )
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[found[name]] if name in found else [] for name in names],
            logprobs=logprobs,
        )
