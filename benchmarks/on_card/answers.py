# SPDX-License-Identifier: Apache-2.0
"""Ask a model fixed prompts by greedy decoding: ``python answers.py REQUEST ANSWERS``, both JSON files.

REQUEST has ``engine`` (``tensorrt-llm`` or ``vllm``), ``model`` (a folder or a Hugging Face name), ``options`` of its ``LLM``,
``prompts`` and ``max_tokens``. ANSWERS has ``answers``, for each prompt its ``text``, ``tokens`` and ``logprobs`` (a dict from
token to log-probability for each token), and ``repeated``, whether a second round gave the same tokens. Prompts go one at a time,
so that batches are the same in every run.

The process imports the engine and nothing of this repository.

Names were read in NVIDIA/TensorRT-LLM on 2026-11-24: ``sampling_params.py`` (a98a9061), ``executor/result.py`` (a678b91a),
``llmapi/llm.py`` (4c05a748), ``llmapi/__init__.py`` (5ca85aff), ``_torch/pyexecutor/sampler.py`` (00026bd1), all under
``tensorrt_llm``; ``MoeConfig`` in the reference of 1.3.0rc27. vLLM's names: ``entrypoints/llm.py`` of 0.33.0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def main(request_file: Path, answers_file: Path) -> None:
    request = json.loads(request_file.read_text(encoding="utf-8"))
    here = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if str(Path(entry).absolute()) != here]  # hides modules such as host.py
    with ENGINES[request["engine"]](request) as ask:
        first, second = ([_answer(ask(prompt)) for prompt in request["prompts"]] for _ in "12")
    repeated = [one["tokens"] == other["tokens"] for one, other in zip(first, second, strict=True)]
    answers_file.write_text(json.dumps({"answers": first, "repeated": repeated}), encoding="utf-8")


@contextmanager
def _tensorrt_llm(request: dict[str, Any]) -> Iterator[Callable[[str], Any]]:
    try:
        from tensorrt_llm import LLM, SamplingParams, llmapi
    except ImportError as error:
        sys.exit(f"TensorRT-LLM does not import here ({error}): run this with its Python, or in its container")
    classes = {"moe_config": "MoeConfig", "kv_cache_config": "KvCacheConfig", "cuda_graph_config": "CudaGraphConfig"}
    options = {
        name: getattr(llmapi, classes[name])(**value) if name in classes else value for name, value in request["options"].items()
    }
    # top_k=1 is greedy in every release; only newer releases accept a temperature of 0.
    sampling = SamplingParams(max_tokens=request["max_tokens"], top_k=1, logprobs=2)
    with LLM(request["model"], trust_remote_code=True, **options) as llm:  # trtllm-bench trusts remote code, too
        yield lambda prompt: llm.generate(prompt, sampling, use_tqdm=False)


@contextmanager
def _vllm(request: dict[str, Any]) -> Iterator[Callable[[str], Any]]:
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        sys.exit(f"vLLM does not import here ({error}): run this with its Python, or in its container")
    sampling = SamplingParams(max_tokens=request["max_tokens"], temperature=0.0, logprobs=2)
    llm = LLM(request["model"], **request["options"])
    yield lambda prompt: llm.generate(prompt, sampling, use_tqdm=False)[0]


ENGINES = {"tensorrt-llm": _tensorrt_llm, "vllm": _vllm}


def _answer(result: Any) -> dict[str, Any]:
    output = result.outputs[0]
    tokens = list(output.token_ids)
    listed = [
        {str(key): value.logprob for key, value in entry.items()} if isinstance(entry, dict) else {str(token): entry}
        for token, entry in zip(tokens, output.logprobs or (), strict=False)
    ]
    return {"text": output.text, "tokens": tokens, "logprobs": listed}


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
