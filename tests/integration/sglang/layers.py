# SPDX-License-Identifier: Apache-2.0
"""Real layers of SGLang on a machine without its card, loaded by its own loader, and FlashInfer's call in torch.

The card is pretended by SGLang's own overrides. Only FlashInfer's function is replaced, with and without the package.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from trtllm_b12x.engines.sglang import facts
from trtllm_b12x.engines.trtllm.embedded import ops
from trtllm_b12x.formats import DEFAULT_LAYOUT, mxfp4, nvfp4
from trtllm_b12x.formats.geometry import Geometry
from trtllm_b12x.formats.nvfp4 import InputScales, NVFP4Weights
from trtllm_b12x.formats.weights import Epilogue
from trtllm_b12x.kernels import MoECall
from trtllm_b12x.kernels.reference import CUTLASS, activate

served_by_sglang: list[int] = []
"""Tokens of each call of FlashInfer's function."""


@functools.cache
def pretend_sm120() -> None:
    """Make SGLang see an SM120. Idempotent."""
    _without_torchvision()
    with mock.patch.object(torch.cuda, "is_available", return_value=False):  # imports want sgl-kernel beside a GPU
        _pretend_sm120()


def _pretend_sm120() -> None:
    context = importlib.import_module("sglang.srt.runtime_context")
    context.override_platform(is_sm120=True, is_blackwell=True, is_cuda=True).install()
    _arguments().install()
    importlib.import_module(f"{facts.MOE}.utils").initialize_moe_config()
    place()
    runners: list[Any] = [importlib.import_module(f"{facts.MOE}.moe_runner.flashinfer_{name}") for name in ("cutlass", "trtllm")]
    runners[0]._flashinfer_cutlass_fused_moe = lambda: (cutlass_in_torch, _ActivationType)
    names = {("silu", True): 3, ("gelu", True): 4, ("relu2", False): 6}
    runners[1].get_activation_type = lambda name, is_gated=True: names[name, is_gated]
    flashinfer: Any = types.ModuleType("flashinfer")
    flashinfer.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    flashinfer.block_scale_interleave = ops.block_scale_interleave
    flashinfer.mxfp8_quantize = lambda x, **rest: (x, None)  # ``cutlass_in_torch`` quantizes
    sys.modules.setdefault("flashinfer", flashinfer)
    layer(draw(8, 256, 128), 8, 256, 128, 2)  # what SGLang imports late


@contextlib.contextmanager
def published(**fields: Any) -> Iterator[None]:
    """Let SGLang's configuration have these arguments of a server."""
    initialize = importlib.import_module(f"{facts.MOE}.utils").initialize_moe_config
    with _arguments(**fields):
        initialize()
        place()
        yield
    initialize()
    place()


def _arguments(**fields: Any) -> Any:
    usual = {"moe_runner_backend": "flashinfer_cutlass", "quantization": "modelopt_fp4"}
    return importlib.import_module("sglang.srt.runtime_context").get_context().override_server_args(**{**usual, **fields})


def place(ep: int = 1, ep_rank: int = 0, tp: int = 1, tp_rank: int = 0) -> None:
    """Be this rank of ``ep * tp``."""
    rank, ranks = ep_rank * tp + tp_rank, ep * tp
    sizes = {"tp_group": None, "tp_size": ranks, "attn_tp_size": ranks, "tp_rank": rank, "attn_tp_rank": rank}
    moe = {"moe_ep_size": ep, "moe_ep_rank": ep_rank, "moe_tp_size": tp, "moe_tp_rank": tp_rank}
    parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    if has_limits():
        parallel.override_permanently(**moe, **sizes)
        return
    # 0.5.20 asks functions.
    parallel.override_permanently(moe_ep_size=ep, moe_tp_size=tp)
    state: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    for name, size, place in (("expert", ep, ep_rank), ("tensor", tp, tp_rank)):
        setattr(state, f"get_moe_{name}_parallel_world_size", lambda size=size: size)
        setattr(state, f"get_moe_{name}_parallel_rank", lambda place=place: place)
    for module in (f"{facts.MOE}.fused_moe_triton.layer", facts.CUTLASS):
        if hasattr(importlib.import_module(module), "get_tp_group"):
            setattr(importlib.import_module(module), "get_tp_group", lambda: None)  # noqa: B010


def has_limits() -> bool:
    """Whether this SGLang hands SwiGLU's constants to FlashInfer: 0.5.23 does, 0.5.20 does not."""
    return hasattr(importlib.import_module(facts.CUTLASS).FlashInferCutlassMoeQuantInfo, "swiglu_limit")


def _without_torchvision() -> None:
    """Stand in for torchvision, whose operators do not load beside a CPU build of torch, and which no layer of experts calls."""
    if importlib.util.find_spec("torchvision") is not None or "torchvision" in sys.modules:
        return
    importlib.import_module("transformers.utils.import_utils").is_torchvision_available()  # remembers that there is none

    class Anything:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self

    for name in ("", ".transforms", ".transforms.functional", ".io", ".ops"):
        module: Any = types.ModuleType(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__, module.__file__, module.__version__ = [], os.devnull, "0"  # inspect asks for a file
        module.__getattr__ = Anything().__getattr__
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


@dataclass(frozen=True)
class Checkpoint:
    """An NVFP4 checkpoint of one layer: codes, block scales, global scale and input scale by expert and projection."""

    tensors: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    inputs: bool
    """It has input scales."""

    def expected(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, activation: str = "Swiglu",
        constants: tuple[float, float, float] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the layer's output in float32, computed expert by expert."""
        out = torch.zeros(len(x), x.shape[1], device=x.device)
        for expert in ids.unique().tolist():
            if expert < 0:
                continue
            w1, w2, *gated = (
                self.values(expert, name, x.device) for name in ("w1", "w2", "w3") if (expert, name) in self.tensors
            )
            token, slot = (ids == expert).nonzero(as_tuple=True)
            rows = x[token].float()
            halves = [rows @ w.T for w in (*gated, w1)]  # up, gate
            inner = activate(activation if constants is None else "SwigluBias", *halves, *(constants or ()))
            out.index_add_(0, token, weights[token, slot].float().unsqueeze(1) * (inner @ w2.T))
        return out

    def values(self, expert: int, name: str, device: torch.device) -> torch.Tensor:
        """Return a matrix in float32."""
        codes, scales, second, _ = (tensor.to(device) for tensor in self.tensors[expert, name])
        return nvfp4.dequantize(codes, scales).float() * second


def draw(
    experts: int, hidden: int, size: int, *, gated: bool = True, seed: int = 0, unequal: bool = False, inputs: bool = True
) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    found: dict[tuple[int, str], Any] = {}
    for expert in range(experts):
        for name in ("w1", "w2", "w3") if gated else ("w1", "w2"):
            rows, columns = (hidden, size) if name == "w2" else (size, hidden)
            codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
            scales = (0.5 + 1.5 * torch.rand(rows, columns // 16, generator=generator)).to(torch.float8_e4m3fn)
            second = (0.8 + 0.4 * torch.rand((), generator=generator)) / (3 * columns**0.5)
            if name == "w3" and not unequal:
                second = found[expert, "w1"][2]
            given = (0.9 + 0.2 * torch.rand((), generator=generator)) / 672 * (12 if name == "w2" else 1)
            found[expert, name] = codes, scales, second, given
    return Checkpoint(found, inputs)


def layer(
    checkpoint: Checkpoint,
    experts: int,
    hidden: int,
    size: int,
    top_k: int,
    algo: str = "NVFP4",
    device: str = "cpu",
    **more: Any,
) -> Any:
    """Build a layer of SGLang and load it."""
    kind = importlib.import_module(f"{facts.MOE}.fused_moe_triton.layer").FusedMoE
    config = importlib.import_module(facts.METHODS[0][0]).ModelOptFp4Config
    with torch.device(device):
        made = kind(
            num_experts=experts, hidden_size=hidden, intermediate_size=size, layer_id=0, top_k=top_k,
            quant_config=config.from_config({"quant_algo": algo, "group_size": 16, "ignore": []}),
            prefix="model.layers.0.mlp.experts",
            **{"activation": "silu", "is_gated": True, "params_dtype": torch.bfloat16, **more},
        )  # fmt: skip
    load(made, checkpoint)
    return made


def load(made: Any, checkpoint: Checkpoint) -> None:
    """Load as a model's ``load_weights`` does, each tensor through its parameter's loader, then end the load as SGLang does."""
    for (expert, name), tensors in checkpoint.tensors.items():
        prefix = "w2" if name == "w2" else "w13"
        kinds = ("weight", "weight_scale", "weight_scale_2", "input_scale")[: 4 if checkpoint.inputs else 3]
        for kind, tensor in zip(kinds, tensors, strict=False):
            parameter = getattr(made, f"{prefix}_{kind}")
            parameter.weight_loader(parameter, tensor, f"experts.{prefix}_{kind}", shard_id=name, expert_id=expert)
    made.quant_method.process_weights_after_loading(made)


@dataclass(frozen=True)
class GptOss:
    """gpt-oss's tensors of one layer: gate's and up's rows by turns, codes, E8M0 scales, and biases."""

    w13: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    w2: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def expected(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the layer's output in float32, computed expert by expert."""
        out = torch.zeros(len(x), x.shape[1], device=x.device)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            (w13, b13), (w2, b2) = (
                (mxfp4.dequantize(codes[expert], scales[expert]), bias[expert].float())
                for codes, scales, bias in (self.w13, self.w2)
            )
            both = x[token].float() @ w13.T + b13
            inner = activate("SwigluBias", both[:, 1::2], both[:, ::2], 1.702, 1.0, 7.0)
            out.index_add_(0, token, weights[token, slot].float().unsqueeze(1) * (inner @ w2.T + b2))
        return out


def draw_gpt_oss(experts: int, hidden: int, size: int, device: str = "cpu") -> GptOss:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Any:
        codes = torch.randint(0, 256, (experts, rows, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 124, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        bias = torch.randn(experts, rows, generator=generator).to(torch.bfloat16)
        return codes.to(device), scales.to(device), bias.to(device)

    return GptOss(matrix(2 * size, hidden), matrix(hidden, size))


def gpt_oss_layer(checkpoint: GptOss, experts: int, hidden: int, size: int, top_k: int, device: str = "cpu") -> Any:
    """Build a layer of gpt-oss as its model does, and load it. In ``published(moe_runner_backend="flashinfer_mxfp4", ...)``."""
    kind = importlib.import_module(f"{facts.MOE}.fused_moe_triton.layer").FusedMoE
    config = importlib.import_module(facts.METHODS[1][0]).Mxfp4Config
    with torch.device(device):
        made = kind(
            num_experts=experts, hidden_size=hidden, intermediate_size=size, layer_id=0, top_k=top_k, params_dtype=torch.bfloat16,
            quant_config=config.from_config({"quant_method": "mxfp4"}), prefix="model.layers.0.mlp.experts", activation="silu",
            gemm1_alpha=1.702, gemm1_clamp_limit=7.0, with_bias=True, use_weight_loader_fused=False,
        )  # fmt: skip
    for prefix, tensors in (("w13", checkpoint.w13), ("w2", checkpoint.w2)):
        for name, tensor in zip(("weight", "weight_scale", "weight_bias"), tensors, strict=True):
            parameter = getattr(made, f"{prefix}_{name}")
            parameter.weight_loader(parameter, tensor, weight_name=f"experts.{prefix}_{name}", shard_id=None, expert_id=None)
    made.quant_method.process_weights_after_loading(made)
    return made


def logits_routes(x: torch.Tensor, logits: torch.Tensor, top_k: int, padded: int | None = None, **config: Any) -> Any:
    """Return what SGLang hands to an operator that routes by itself. ``padded``: from which row on no token is in."""
    module = importlib.import_module(f"{facts.MOE}.topk")
    tokens = None if padded is None else torch.tensor(padded, dtype=torch.int32, device=x.device)
    return module.BypassedTopKOutput(x, logits, module.TopKConfig(top_k, **config), tokens)


def routes(tokens: int, experts: int, top_k: int, seed: int = 0, device: str = "cpu") -> Any:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator).to(device)
    values, ids = logits.topk(top_k)
    return importlib.import_module(f"{facts.MOE}.topk").StandardTopKOutput(values.softmax(1), ids.to(torch.int32), logits)


def call(made: Any, x: torch.Tensor, topk: Any) -> torch.Tensor:
    """Call the layer as a model does."""
    result: torch.Tensor = made.forward_impl(x, topk)
    return result


def dispatched(x: torch.Tensor, topk: Any, scales: torch.Tensor | None = None) -> Any:
    """Return what SGLang's dispatcher hands to a quantization method."""
    return importlib.import_module(f"{facts.MOE}.token_dispatcher.standard").StandardDispatchOutput(x, scales, topk)


def quantized(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute FlashInfer's ``fp4_quantize``: codes ``(T, H/2)``, scales in tiles of 128 rows, and the values of both."""
    codes, rows = ops.fp4_quantize(x, scale, is_sf_swizzled_layout=False)
    values = nvfp4.dequantize(codes, rows.view(len(x), -1).view(torch.float8_e4m3fn)) / scale
    return codes, ops.fp4_quantize(x, scale)[1].view(-1, x.shape[1] // 16), values


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


_ActivationType = enum.IntEnum("_ActivationType", "Gelu Relu Silu Swiglu Geglu SwigluBias Relu2 Identity", start=0)
"""FlashInfer's."""


def cutlass_in_torch(
    output: torch.Tensor, input: torch.Tensor, token_selected_experts: torch.Tensor, token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor, fc2_expert_weights: torch.Tensor, output_dtype: torch.dtype, input_sf: Any,
    quant_scales: list[torch.Tensor], ep_size: int, ep_rank: int, activation_type: int, swiglu_alpha: Any = None,
    swiglu_beta: Any = None, swiglu_limit: Any = None, **rest: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Compute FlashInfer's ``cutlass_fused_moe`` of NVFP4: W4A4, and one alpha for gate and up."""
    served_by_sglang.append(len(input))
    if rest.get("use_mxfp8_act_scaling"):
        kernel: Any = CUTLASS["MXFP4"]()
        biases = rest["fc1_expert_biases"], rest["fc2_expert_biases"]
        codes = fc1_expert_weights.detach(), fc2_expert_weights.detach()
        scales = quant_scales[0].detach(), quant_scales[2].detach()
        epilogue = Epilogue(*biases, swiglu_alpha, swiglu_beta, swiglu_limit)
        weights: Any = mxfp4.MXFP4Weights.on_storage(codes, scales, DEFAULT_LAYOUT, epilogue=epilogue)
        sizes = len(codes[0]), token_selected_experts.shape[1], output.shape[1], codes[1].shape[2] * 16
        kernel.geometry = Geometry(*sizes, "SwigluBias", output_dtype, ep_size, torch.bfloat16, "MXFP4", DEFAULT_LAYOUT)
        kernel.capacity, kernel.device = 1 << 20, input.device
        kernel.bind(weights, ep_rank * len(codes[0]))
        output.copy_(kernel.run(MoECall(input, token_selected_experts, token_final_scales)))
        return [output]
    first, codes_1, alpha_1, second, codes_2, alpha_2 = (tensor.detach() for tensor in quant_scales)
    experts = len(fc1_expert_weights)
    inputs = InputScales(first.view(-1), second.view(-1), torch.ones_like(alpha_2), torch.ones_like(alpha_2))
    weights = NVFP4Weights.on_storage(
        (fc1_expert_weights.detach(), fc2_expert_weights.detach()), (codes_1, codes_2), DEFAULT_LAYOUT, fc1_alpha=alpha_1,
        fc2_alpha=alpha_2, input_scales=inputs, fc1_divisor=inputs.fc1_divisor, fc2_divisor=inputs.fc2_divisor,
        epilogue=Epilogue(None, None, swiglu_alpha, swiglu_beta, swiglu_limit),
    )  # fmt: skip
    kernel = CUTLASS["NVFP4"]()
    name = "SwigluBias" if swiglu_limit is not None else _ActivationType(activation_type).name
    geometry = Geometry(
        experts, token_selected_experts.shape[1], output.shape[1], fc2_expert_weights.shape[2] * 16, name, output_dtype, ep_size,
        format="NVFP4", layout=DEFAULT_LAYOUT,
    )  # fmt: skip
    kernel.geometry, kernel.capacity, kernel.device = geometry, 1 << 20, input.device
    kernel.bind(weights, ep_rank * experts)
    call = MoECall(input, token_selected_experts, token_final_scales, x_sf=input_sf, swizzled=input_sf is not None)
    output.copy_(kernel.run(call))
    return [output]
