# SPDX-License-Identifier: Apache-2.0
"""Decide if our kernels serve a vLLM layer on this card: apply the rules, then rehearse a load and a call while vLLM chooses."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from trtllm_b12x import decision, formats
from trtllm_b12x.core import process
from trtllm_b12x.decision import Resolution
from trtllm_b12x.kernels import Geometry, Kernel, first_line
from trtllm_b12x.kernels.catalog import KERNELS

from .. import serving
from . import facts, marlin, problem, weights
from .facts import FAMILIES, SLOTS, Slot


class Rehearsal(NamedTuple):
    refusal: str = ""
    kernels: Sequence[Kernel] = ()
    """Kernels planned for a layer's sizes, without weights. They hold the plans."""
    seconds: float = 0.0


_rehearsed: dict[tuple[type[Any], Geometry, torch.device], Rehearsal] = {}
"""Results by experts class, geometry and device. The class has the slot and the routing."""


@process.kept
def _forget() -> None:
    _rehearsed.clear()
    _for_every_call.cache_clear()


def sm() -> int:
    """Return the SM number that the rules use, major * 10 + minor; 0 without an NVIDIA card."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return serving.served_sm(0 if capability is None else 10 * capability.major + capability.minor)


def device_of(config: Any) -> torch.device:
    device = torch.device(config.device)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def candidate_kernels(slot: Slot, device: torch.device) -> dict[str, type[Kernel]]:
    """Map each family to its kernel class, in order of preference. On the CPU torch classes stand in.

    Where vLLM has no experts for the slot's tensors, ``gemm`` and ``grouped`` serve every count.
    """
    found = serving.classes_on(device, slot.format, FAMILIES)
    if slot.pair:
        return found
    adds_bias = {name: KERNELS[name, slot.format][0].adds_bias for name in found}
    return {name: _for_every_call(kernel, adds_bias[name]) for name, kernel in found.items()}


@functools.cache
def _for_every_call(kernel: type[Kernel], adds_bias: bool) -> type[Kernel]:
    """Return the kernel class for layers that vLLM's own experts do not serve. It serves every count, and biases that vLLM loads.

    All layers use one class, because plans are shared by class.
    """
    features = facts.for_every_call(kernel.features)
    if adds_bias:
        features = replace(features, bound_by=features.bound_by - {decision.RejectReason.BIAS})
    return type(kernel.__name__, (kernel,), {"features": features})


def resolve(slot: Slot, config: Any) -> Resolution:
    device = device_of(config)
    of = problem.shape_of(config, slot), problem.deployment_of(config)
    return serving.resolve(*of, candidate_kernels(slot, device), device, sm(), slot.pair)


def rehearsed(experts_class: Any, config: Any) -> Rehearsal:
    """Return the ``Rehearsal`` stored for the layer's sizes, or an empty one."""
    return _rehearsed.get((experts_class, problem.geometry_of(config, experts_class.slot), device_of(config)), Rehearsal())


def agreed(slot: Slot | None, config: Any) -> bool:
    """Return True if every rank that shares the layer has chosen ``slot``, which is None for vLLM's own choice.

    Every rank calls this once for each layer that it builds, whatever it has chosen, so that no rank waits for another.
    """
    from vllm.distributed import parallel_state

    parallel = config.moe_parallel_config  # elastic EP ranks join one by one, with EPLB or all-to-all
    group = parallel_state._EP or parallel_state._TP  # the EP group has all TP ranks, and DP ranks, which split experts
    if group is None or group.world_size == 1 or parallel.enable_eplb or parallel.use_all2all_kernels:
        return slot is not None
    number = 0 if slot is None else 1 + SLOTS.index(slot)
    bounds = torch.tensor([number, -number], device="cpu")
    torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MIN, group.cpu_group)
    return slot is not None and bounds.tolist() == [number, -number]


def rehearse(experts_class: Any, config: Any) -> str:
    """Load and call an experts object on random weights of the layer's sizes, once per geometry. Every kernel is tested.

    Marlin, if vLLM has chosen it, is timed on the same memory. Return why our kernels do not serve; empty if they do. Plans are
    kept, so that layers do not compile.
    """
    device = device_of(config)
    key = experts_class, problem.geometry_of(config, experts_class.slot), device
    if key not in _rehearsed:
        started = time.monotonic()
        try:
            with serving.float32_default(), torch.inference_mode(False), torch.no_grad():
                found = _rehearse(experts_class, config, key[1], device)
            _rehearsed[key] = found._replace(seconds=time.monotonic() - started)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                return _plan_failed(error)  # memory may be free for the next layer
            _rehearsed[key] = Rehearsal(_plan_failed(error))
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return _rehearsed[key].refusal


def _plan_failed(error: Exception) -> str:
    return f"{decision.RejectReason.KERNEL_PLAN_FAILED.name}: {first_line(error)}"


def _rehearse(experts_class: Any, config: Any, geometry: Geometry, device: torch.device) -> Rehearsal:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    tensors, gscales = weights.draw(geometry, device)
    s1, s2 = tensors.scales
    w1_bias, w2_bias = tensors.biases or (None, None)
    layer, scales = SimpleNamespace(), {"w1_scale": s1, "w2_scale": s2, "w1_bias": w1_bias, "w2_bias": w2_bias}
    if tensors.alphas is None:
        block = [1, formats.group_size(geometry.format)]
        quant = FusedMoEQuantConfig.make(geometry.format.lower(), block_shape=block, is_scale_swizzled=False, **scales)
    else:
        one = torch.ones_like(tensors.alphas[0])
        first, second = gscales or (one, one)
        scale_2 = [alpha * g for alpha, g in zip(tensors.alphas, (first, second), strict=True)]
        layer.w13_weight_scale_2 = scale_2[0].view(-1, 1).expand(-1, 2 if geometry.gated else 1)
        weights.record_halves(layer)
        layer.w13_weight_scale_2, layer.w2_weight_scale_2 = scale_2
        layer.w13_input_scale, layer.w2_input_scale = 1 / first, 1 / second
        scales |= {"g1_alphas": layer.w13_weight_scale_2, "g2_alphas": layer.w2_weight_scale_2}
        quant = FusedMoEQuantConfig.make("nvfp4", a1_gscale=first, a2_gscale=second, **scales)
    experts = experts_class(config, quant)
    experts.process_weights_after_loading(layer)
    experts.load(tensors.w1, tensors.w2, None)
    experts.dispatch.decided = True  # nothing is measured here
    x = torch.ones(1, geometry.hidden_size, dtype=geometry.dtype, device=device)
    ids = torch.arange(geometry.top_k, dtype=torch.int32, device=device).unsqueeze(0)
    out, ones = torch.empty_like(x), torch.ones_like(ids, dtype=torch.float32)
    sizes = 1, tensors.w1.shape[1], geometry.hidden_size, geometry.top_k, config.num_experts, geometry.num_experts
    experts.workspace_shapes(*sizes, None, config.activation)
    experts.finalize_weight_and_reduce_impl()
    if experts.expects_unquantized_inputs:
        activation = config.activation, config.num_experts
        experts.apply(out, x, tensors.w1, tensors.w2, ones, ids, *activation, None, None, None, None, None, None, False)
    if experts.fault:
        raise RuntimeError(experts.fault)
    if refusal := marlin.refusal(experts, tensors, config):
        return Rehearsal(refusal)
    kept = []
    for name, kernel in experts.dispatch.schedule.families.items():
        for planned in (kernel, experts.dispatch.schedule.routing.get(name)):
            if planned is not None:
                kept.append(experts.dispatch.kernels[name]())
                kept[-1].plan(planned.geometry, kernel.capacity, device)
    for name, limit in experts.dispatch.waiting.items():
        kernel = experts.dispatch.kernels[name]()
        with suppress(ValueError):  # planning raises the error again
            kernel.describe(geometry, limit, device)  # enough for scratch_bytes
            kept.append(kernel)
    return Rehearsal("", kept)
