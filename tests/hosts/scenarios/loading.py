# SPDX-License-Identifier: Apache-2.0
"""How weights arrive: from a peer, in groups, in buckets, with gate and up fused."""

from __future__ import annotations

import random
from typing import Any

import torch
from tensorrt_llm._torch.models.modeling_double import Model
from tensorrt_llm._torch.pyexecutor import model_loader

import trtllm_b12x
from tests import layers
from tests.checkpoints import random_experts
from tests.hosts.scenarios import model_config
from trtllm_b12x.tools.verify.reference import Arithmetic


def _equal(module: Any, tensors: dict[str, Any]) -> bool:
    """Compare with a layer that loaded all at once, to the bit, and decode with the checkpoint's own numbers."""
    kernel = getattr(module, "backend", module).kernel
    built = {"gated": module.is_gated_activation, "quant_config": module.quant_config}
    reference = layers.load(layers.create(4, 128, 192, **built), tensors)
    if kernel is None:
        return False
    points = Arithmetic[kernel.features.arithmetic]
    for tokens in (5, 100):
        x, logits = layers.inputs(reference, tokens, tensors)
        result = module(x, logits)
        if not torch.equal(reference(x, logits), result):
            return False
        if tokens == 5 and layers.errors(module, x, logits, result, tensors, points)[1] > 0.005:
            return False
    return True


def _model(algo: str = "NVFP4") -> Any:
    trtllm_b12x.install()
    return Model(model_config(algo=algo, skip_create_weights_in_init=True), 1)


def from_a_peer(form: str, algo: str = "NVFP4") -> dict[str, Any]:
    """``checkpoint_format: MX``: parameters by name, as loaded or with what the source derived from them; nothing is loaded.

    What arrives is the host's: one scale for gate and up, the larger one.
    """
    equal = {}
    for ratio in (1.0, 0.4, 3.0):
        tensors, peer = random_experts(4, 128, 192, up_to_gate=ratio), model_loader.Peer(transformed=form == "transformed")
        source = model_loader.load(lambda: _model(algo), {"layer0": tensors}, peer)
        target = model_loader.load(lambda: _model(algo), {}, peer)
        assert target.built_once
        shared = dict(tensors)
        for expert in range(4):
            names = [f"{expert}.{half}.weight_scale_2" for half in ("w1", "w3")]
            shared |= dict.fromkeys(names, torch.maximum(*(tensors[name] for name in names)))
        equal[str(ratio)] = [_equal(source.layer0, tensors), _equal(target.layer0, shared)]
    return {"equal": equal}


def in_groups(algo: str = "NVFP4") -> dict[str, Any]:
    """A stream of groups, an expert each, after which the loader processes neither the wrapper nor its backend."""
    tensors = random_experts(4, 128, 192, up_to_gate=1.7)
    groups = [{name: tensor for name, tensor in tensors.items() if name.startswith(f"{expert}.")} for expert in (2, 0, 3, 1)]
    model = model_loader.load(lambda: _model(algo), [{"layer0": group} for group in groups])
    return {"equal": _equal(model.layer0, tensors)}


def in_buckets(promote: str, algo: str = "NVFP4") -> dict[str, Any]:
    """RLHF: updates one after the other, each in buckets of any order, whose memory the trainer then uses again."""
    equal = []
    for gated in (True, False):
        config = model_config(algo=algo).quant_config
        layer = layers.create(4, 128, 192, gated=gated, promote=promote == "yes", quant_config=config)
        model = torch.nn.ModuleDict({"layer": layers.load(layer, random_experts(4, 128, 192, gated))})
        for seed, ratio in ((1, 2.0), (2, 1.0), (3, 0.5)):
            tensors = random_experts(4, 128, 192, gated, seed=seed, up_to_gate=ratio)
            names = random.Random(seed).sample(list(given := layers.mapped(layer, tensors)), len(given))
            for start in range(0, len(names), 7):
                bucket = {name: given[name].clone() for name in names[start : start + 7]}
                try:
                    model_loader.update_weights(model, {"layer": bucket})
                except Exception as error:
                    return {"error": type(error).__name__}
                for tensor in bucket.values():
                    if tensor.dim() == 2:
                        tensor.view(torch.uint8).fill_(0xA5)
            model_loader.update_weights(model, None)
            equal.append(_equal(layer, tensors))
    return {"equal": equal}


def fused_gate_up() -> dict[str, Any]:
    """The same experts, one by one and as models bring them that fuse gate and up of all experts into one tensor."""
    tensors = random_experts(4, 128, 192)
    for name, value in {"weight_scale_2": 0.01, "input_scale": 0.02}.items():  # of all experts
        tensors.update({key: torch.tensor(value) for key in tensors if key.endswith(name)})
    fused: dict[str, torch.Tensor] = {}
    for kind in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        suffix = "" if kind == "weight" else f"_{kind}"
        w1, w3, w2 = (torch.stack([tensors[f"{e}.{half}.{kind}"] for e in range(4)]) for half in ("w1", "w3", "w2"))
        several = w1.dim() == 3
        fused[f"gate_up_proj{suffix}"] = torch.cat([w1, w3], 1).transpose(1, 2).contiguous() if several else w1[0]
        fused[f"down_proj{suffix}"] = w2.transpose(1, 2).contiguous() if several else w2[0]
    mode = layers.host.MoEWeightLoadingMode.FUSED_GATE_UP_PROJ
    return {"equal": _equal(layers.load(layers.create(4, 128, 192, weight_loading_mode=mode), fused), tensors)}
