# SPDX-License-Identifier: Apache-2.0
"""Small random MoE models, quantized and exported by nvidia-modelopt itself.

``python -m tests.integration.exports qwen3-moe DIRECTORY`` writes ``DIRECTORY/nvfp4``, with ``--original`` also the
unquantized model as ``DIRECTORY/original``.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_b12x import formats


def build(family: str, config_class: str, model_class: str, **sizes: Any) -> Any:
    """Build a model of ``transformers`` with random weights in bf16."""
    import torch

    folder = f"transformers.models.{family}"
    configuration, modeling = (importlib.import_module(f"{folder}.{kind}_{family}") for kind in ("configuration", "modeling"))
    config = getattr(configuration, config_class)(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    model = getattr(modeling, model_class)(config).to(torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):  # of experts; transformers leaves them zero
            parameter.data.normal_(0, 0.02)
    model.config.architectures = [model_class]  # the exporter reads it
    return model


_SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "num_local_experts": 4,
}
MODELS = {
    # SwiGLU experts off the kernel's tile.
    "qwen3-moe": partial(
        build,
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=320,
        num_hidden_layers=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    # Squared-ReLU experts.
    "nemotron-h": partial(
        build,
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        hidden_size=256,
        intermediate_size=256,
        layers_block_type=["attention", "moe", "moe"],
        head_dim=64,
        n_routed_experts=8,
        num_experts_per_tok=4,
        moe_intermediate_size=320,
        moe_shared_expert_intermediate_size=128,
        n_group=1,
        topk_group=1,
        mamba_num_heads=4,
        mamba_head_dim=64,
        n_groups=1,
        ssm_state_size=16,
    ),
    # One routed expert per token, exported with all experts stacked in one tensor.
    "llama4": partial(
        build, "llama4", "Llama4TextConfig", "Llama4ForCausalLM", **_SMALL, intermediate_size_mlp=128, interleave_moe_layer_step=1
    ),
    # Experts named w1, w2 and w3.
    "mixtral": partial(build, "mixtral", "MixtralConfig", "MixtralForCausalLM", **_SMALL),
    # GeGLU experts beside a dense MLP.
    "gemma4": partial(
        build,
        "gemma4",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        vocab_size_per_layer_input=256,
        hidden_size=256,
        hidden_size_per_layer_input=0,
        intermediate_size=128,
        num_hidden_layers=1,
        head_dim=32,
        global_head_dim=32,
        enable_moe_block=True,
        num_experts=12,
        top_k_experts=4,
        moe_intermediate_size=96,
    ),
    # SwiGLU with alpha, beta and limit, the limit low enough for small weights to meet it.
    "minimax-m3": partial(
        build,
        "minimax_m3_vl",
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3VLForCausalLM",
        **_SMALL,
        dense_intermediate_size=128,
        shared_intermediate_size=96,
        rotary_dim=16,
        num_experts_per_tok=2,
        mlp_layer_types=["dense", "sparse"],
        swiglu_limit=0.1,
    ),
    # Expert biases, gate and up by turns, SwiGLU with alpha, beta and a limit that small weights meet; sizes off the tile of 128.
    "gpt-oss": partial(
        build,
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        **_SMALL,
        num_experts_per_tok=2,
        initializer_range=0.1,
        swiglu_limit=0.03,
    ),
    # SwiGLU with a limit alone.
    "deepseek-v4": partial(
        build,
        "deepseek_v4",
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        **_SMALL,
        moe_intermediate_size=96,
        n_routed_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=0.01,
    ),
}


def export(
    model: Any,
    directory: Path,
    original: bool = False,
    exclude: tuple[str, ...] = (),
    form: str = "nvfp4",
    **export_arguments: Any,
) -> Path:
    """Calibrate on random tokens, quantize with the recipe of a format and write ``directory/FORM``; returns that path.

    Args:
        exclude: wildcard names of quantizers to switch off.
        form: name of a format, or of one of nvidia-modelopt's recipes.
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
        row = formats.find(form.upper())
        config = copy.deepcopy(getattr(mtq, form if row is None else row.recipe))
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
    for name in ("nvfp4", "original"):
        shutil.rmtree(arguments.directory / name, ignore_errors=True)
    path = export(MODELS[arguments.model](), arguments.directory, arguments.original)
    print(f"exported {arguments.model} to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
