# SPDX-License-Identifier: Apache-2.0
"""MoE layers as the host builds them, loaded from the tensors of :mod:`tests.checkpoints`."""

from __future__ import annotations

import importlib
import inspect
import itertools
import types
from typing import Any

import torch

import trtllm_b12x
from tests.checkpoints import random_experts
from tests.hosts import names
from trtllm_b12x.engines.trtllm import host as _host
from trtllm_b12x.engines.trtllm import status
from trtllm_b12x.kernels import MoECall as KernelCall
from trtllm_b12x.tools.verify import reference as strict_reference
from trtllm_b12x.tools.verify.reference import Arithmetic, MoECall
from trtllm_b12x.tools.verify.reference_formats import move_off_ties

host = names.extended(_host.load())


def create(num_experts: int, hidden_size: int, intermediate_size: int, *args: Any, promote: bool = True, **kwargs: Any) -> Any:
    """A ``ConfigurableMoE`` without weights, its backend promoted or not; see :func:`build`."""
    (trtllm_b12x.install if promote else trtllm_b12x.uninstall)()
    try:
        return build(num_experts, hidden_size, intermediate_size, *args, **kwargs)
    finally:
        trtllm_b12x.uninstall()


def build(
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int = 2,
    gated: bool = True,
    *,
    mapping: dict[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    quant_config: Any = None,
    max_num_tokens: int = 8192,
    moe_max_num_tokens: int = 0,
    pretrained_config: Any = None,
    moe_backend: str = "CUTLASS",
    config: Any = None,
    **arguments: Any,
) -> Any:
    """Build a layer as the host does in this process, by ``config`` if one is given."""
    config = config or host.ModelConfig(
        pretrained_config=pretrained_config,
        quant_config=quant_config or host.QuantConfig(quant_algo=host.QuantAlgo.NVFP4, group_size=16),
        mapping=host.Mapping(**(mapping or {})),
        max_num_tokens=max_num_tokens,
        moe_max_num_tokens=moe_max_num_tokens,
        moe_backend=moe_backend,
    )
    return host.create_moe.create_moe(
        host.RenormalizeMoeRoutingMethod(top_k),
        num_experts,
        hidden_size,
        intermediate_size,
        dtype=dtype,
        model_config=config,
        **{**activation(gated), **arguments},
    )


def explained() -> list[tuple[str, list[str], list[str]]]:
    """Configs with what ``explain()`` says of each, and what became of the layer that the host built."""
    found = []
    for algo, lora, dynamic, ranks, dp in itertools.product(
        ("NVFP4", "MIXED_PRECISION"),
        ((), ("moe_gate",)),
        (False, True),
        ({}, {"moe_ep_size": 2}, {"moe_tp_size": 2}),
        (False, True),
    ):
        mapping = host.Mapping(**{"world_size": 2, "tp_size": 2, **ranks} if ranks else {}, enable_attention_dp=dp)
        nvfp4 = host.QuantConfig(quant_algo=host.QuantAlgo.NVFP4, group_size=16)
        config = host.ModelConfig(
            quant_config=host.QuantConfig(quant_algo=host.QuantAlgo(algo), group_size=16),
            mapping=mapping,
            lora_config=types.SimpleNamespace(lora_target_modules=lora),
            skip_create_weights_in_init=True,
            use_cuda_graph=bool(dp and lora),
        )
        object.__setattr__(config, "force_dynamic_quantization", dynamic)
        override = nvfp4 if algo == "MIXED_PRECISION" else None
        said = [reason.name for reason in trtllm_b12x.explain(config, override).reasons]
        arguments = {"model_config": config, "override_quant_config": override, **activation(True)}
        try:
            routing = host.RenormalizeMoeRoutingMethod(2)
            module = host.create_moe.create_moe(routing, 4, 128, 256, dtype=torch.bfloat16, **arguments)
        except ValueError:  # hosts from C1 on have no kernel for LoRA on NVFP4 experts
            assert "LORA" in said
            continue
        layer = getattr(module, "backend", module)
        if not getattr(layer, "_weights_created", True):
            for part in (module, layer) if override is not None else ():
                part.quant_config = override  # as the host's loader has it
            module.create_weights()
            layer = getattr(module, "backend", module)
        verdict = next(verdict for built, verdict in reversed(status.alive()) if built is layer)
        found.append((str(config), said, [reason.name for reason in verdict.reasons]))
    return found


def activation(gated: bool) -> dict[str, Any]:
    """The argument of ``create_moe`` that says it, by what the host's takes."""
    kind = host.ActivationType.Swiglu if gated else host.ActivationType.Relu2
    if "activation_type" in inspect.signature(host.create_moe.create_moe).parameters or host.generation == "embedded":
        return {"activation_type": kind}
    payloads = importlib.import_module(f"{host.create_moe.__package__}.activation")
    return {"activation": payloads.SwigluActivation() if gated else payloads.SimpleActivation(kind)}


def swiglu_constants(**constants: torch.Tensor) -> dict[str, Any]:
    """The arguments of ``create_moe`` for SwiGLU with ``alpha``, ``beta`` or ``limit``, ``(E,)`` float32, of local experts."""
    if "activation_type" in activation(True):
        return {f"swiglu_{name}": tensor for name, tensor in constants.items()}
    payloads = importlib.import_module(f"{host.create_moe.__package__}.activation")
    limit = constants.get("limit")
    if constants.keys() == {"limit"}:
        return {"activation": payloads.SwigluActivation(clamp=limit)}
    return {"activation": payloads.SwigluBiasActivation(constants["alpha"], constants["beta"], limit)}


def run_moe(
    backend: Any,
    x: Any,
    ids: torch.Tensor,
    router_weights: torch.Tensor | None,
    x_sf: torch.Tensor | None = None,
    *,
    is_sf_swizzled: bool = True,
    output_dtype: torch.dtype | None = None,
    moe_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """``backend.run_moe`` in the form of this host's generation."""
    if host.has_get_moe_cls:
        result: torch.Tensor = backend.run_moe(
            x, ids, router_weights, x_sf, is_sf_swizzled=is_sf_swizzled, output_dtype=output_dtype, moe_output=moe_output
        )
        return result
    records = importlib.import_module(f"{host.create_moe.__package__}.impl_contract")
    plan = records.MoECommPlan(
        input_sf_swizzled=is_sf_swizzled, enable_alltoall=False, moe_output=moe_output, payload_in_workspace=False
    )
    context = records.MoERunContext(
        token_selected_experts=ids, token_final_scales=router_weights, x=x, x_sf=x_sf, output_dtype=output_dtype, comm_plan=plan
    )
    return backend.run_moe(context, workspace=None)


def caught(module: Any, x: torch.Tensor, logits: torch.Tensor) -> Any:
    """Return a call in the host's form, as the crossover's measurement gets it."""
    seen: list[Any] = []
    module.backend.dispatch.decided = False
    module.backend._measure_once = seen.append
    module(x, logits)
    return seen[0]


def as_the_host(module: Any, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Call the host's path as the crossover's measurement does."""
    call = KernelCall(x, *module.routing_method.apply(logits))
    result: torch.Tensor = module.backend.run_as_the_host(caught(module, x, logits), call)
    return result


def ranks(tp: int, ep: int) -> list[dict[str, int]]:
    """Return the mapping of each rank."""
    count = tp * ep
    sizes = {"world_size": count, "tp_size": count, "moe_tp_size": tp, "moe_ep_size": ep}
    return [{"rank": rank, **sizes} for rank in range(count)]


def mapped(module: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without a gate as the host's mapper of Nemotron-H has it: w3 of no rows, and w1's scalars."""
    if module.is_gated_activation:
        return tensors
    w1 = {name: tensor for name, tensor in tensors.items() if ".w1." in name}
    up = {name.replace(".w1.", ".w3."): tensor[:0] if tensor.dim() == 2 else tensor for name, tensor in w1.items()}
    return {**tensors, **up}


def load(module: Any, tensors: dict[str, torch.Tensor]) -> Any:
    module.load_weights([mapped(module, tensors)])
    module.post_load_weights()
    return module


def made(experts: int, hidden: int, inner: int, **arguments: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A promoted layer of random weights, and these weights; see :func:`build`."""
    tensors = random_experts(experts, hidden, inner, arguments.get("gated", True))
    return load(create(experts, hidden, inner, **arguments), tensors), tensors


def inputs(module: Any, tokens: int, tensors: dict[str, torch.Tensor], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``x (tokens, H)`` bf16 off rounding ties, and router logits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, module.hidden_size, generator=generator).to(torch.bfloat16)
    scale = max(float(t) for name, t in tensors.items() if name.endswith("w1.input_scale"))
    logits = torch.randn(tokens, module.num_experts, generator=generator)
    return move_off_ties(x, scale), logits


def errors(
    module: Any,
    x: torch.Tensor,
    logits: torch.Tensor,
    result: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    arithmetic: Arithmetic = Arithmetic.KERNEL,
    **options: Any,
) -> tuple[float, float]:
    """Relative L2 of ``result`` against float32 and against the kernels' rounding points."""
    call = MoECall(x, *module.routing_method.apply(logits))
    gated = module.is_gated_activation
    points = [Arithmetic.NONE, arithmetic]
    strict = strict_reference.outputs(tensors, module.num_experts, gated, [call], points, **options)[0]
    none, kernel = (float((result.float() - reference).norm() / reference.norm()) for reference in strict)
    return none, kernel
