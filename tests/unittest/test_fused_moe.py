# SPDX-License-Identifier: Apache-2.0
"""Which path serves a call, and that both give the right numbers."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

import trtllm_b12x
from tests import layers
from tests.checkpoints import random_experts
from trtllm_b12x.decision import Environment, RejectReason, decide, families
from trtllm_b12x.dispatch.schedule import default_crossover
from trtllm_b12x.engines.trtllm import describe
from trtllm_b12x.engines.trtllm.embedded import fp4_quantize
from trtllm_b12x.engines.trtllm.fused_moe import FlashInferNvfp4Sm12xFusedMoE
from trtllm_b12x.tools import verify

host = layers.host


@pytest.fixture
def layer() -> tuple[Any, dict[str, torch.Tensor]]:
    tensors = random_experts(6, 128, 192)
    return layers.load(layers.create(6, 128, 192, top_k=3), tensors), tensors


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 63, 64, 130])
def test_both_sides_of_the_crossover(tokens: int, gated: bool) -> None:
    module, tensors = layers.made(6, 128, 192, top_k=3, gated=gated)
    assert type(module.backend) is FlashInferNvfp4Sm12xFusedMoE
    x, logits = layers.inputs(module, tokens, tensors)
    with verify.kernel_calls(module.backend) as reached:
        result = module(x, logits)
    assert len(reached) == (1 if tokens < default_crossover() else 0)
    none, kernel = layers.errors(module, x, logits, result, tensors)
    assert none < 0.05
    if tokens < default_crossover():
        assert kernel < 0.005


@dataclasses.dataclass(frozen=True)
class Constants:
    alpha: Any = None
    beta: Any = None
    limit: Any = None
    clamp_after_silu: bool = False


@dataclasses.dataclass(frozen=True)
class Swiglu:
    """``SwigluActivation`` of the newest TensorRT-LLM, and a field that nobody knows."""

    clamp: Any = None
    clamp_after_silu: bool = False
    slope: float = 1.0
    kind: ClassVar[Any] = host.ActivationType.Swiglu

    def constants(self) -> Constants:
        return Constants(limit=self.clamp, clamp_after_silu=self.clamp_after_silu)


@pytest.mark.parametrize(
    ("activation", "constants", "unknown"),
    [
        (Swiglu(), False, ""),
        (Swiglu(7.0), True, ""),
        (Swiglu(7.0, clamp_after_silu=True), True, "clamp_after_silu"),
        (Swiglu(slope=0.5), False, "slope"),
        (Swiglu(slope=float("1")), False, ""),
    ],
)
def test_an_activation_that_is_not_known_whole_is_refused_by_name(activation: Swiglu, constants: bool, unknown: str) -> None:
    shape, deployment = describe.from_config(host.ModelConfig(), arguments={"activation": activation})
    assert shape.activation_constants == constants
    verdict = decide(shape, deployment, features=families.cuda(Environment()))
    assert verdict.reasons == ((RejectReason.ACTIVATION,) if unknown else ())
    assert not unknown or f"activation Swiglu with {unknown}, the kernel has Geglu" in str(verdict)


def test_many_routes_per_token_end_before_the_dynamic_kernel() -> None:
    b12x, triton = families.b12x(Environment()), families.triton(Environment())
    assert [default_crossover(top_k, [b12x]) for top_k in (1, 8, 16, 22, 1024)] == [64, 64, 64, 47, 2]
    assert [default_crossover(top_k, [b12x, triton]) for top_k in (8, 1024)] == [64, 64]
    module, _ = layers.made(24, 128, 128, top_k=22)
    assert [module.backend.schedule.at(tokens) for tokens in (46, 47)] == [module.backend.kernel, None]


def test_the_scheduler_may_see_other_token_counts_in_quantize_input_and_run_moe(
    layer: tuple[Any, dict[str, torch.Tensor]],
) -> None:
    module, tensors = layer
    backend = module.backend
    x, logits = layers.inputs(module, 80, tensors)
    ids, router_weights = module.routing_method.apply(logits)
    small, _ = backend.quantize_input(x[:40], post_quant_comm=False)
    assert small.dtype is torch.bfloat16
    for swizzled in (True, False):
        grown = layers.run_moe(backend, x, ids, router_weights, None, is_sf_swizzled=swizzled, output_dtype=torch.bfloat16)
        assert layers.errors(module, x, logits, grown, tensors)[0] < 0.05
    packed, sf = backend.quantize_input(x, post_quant_comm=False)
    assert packed.dtype is torch.uint8
    with verify.kernel_calls(backend) as reached:
        layers.run_moe(backend, packed[:4], ids[:4], router_weights[:4], sf, output_dtype=torch.bfloat16)
    assert len(reached) == 0  # already quantized: CUTLASS


def test_moe_output_is_written_and_output_dtype_is_honored(layer: tuple[Any, dict[str, torch.Tensor]]) -> None:
    module, tensors = layer
    for tokens in (4, 70):
        x, logits = layers.inputs(module, tokens, tensors)
        ids, router_weights = module.routing_method.apply(logits)
        quantized, sf = module.backend.quantize_input(x, post_quant_comm=False)
        call = module.backend, quantized, ids, router_weights, sf
        for dtype in (torch.bfloat16, torch.float32):
            buffer = torch.full((tokens, 128), float("nan"), dtype=dtype)
            assert layers.run_moe(*call, output_dtype=dtype, moe_output=buffer) is buffer
            assert layers.errors(module, x, logits, buffer, tensors)[0] < 0.05
    results = [layers.run_moe(module.backend, x[:3], ids[:3], router_weights[:3], output_dtype=d) for d in (None, torch.float16)]
    assert [result.dtype for result in results] == [torch.bfloat16, torch.float16]
    assert results[0].data_ptr() != results[1].data_ptr() != buffer.data_ptr()


@pytest.mark.embedded  # TensorRT-LLM hands the record itself to its operator, which has no place for it
def test_quantized_input_and_no_tokens_are_served_as_the_host_serves_them(layer: tuple[Any, dict[str, torch.Tensor]]) -> None:
    module, tensors = layer
    x, logits = layers.inputs(module, 5, tensors)
    packed, sf = fp4_quantize(x, module.backend.fc31_input_scale)
    result = module(host.Fp4QuantizedTensor(packed, sf), logits, output_dtype=torch.bfloat16)
    assert layers.errors(module, x, logits, result, tensors)[0] < 0.05
    with verify.kernel_calls(module.backend) as reached:
        empty = module(x[:0], logits[:0])
    assert len(reached) == 0
    assert empty.shape == (0, 128)
    assert empty.dtype is torch.bfloat16


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2), (2, 2), (1, 3)])
@pytest.mark.parametrize("tokens", [2, 63, 64])
def test_partial_sums_of_the_ranks_add_up(tp: int, ep: int, tokens: int) -> None:
    tensors = random_experts(6, 128, 384)
    total: Any = 0
    for mapping in layers.ranks(tp, ep):
        module = layers.load(layers.create(6, 128, 384, top_k=3, mapping=mapping), tensors)
        assert module.backend.kernel is not None
        x, logits = layers.inputs(module, tokens, tensors)
        total = total + module(x, logits).float()
    none, kernel = layers.errors(module, x, logits, total, tensors)
    assert none < 0.05
    if tokens < default_crossover() and tp == 1:
        assert kernel < 0.006  # one bf16 rounding per rank


NVFP4 = host.QuantConfig(quant_algo=host.QuantAlgo.NVFP4, group_size=16)
REFUSED: list[tuple[dict[str, Any], RejectReason]] = [
    ({"dtype": torch.float16}, RejectReason.ACTIVATION_DTYPE),
    (layers.swiglu_constants(limit=torch.ones(4)), RejectReason.ACTIVATION_CONSTANTS),
    ({"quant_config": host.QuantConfig()}, RejectReason.QUANTIZATION),
    ({"quant_config": host.QuantConfig(quant_algo=host.QuantAlgo.NVFP4, group_size=32)}, RejectReason.GROUP_SIZE),
    ({"top_k": 1, "apply_router_weight_on_input": True}, RejectReason.ROUTER_WEIGHT_ON_INPUT),
]


@pytest.mark.parametrize(("arguments", "reason"), REFUSED, ids=lambda v: getattr(v, "name", None))
def test_what_is_refused_behaves_as_the_host_to_the_bit(arguments: dict[str, Any], reason: RejectReason) -> None:
    given = {"dtype": torch.bfloat16, "top_k": 2, "quant_config": NVFP4, **arguments}
    top_k, config = given.pop("top_k"), host.ModelConfig(quant_config=given.pop("quant_config"))
    given |= {"routing_method": host.RenormalizeMoeRoutingMethod(top_k), "model_config": config}
    given |= {"num_experts": 4, "hidden_size": 128, "intermediate_size": 128}
    if not host.has_get_moe_cls:
        given["init_load_balancer"] = False
    # The class is bound before the layer's own configuration is known, as with per-layer quantization.
    both = [cls(**given) for cls in (FlashInferNvfp4Sm12xFusedMoE, host.CutlassFusedMoE)]
    tensors = random_experts(4, 128, 128)
    if reason is RejectReason.QUANTIZATION:
        tensors = {name: torch.randn(128, 128).bfloat16() for name in tensors if name.endswith(".weight")}
    x, router_weights, results = torch.randn(3, 128).to(given["dtype"]), torch.rand(3, top_k), []
    ids = torch.randint(0, 4, (3, top_k), dtype=torch.int32)
    for module in both:
        module.load_weights([tensors])
        module.post_load_weights()
        quantized, sf = module.quantize_input(x, post_quant_comm=False)
        results.append(layers.run_moe(module, quantized, ids, router_weights, sf, output_dtype=x.dtype))
    assert (both[0].verdict.reasons, both[0].kernel) == ((reason,), None)
    mine, its = ({name: (p.shape, p.dtype) for name, p in module.named_parameters()} for module in both)
    assert mine == its
    assert torch.equal(*results)


def test_awq_scales_that_show_up_with_the_weights_leave_the_layer_to_cutlass(layer: tuple[Any, dict[str, torch.Tensor]]) -> None:
    module, tensors = layer
    backend = module.backend
    backend.fc31_act_scale = torch.nn.Parameter(torch.ones(1, 128, dtype=torch.bfloat16), requires_grad=False)
    backend.post_load_weights()
    assert backend.verdict.reasons == (RejectReason.PRE_QUANT_SCALE,)
    x, logits = layers.inputs(module, 4, tensors)
    with verify.kernel_calls(backend) as reached:
        assert layers.errors(module, x, logits, module(x, logits), tensors)[0] < 0.05
    assert len(reached) == 0


def test_weights_created_anew_for_another_quantization(layer: tuple[Any, dict[str, torch.Tensor]]) -> None:
    """Hosts clear ``_weights_created`` of a layer that an exclusion reaches late."""
    backend = layer[0].backend
    assert backend.kernel is not None
    backend.quant_config = None
    backend._weights_created = False
    backend.create_weights()
    assert backend.kernel is None
    assert backend.verdict.reasons == (RejectReason.QUANTIZATION,)
    plain = {f"{e}.{w}.weight": torch.randn(192, 128).bfloat16() for e in range(6) for w in ("w1", "w3")}
    plain |= {f"{e}.w2.weight": torch.randn(128, 192).bfloat16() for e in range(6)}
    backend.load_weights([plain])
    backend.post_load_weights()
    x, ids, router_weights = torch.randn(3, 128).bfloat16(), torch.randint(0, 6, (3, 3), dtype=torch.int32), torch.rand(3, 3)
    with verify.kernel_calls(backend) as reached:
        assert layers.run_moe(backend, x, ids, router_weights, output_dtype=torch.bfloat16).isfinite().all()
    assert len(reached) == 0


# ---- faults --------------------------------------------------------------------------------------------------------------


def test_a_fault_in_a_call_is_the_hosts_to_answer_and_said_once(
    layer: tuple[Any, dict[str, torch.Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    module, tensors = layer
    x, logits = layers.inputs(module, 5, tensors)
    module.backend.kernel.run = broken = Mock(side_effect=ZeroDivisionError("in the kernel"))
    ids, router_weights = module.routing_method.apply(logits)
    buffer = torch.full((5, 128), float("nan"), dtype=torch.bfloat16)
    result = layers.run_moe(module.backend, x, ids, router_weights, output_dtype=torch.bfloat16, moe_output=buffer)
    assert result is buffer
    assert layers.errors(module, x, logits, result, tensors)[0] < 0.05
    assert torch.equal(module(x, logits), result)
    broken.assert_called_once()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "stays on CUTLASS: KERNEL_PLAN_FAILED: ZeroDivisionError: in the kernel" in line
    layers.load(module, tensors)
    assert module.backend.kernel is None
    assert trtllm_b12x.status().reasons["KERNEL_PLAN_FAILED"] >= 1


def test_an_error_that_is_the_hosts_too_stays_the_hosts(layer: tuple[Any, dict[str, torch.Tensor]]) -> None:
    module, tensors = layer
    plain = layers.load(layers.create(6, 128, 192, top_k=3, promote=False), tensors)
    x, logits = layers.inputs(module, 5, tensors)
    ids, router_weights = module.routing_method.apply(logits)
    small = torch.empty(4, 128, dtype=torch.bfloat16)  # too small for the call
    errors = []
    for backend in (module.backend, plain.backend):
        given, sf = backend.quantize_input(x, post_quant_comm=False)
        with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)) as raised:
            layers.run_moe(backend, given, ids, router_weights, sf, output_dtype=torch.bfloat16, moe_output=small)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]
    assert module.backend.kernel is not None  # the call was wrong, not the kernel
    assert layers.errors(module, x, logits, module(x, logits), tensors)[0] < 0.05
