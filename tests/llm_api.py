# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for ``tensorrt_llm`` and ``vllm``: what ``benchmarks/on_card/answers.py`` calls of them, without a model.

Names, defaults and refusals as TensorRT-LLM has them: ``sampling_params.py`` (a98a9061), ``executor/result.py`` (a678b91a),
``llmapi/llm.py`` (4c05a748), ``llmapi/__init__.py`` (5ca85aff), ``MoeConfig`` of 1.3.0rc27. vLLM's are compared with its wheel by
``tests/integration/vllm/test_on_card.py``. ``install`` and ``install_vllm`` write packages.
Environment: ``STAND_IN_LLM`` is a way to fail, or ``floats``: log-probabilities of the sampled tokens alone.

With the package on, three answers differ: one at its likeliest other token, one at a token that is not listed, one by its end.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KIND = os.environ.get("STAND_IN_LLM", "")
PARTS = {"The capital": (5, 0.2, 1), "1, 1, 2": (3, 0.9, 7)}
"""Beginning of a prompt: the first other token, the margin to the second likeliest, and how far the other token's id is."""
ENDS = "Die drei"
LENGTH = 64


def install(folder: Path) -> None:
    package = folder / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (package / "llmapi.py").write_text("from . import CudaGraphConfig, KvCacheConfig, MoeConfig\n")


def install_vllm(folder: Path, backends: Sequence[str] = ("auto", "marlin", "flashinfer_b12x", "b12x")) -> None:
    package = folder / "vllm"
    (package / "config").mkdir(parents=True)
    (package / "_answers.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (package / "__init__.py").write_text("from ._answers import VllmLLM as LLM, VllmSamplingParams as SamplingParams\n")
    names = "".join(f'    "{name}",\n' for name in backends)
    (package / "config" / "kernel.py").write_text(f'MoEBackend = Literal[\n{names}]\nOther = Literal["triton"]\n')


class _Record:
    """Take the named arguments of ``known``, refuse others, and default to None."""

    known = ""

    def __init__(self, **given: Any) -> None:
        if unknown := given.keys() - set(self.known.split()):
            raise TypeError(f"{type(self).__name__} got unexpected arguments: {unknown}")
        vars(self).update({**dict.fromkeys(self.known.split()), **given})


class MoeConfig(_Record):
    known = "backend max_num_tokens load_balancer disable_finalize_fusion use_low_precision_moe_combine"


class KvCacheConfig(_Record):
    known = "enable_block_reuse free_gpu_memory_fraction dtype"


class CudaGraphConfig(_Record):
    known = "batch_sizes max_batch_size enable_padding"


class SamplingParams(_Record):
    known = "max_tokens top_k top_p temperature logprobs"


class _Model:
    """What answers, in either engine."""

    def __init__(self) -> None:
        if settings := [name for name in os.environ if name.startswith("TRTLLM_B12X_")]:
            raise ValueError(f"settings of the package: {settings}")
        if KIND == "crash":
            raise RuntimeError("CUDA out of memory")
        self._on = os.environ.get("TRTLLM_B12X", "1") != "0" and KIND != "unserved"
        self._asked = 0

    def _answer(self, inputs: str, max_tokens: int, listed: int) -> SimpleNamespace:
        self._asked += 1
        tokens = [zlib.crc32(f"{inputs}{place}".encode()) % 50_000 for place in range(min(max_tokens, LENGTH))]
        part, gap, other = next((found for start, found in PARTS.items() if inputs.startswith(start)), (0, 1.5, 0))
        likeliest, second = (SimpleNamespace(logprob=-0.1 - less, rank=rank) for rank, less in ((1, 0), (2, gap)))
        logprobs = [{t: likeliest, t + 1: second} for t in tokens][: listed and len(tokens)]
        if self._on:
            if other:
                tokens[part:] = [token + other for token in tokens[part:]]
            if inputs.startswith(ENDS):
                del tokens[10:]
        if not self._on and self._asked == 40:  # a second round that is not the first
            tokens[-1] += 1
        text = " ".join(map(str, tokens))
        shown: list[Any] = [entry[min(entry)].logprob for entry in logprobs] if KIND == "floats" else logprobs
        output = SimpleNamespace(index=0, text=text, token_ids=tokens, logprobs=shown[: len(tokens)])
        return SimpleNamespace(outputs=[output])


class LLM(_Model):
    def __init__(self, model: str, trust_remote_code: bool = False, **kwargs: Any) -> None:
        known = {"moe_config": MoeConfig, "kv_cache_config": KvCacheConfig, "cuda_graph_config": CudaGraphConfig}
        for name, value in kwargs.items():
            if name not in {*known, "max_batch_size", "max_num_tokens", "max_seq_len"}:
                raise ValueError(f"LLM got invalid argument: {name}")
            if name in known and not isinstance(value, known[name]):
                raise ValueError(f"{name} is no {known[name].__name__}")
        if vars(kwargs["moe_config"])["backend"] != "CUTLASS" or not trust_remote_code:
            raise ValueError("not as trtllm-bench has it")
        super().__init__()
        if self._on:
            print(
                "[trtllm_b12x] [INFO] rank 0: 40 of 40 MoE layers on b12x+triton, decode below 64 tokens (NVFP4)", file=sys.stderr
            )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None: ...

    def generate(self, inputs: str, sampling_params: SamplingParams, use_tqdm: bool = True) -> SimpleNamespace:
        params = vars(sampling_params)
        assert params["top_k"] == 1
        return self._answer(inputs, params["max_tokens"], params["logprobs"])


class VllmSamplingParams(_Record):
    known = "max_tokens temperature logprobs"


class VllmLLM(_Model):
    def __init__(self, model: str, **kwargs: Any) -> None:
        if unknown := kwargs.keys() - {"max_model_len", "max_num_seqs", "enable_prefix_caching"}:
            raise ValueError(f"LLM got unexpected arguments: {unknown}")
        super().__init__()
        if self._on:
            line = "NVFP4 experts run on trtllm-b12x, with vLLM's FLASHINFER_CUTLASS for many tokens (512 of 1024 x 2688)"
            print(f"(EngineCore pid=7) INFO 11-27 12:00:00 [plugin.py:173] {line}", file=sys.stderr)
        else:
            why = "vLLM's MARLIN keeps the NVFP4 experts (512 of 1024 x 2688): KERNEL_PLAN_FAILED: no compiler"
            print(f"(EngineCore pid=7) INFO 11-27 12:00:00 [plugin.py:179] {why}", file=sys.stderr)

    def generate(self, prompts: str, sampling_params: VllmSamplingParams, *, use_tqdm: bool = True) -> list[SimpleNamespace]:
        params = vars(sampling_params)
        assert params["temperature"] == 0
        return [self._answer(prompts, params["max_tokens"], params["logprobs"])]
