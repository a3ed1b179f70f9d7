# SPDX-License-Identifier: Apache-2.0
"""Start an unmodified ``vllm.LLM`` in this process, generate, and take it through its life: ``engine FOLDER STEP ...``.

A step is ``sleep-1``, ``sleep-2`` (with ``reload_weights``) or ``load=FOLDER`` (new weights in place). Prints one line of JSON.
Options: ``--eager``; ``--sleep`` allocates what sleep mode can free; ``--without`` turns the package off; ``--two-ranks`` splits
the model over two GPUs; ``--one-fails`` lets the kernels of the second rank fail.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROMPTS = (40, 7, 100)
"""Tokens of each request."""
NEW_TOKENS = 12


def main(arguments: list[str]) -> None:
    options = {word for word in arguments if word.startswith("--")}
    folder, *steps = (word for word in arguments if word not in options)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    os.environ["TRTLLM_B12X_HOPPER"] = "1"
    if "--without" in options:
        os.environ["TRTLLM_B12X"] = "0"
    os.environ["ENGINE_OPTIONS"] = " ".join(options)
    with plugin_for_workers():
        serve(folder, steps, options)


@contextmanager
def plugin_for_workers() -> Iterator[None]:
    """Let vLLM call ``let_a_rank_fail`` in this process and in its workers, as a plugin beside ours."""
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / "engine_test-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-test\nVersion: 0\n", encoding="utf-8")
        entry = "[vllm.general_plugins]\nzz_engine_test = tests.integration.vllm.engine:let_a_rank_fail\n"
        (info / "entry_points.txt").write_text(entry, encoding="utf-8")
        os.environ["PYTHONPATH"] = os.pathsep.join((folder, os.environ.get("PYTHONPATH", "")))
        sys.path.insert(0, folder)
        yield


def let_a_rank_fail() -> None:
    """Let the kernels of the second rank fail if the options say so. Ours serve, even where Marlin is faster."""
    from trtllm_b12x.engines.vllm import machine, marlin

    marlin.refusal = lambda *layer: ""
    if "--one-fails" not in os.environ["ENGINE_OPTIONS"].split():
        return
    rehearse = machine.rehearse

    def fails_on_the_second_rank(experts_class: Any, config: Any) -> str:
        import torch

        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise RuntimeError("no memory for kernels")
        return rehearse(experts_class, config)

    machine.rehearse = fails_on_the_second_rank


def serve(folder: str, steps: list[str], options: set[str]) -> None:
    import torch

    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_allocated()
    llm = engine(folder, options)
    first = generate(llm)
    result: dict[str, Any] = {"tokens": [[token for token, _ in request] for request in first]}
    if "--two-ranks" not in options:
        result["experts"] = experts_of(llm)
    for step in steps:
        name, _, path = step.partition("=")
        if name.startswith("sleep"):
            level = int(name[-1])
            llm.sleep(level=level)
            llm.wake_up()
            if level == 2:
                llm.collective_rpc("reload_weights")
        else:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        result[step] = difference(first, generate(llm))
    peak = torch.cuda.max_memory_allocated()
    del llm
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()
    torch.cuda.empty_cache()
    result |= {"left": torch.cuda.memory_allocated() - before, "peak": peak}
    print(json.dumps(result))


def engine(folder: str, options: set[str]) -> Any:
    from vllm import LLM

    return LLM(
        model=folder,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager="--eager" in options,
        enable_sleep_mode="--sleep" in options,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
        attention_config={"backend": "TRITON_ATTN"},
        generation_config="vllm",
        tensor_parallel_size=2 if "--two-ranks" in options else 1,
        disable_custom_all_reduce=True,
        seed=0,
    )


def generate(llm: Any) -> list[list[tuple[int, float]]]:
    """Return each request's tokens with their log-probabilities."""
    import torch
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(0)
    prompts = [{"prompt_token_ids": torch.randint(10, 2000, (n,), generator=generator).tolist()} for n in PROMPTS]
    parameters = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = [request.outputs[0] for request in llm.generate(prompts, parameters, use_tqdm=False)]
    return [
        [(token, logprobs[token].logprob) for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)]
        for output in outputs
    ]


def difference(first: Any, second: Any) -> float:
    """Return the largest difference of log-probabilities, or infinity if a token differs or is not a number."""
    pairs = [pair for one, other in zip(first, second, strict=True) for pair in zip(one, other, strict=True)]
    gaps = [abs(a[1] - b[1]) if a[0] == b[0] else float("inf") for a, b in pairs]
    return max(float("inf") if gap != gap else gap for gap in gaps)


def experts_of(llm: Any) -> list[str]:
    """Return the names of the experts classes of the model's MoE layers, without repetition."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    model = getattr(worker, "worker", worker).model_runner.get_model()
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = [getattr(method, "moe_kernel", None) for method in methods]
    return sorted({type(kernel.fused_experts).__name__ for kernel in kernels if kernel is not None})


if __name__ == "__main__":
    main(sys.argv[1:])
