# SPDX-License-Identifier: Apache-2.0
"""Tables in README.md and docs/models.md of the known models that the package serves, by the rules of ``decision``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.markdown import table
from tests.facts import GOOD
from trtllm_b12x import formats
from trtllm_b12x.decision import Deployment, families
from trtllm_b12x.decision.decide import resolve
from trtllm_b12x.decision.verdicts import RejectReason
from trtllm_b12x.formats.geometry import LayerShape
from trtllm_b12x.tools.checkpoint import compressed_tensors

CARD = replace(GOOD, triton_lacks=())
"""An SM120 card with everything installed."""


@dataclass(frozen=True)
class Model:
    """Experts of published checkpoints."""

    names: tuple[str, ...]
    """Names on the Hugging Face hub, or of a kind of export."""
    shape: LayerShape
    """Sizes are None where no rule depends on them."""
    without: str
    """What TensorRT-LLM does with these models on SM12x without the package."""
    compressed: str = ""
    """``model_type`` of a compressed-tensors checkpoint; empty for other producers."""

    @property
    def format(self) -> str:
        row = formats.find(self.shape.quant_algo)
        return f"{row.name if row else self.shape.quant_algo}{' in compressed-tensors' if self.compressed else ''}"


CUTLASS = "CUTLASS"
_GEMMA = LayerShape(128, 8, 2816, 704, "Geglu", "NVFP4", 16, "bfloat16")
_GPT_OSS = LayerShape(None, 4, 2880, 2880, "Swiglu", "W4A8_MXFP4_MXFP8", 32, "bfloat16", activation_constants=True, bias=True)
MODELS = (
    # hf_quant_config.json: MIXED_PRECISION, experts W4A16_NVFP4; triton_dequant_nvfp4.py (TensorRT-LLM, file id 65972117462).
    Model(
        ("nvidia/Qwen3.6-35B-A3B-NVFP4",),
        LayerShape(256, 8, 2048, 512, "Swiglu", "W4A16_NVFP4", 16, "bfloat16"),
        "CUTLASS, which rewrites experts to bf16 at every call",
    ),
    Model(("nvidia/Qwen3-30B-A3B-FP4",), LayerShape(128, 8, 2048, 768, "Swiglu", "NVFP4", 16, "bfloat16"), CUTLASS),
    Model(("nvidia/Gemma-4-26B-A4B-NVFP4",), _GEMMA, CUTLASS),
    Model(("RedHatAI/gemma-4-26B-A4B-it-NVFP4",), _GEMMA, "does not load it", "gemma4"),
    Model(
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",),
        LayerShape(512, 22, 1024, 2688, "Relu2", "NVFP4", 16, "bfloat16"),
        CUTLASS,
    ),
    # Sizes: config.json of NVIDIA-Nemotron-3-Nano-30B-A3B (file id 53261316862).
    Model(
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",),
        LayerShape(128, 6, 2688, 1856, "Relu2", "NVFP4", 16, "bfloat16"),
        CUTLASS,
    ),
    # get_mxfp4_quant_algo (TensorRT-LLM, file id 60599514144): W4A8_MXFP4_MXFP8 from SM100 on.
    Model(("openai/gpt-oss-20b", "openai/gpt-oss-120b"), _GPT_OSS, CUTLASS),
    Model(("nvidia/MiniMax-M2.7-NVFP4",), LayerShape(activation="Swiglu", quant_algo="NVFP4", group_size=16), CUTLASS),
    Model(
        ("deepseek-ai/DeepSeek-V4-Flash",),
        LayerShape(256, 6, 4096, 2048, "Swiglu", "W4A8_MXFP4_MXFP8", 32, "bfloat16", activation_constants=True),
        CUTLASS,
    ),
    Model(
        ("MiniMax-M3-MXFP8", "models exported with MXFP8_DEFAULT_CFG"),
        LayerShape(activation="Swiglu", activation_constants=True, quant_algo="MXFP8", group_size=32),
        "refuses them",
    ),
)


def known(name: str) -> Model | None:
    """Return the model with this name on the hub, or None."""
    return next((model for model in MODELS if name.lower() in map(str.lower, model.names)), None)


def answer(model: Model) -> str:
    """Return which families serve the layers, or why none does."""
    if model.compressed and model.compressed not in compressed_tensors.MAPPED:
        return "no: TensorRT-LLM's weight mapper does not rename its tensors"
    rows = families.rows(("cuda", "b12x", "triton", "gemm", "grouped"), model.shape.quant_algo)
    kernels = {family.name: family.features(CARD) for family in rows}
    resolution = resolve(model.shape, Deployment(ep_size=1, tp_size=1), CARD, kernels)
    if not resolution.served:
        return "no: " + ", ".join(dict.fromkeys(rejection.reason.name for _, rejection in resolution.refused))
    served = [kernels[name] for name in resolution.families]
    decode = [f"`{f.name}`" for f in served if not f.measured_from and not f.every_count]
    prefill = [f"`{f.name}`" for f in served if f.measured_from or f.every_count]
    if not any(f.every_count for f in served):
        prefill.insert(0, "CUTLASS")
    return f"yes: decode on {_listed(decode)}, prefill on {_listed(prefill)}"


def _listed(names: list[str]) -> str:
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def under_cutedsl(model: Model) -> str:
    """Return what serves on SM12x under ``backend: CUTEDSL``, without the package.

    ``CuteDslB12xFusedMoE`` takes NVFP4 and W4A16_NVFP4 with SwiGLU or ReLU2 on one rank (TensorRT-LLM PR 13773, file id
    71137002835). NVFP4 prefill stays on CUTLASS. Other layers are served as under AUTO.
    """
    algo, plain = model.shape.quant_algo, model.shape.activation in ("Swiglu", "Relu2") and not model.shape.activation_constants
    if not plain or algo not in ("NVFP4", "W4A16_NVFP4"):
        return "the same"
    return "b12x" if algo == "W4A16_NVFP4" else "b12x below 64 tokens"


def served() -> list[str]:
    """Return the table of models."""
    rows = [[", ".join(m.names), m.format, answer(m), f"{m.without}; {under_cutedsl(m)}"] for m in MODELS]
    return table(["model", "experts", "with the package", "TensorRT-LLM alone: AUTO; `backend: CUTEDSL`"], rows)


def capabilities() -> list[str]:
    """Return the table of what each family serves."""
    rows = []
    for family in families.FAMILIES:
        f = family.features(CARD)
        tokens = "every call" if f.every_count else f"from {f.measured_from} tokens, if measured" if f.measured_from else "decode"
        sizes = f"hidden by {f.hidden_size_multiple}, intermediate by {f.group_size}"
        gathers = f.quantized_input or RejectReason.ATTENTION_DP not in f.bound_by
        ranks = [name for name, yes in (("EP", f.negative_ids), ("attention DP", gathers)) if yes]
        activations = ", ".join(sorted(f.activations))
        rows.append(
            [
                f"`{family.name}`",
                family.format,
                tokens,
                activations,
                ", ".join(sorted(f.dtypes)),
                sizes,
                ", ".join(["TP", *ranks]),
            ]
        )
    return table(["family", "experts", "serves", "activations", "dtype", "multiples", "ranks"], rows)


if __name__ == "__main__":
    print(__doc__ + "\npython -m benchmarks.results writes it.")
