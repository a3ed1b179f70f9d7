"""Small random MoE models, quantized and exported by nvidia-modelopt itself.

``python -m tests.integration.exports qwen3-moe DIRECTORY`` writes ``DIRECTORY/nvfp4``, ``mxfp8-qwen3-moe`` ``DIRECTORY/mxfp8``;
with ``--original`` also the unquantized model as ``DIRECTORY/original``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any


def qwen3_moe(**overrides: Any) -> Any:
    """Qwen3-MoE with SwiGLU experts off the kernel's tile, bf16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **{
            "vocab_size": 256,
            "hidden_size": 512,
            "intermediate_size": 512,
            "moe_intermediate_size": 320,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **overrides,
        }
    )
    return _named(Qwen3MoeForCausalLM, config)


def nemotron_h(**overrides: Any) -> Any:
    """Nemotron-H with squared-ReLU experts, bf16."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **{
            "vocab_size": 256,
            "hidden_size": 256,
            "intermediate_size": 256,
            "layers_block_type": ["attention", "moe", "moe"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 320,
            "moe_shared_expert_intermediate_size": 128,
            "n_group": 1,
            "topk_group": 1,
            "mamba_num_heads": 4,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "ssm_state_size": 16,
            **overrides,
        }
    )
    return _named(NemotronHForCausalLM, config)


def llama4(**overrides: Any) -> Any:
    """Llama 4: one routed expert per token, exported with all experts stacked in one tensor."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    return _named(
        Llama4ForCausalLM, Llama4TextConfig(**_SMALL, **overrides, intermediate_size_mlp=128, interleave_moe_layer_step=1)
    )


def mixtral(**overrides: Any) -> Any:
    """Mixtral: experts named w1, w2 and w3."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return _named(MixtralForCausalLM, MixtralConfig(**_SMALL, **overrides))


def gemma4(**overrides: Any) -> Any:
    """Gemma 4: GeGLU experts beside a dense MLP, bf16."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **{
            "vocab_size": 256,
            "vocab_size_per_layer_input": 256,
            "hidden_size": 256,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "global_head_dim": 32,
            "enable_moe_block": True,
            "num_experts": 12,
            "top_k_experts": 4,
            "moe_intermediate_size": 96,
            **overrides,
        }
    )
    return _named(Gemma4ForCausalLM, config)


def minimax_m3(**overrides: Any) -> Any:
    """MiniMax-M3: SwiGLU with alpha, beta and limit, the limit low enough for small weights to meet it."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as source
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    config = MiniMaxM3VLTextConfig(
        **{
            **_SMALL,
            "dense_intermediate_size": 128,
            "shared_intermediate_size": 96,
            "rotary_dim": 16,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse"],
            "swiglu_limit": 0.1,
            **overrides,
        }
    )
    return _named(source.MiniMaxM3VLForCausalLM, config)


_SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
}


def _named(model_class: Any, config: Any) -> Any:
    import torch

    torch.manual_seed(0)
    model = model_class(config).to(torch.bfloat16).eval()
    model.config.architectures = [model_class.__name__]  # the exporter reads it
    return model


MODELS = {
    "gemma4": gemma4,
    "llama4": llama4,
    "minimax-m3": minimax_m3,
    "mixtral": mixtral,
    "nemotron-h": nemotron_h,
    "qwen3-moe": qwen3_moe,
    "mxfp8-gemma4": gemma4,
    "mxfp8-minimax-m3": minimax_m3,
    "mxfp8-qwen3-moe": qwen3_moe,
}


def export(
    model: Any,
    directory: Path,
    original: bool = False,
    exclude: tuple[str, ...] = (),
    form: str = "nvfp4",
    **export_arguments: Any,
) -> Path:
    """Calibrate on random tokens, quantize with ``NVFP4_DEFAULT_CFG`` and write ``directory/nvfp4``; returns that path.

    Args:
        exclude: wildcard names of quantizers to switch off.
        form: another, ``mxfp8``.
    """
    import copy

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # modelopt is not tested with this transformers; its exports are what we test
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        if original:
            model.save_pretrained(directory / "original")
            model.config.dtype = model.dtype  # saving turned it into a string, which the exporter cannot read
        config = copy.deepcopy(getattr(mtq, f"{form.upper()}_DEFAULT_CFG"))
        for pattern in exclude:
            config["quant_cfg"].append({"quantizer_name": pattern, "enable": False})
        tokens = torch.randint(0, model.config.vocab_size, (8, 128), generator=torch.Generator().manual_seed(0))
        mtq.quantize(model, config, forward_loop=lambda m: m(tokens))
        export_hf_checkpoint(model, export_dir=directory / form, **export_arguments)
    return directory / form


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--original", action="store_true", help="also write the unquantized model")
    arguments = parser.parse_args()
    form = "mxfp8" if arguments.model.startswith("mxfp8") else "nvfp4"
    for name in (form, "original"):
        shutil.rmtree(arguments.directory / name, ignore_errors=True)
    path = export(MODELS[arguments.model](), arguments.directory, arguments.original, form=form)
    print(f"exported {arguments.model} to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
