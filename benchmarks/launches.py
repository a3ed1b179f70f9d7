"""Host time of a decode call of ``cuda`` outside CUDA graphs, by part, on a GPU of 9.0 or newer.

``python -m benchmarks.launches`` measures a small NVFP4 layer.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch

from benchmarks import require_gpu
from trtllm_b12x.dispatch import crossover
from trtllm_b12x.engines.trtllm import build_layer, promote
from trtllm_b12x.formats.geometry import LayerShape
from trtllm_b12x.kernels import MoECall
from trtllm_b12x.kernels.cuda.decode import CudaKernel

SHAPE = LayerShape(32, 8, 1024, 256, "Swiglu", "NVFP4", group_size=16)
CALLS, BATCHES = 100, 60
"""Calls between two synchronizations, so that no queue fills; batches of each part."""


def layer(device: torch.device) -> Any:
    """Build a promoted layer of random weights, as in a server whose autotuner has run."""
    with mock.patch.dict(os.environ, TRTLLM_B12X_KERNELS="cuda", TRTLLM_B12X_CROSSOVER="64"), torch.device(device):
        crossover.tuning()
        promote.install()
        module = build_layer.create(SHAPE)
        promote.uninstall()
        module.backend.quant_method.fill(module.backend, torch.Generator(device).manual_seed(0))
        module.post_load_weights()
        build_layer.run(module, 1)  # decides what serves
    return module


def parts(module: Any, tokens: int) -> dict[str, Callable[[], Any]]:
    """Return what is measured: the launch with arguments that are ready, the kernel's call, and the layer's."""
    backend, device = module.backend, module.backend.w2_weight.device
    kernel = backend.kernel
    assert isinstance(kernel, CudaKernel), backend.verdict
    x = torch.randn(tokens, backend.hidden_size, dtype=torch.bfloat16, device=device)
    ids, router_weights = module.routing_method.apply(torch.randn(tokens, backend.num_experts, device=device))
    call, launches = MoECall(x, ids, router_weights, out=torch.empty_like(x)), kernel._launches
    seen: list[Any] = []
    spy = functools.partial(functools.partial, lambda *given: seen.extend(given))
    kernel._launches = {shape: (routes, size, [spy(both[0])]) for shape, (routes, size, both) in launches.items()}
    kernel.run(call)
    kernel._launches = launches
    launch, *given = seen
    options = {"is_sf_swizzled": True, "output_dtype": x.dtype, "enable_alltoall": False, "moe_output": None}
    run_moe = functools.partial(backend.run_moe, x=x, token_selected_experts=ids, token_final_scales=router_weights, **options)
    return {
        "launch": functools.partial(launch, *given),
        "Kernel.run": lambda: kernel.run(MoECall(x, ids, router_weights)),
        "run_moe": functools.partial(run_moe, x_sf=None),
    }


def microseconds(runs: Mapping[str, Callable[[], Any]], wait: Callable[[], None]) -> dict[str, float]:
    """Return the median host time of a call of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(BATCHES):
        for name, run in runs.items():
            wait()
            started = time.perf_counter()
            for _ in range(CALLS):
                run()
            times[name].append(1e6 * (time.perf_counter() - started) / CALLS)
    wait()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    require_gpu()
    print(torch.cuda.get_device_name(), torch.__version__)
    module = layer(torch.device("cuda", 0))
    for tokens in (1, 8):
        with torch.inference_mode():
            found = microseconds(parts(module, tokens), torch.cuda.synchronize)
        print(f"{tokens} tokens:", ", ".join(f"{name} {time:.2f} us" for name, time in found.items()))


if __name__ == "__main__":
    main()
