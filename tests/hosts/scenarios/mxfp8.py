# SPDX-License-Identifier: Apache-2.0
"""MXFP8, which no host has a path for on these cards: from refusal to load, measurement, calls and reload."""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest import mock

import torch

import trtllm_b12x
from tests import layers
from tests import mxfp8 as experts
from tests.clock import Clock, capturing, standing_in
from trtllm_b12x.dispatch.policy import HOST
from trtllm_b12x.engines.trtllm import build_layer, describe
from trtllm_b12x.formats.geometry import LayerShape
from trtllm_b12x.kernels.reference import ReferenceKernel
from trtllm_b12x.tools.verify.reference import Arithmetic, MoECall, outputs


def without_a_host_path(backend: str) -> dict[str, Any]:
    """A layer that the host has no implementation for on this card: with ours off, then loaded, measured at its first call, and
    called and captured at counts on both sides of decode; loaded again in parts, and with gate and up of all experts fused."""
    os.environ.update({"TRTLLM_B12X_CROSSOVER": "auto", "XDG_CACHE_HOME": tempfile.mkdtemp()})
    host, tensors = layers.host, experts.random_experts(4, 256, 128)
    config = host.QuantConfig(quant_algo=host.QuantAlgo.MXFP8, group_size=32)

    def create(**arguments: Any) -> Any:
        return layers.build(4, 256, 128, quant_config=config, moe_backend=backend, **arguments)

    found: dict[str, Any] = {}
    trtllm_b12x.uninstall()
    try:
        create()
    except ValueError as refused:
        found["host"] = str(refused)
    trtllm_b12x.install()
    module = layers.load(create(), tensors)
    found["class"], found["families"] = type(module.backend).__name__, list(module.backend.schedule.families)

    def error(tokens: int, module: Any = module, swiglu: tuple[float, float, float] | None = None) -> float:
        x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)
        logits = torch.randn(tokens, 4, generator=torch.Generator().manual_seed(1 + tokens)).to(torch.bfloat16)
        result = module(x, logits)
        call = MoECall(x, *module.routing_method.apply(logits))
        arithmetic = Arithmetic[module.backend.schedule.at(tokens).features.arithmetic]
        [[expected]] = outputs(tensors, 4, True, [call], [arithmetic], quant_algo="MXFP8", swiglu=swiglu)
        return float((result.float() - expected).norm() / expected.norm())

    with standing_in(Clock(lambda name, tokens: 40.0 if name == HOST else tokens)) as clock:
        with capturing():
            error(1)
        asked = [len(clock.asked)]
        found["errors"] = [error(tokens) for tokens in (1, 30, 63, 4096)]
        with capturing():
            found["captured"] = [error(tokens) for tokens in (4096, 63, 30, 1)]
        found["measured"] = [*asked, len(clock.asked)]
        found["crossover"] = module.backend.schedule.summary
    # As MiniMax-M3's model file builds its layers, but for the limit, which such weights meet.
    swiglu = (1.702, 1.0, 0.15)
    constants = {name: torch.full((4,), value) for name, value in zip(("alpha", "beta", "limit"), swiglu, strict=True)}
    given = layers.swiglu_constants(**constants)
    if "activation" not in given:
        given["activation_type"] = host.ActivationType.SwigluBias
    minimax = layers.load(create(**given), tensors)
    found["constants"] = [error(tokens, minimax, swiglu) for tokens in (1, 30, 100)]
    if backend == "CUTLASS":  # what trtllm-b12x tune builds
        made = build_layer.create(LayerShape(4, 2, 256, 128, "Swiglu", "MXFP8", activation_constants=True))
        found["built"] = [type(made.backend).__name__, sorted(describe.activation_tensors(made.backend))]
    with mock.patch.object(ReferenceKernel, "bind", side_effect=ValueError("taken away")):
        try:
            layers.load(create(), tensors)
        except RuntimeError as refused:
            found["nobody"] = str(refused)
    names = ("w3_w1_weight", "w2_weight", "w3_w1_weight_scale", "w2_weight_scale")

    def bits(one: Any) -> list[torch.Tensor]:
        return [getattr(one.backend, name).data.view(torch.uint8).clone() for name in names]

    before = bits(module)
    stacked = {
        f"{name}{suffix}": torch.stack([torch.cat([tensors[f"{e}.{half}.{kind}"] for half in halves]).T for e in range(4)])
        for name, halves in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",)))
        for suffix, kind in (("", "weight"), ("_weight_scale", "weight_scale"))
    }
    other = layers.load(create(weight_loading_mode=host.MoEWeightLoadingMode.FUSED_GATE_UP_PROJ), stacked)
    found["stacked"] = all(map(torch.equal, before, bits(other)))
    along_rows = {name: tensor.mT if name.endswith("scale") else tensor for name, tensor in stacked.items()}
    try:
        layers.load(create(weight_loading_mode=host.MoEWeightLoadingMode.FUSED_GATE_UP_PROJ), along_rows)
    except ValueError as refused:
        found["along rows"] = str(refused)
    module.load_weights([experts.random_experts(4, 256, 128, seed=7)])
    changed = bits(module)
    for half in ("w2", "w3", "w1"):
        part = {name: tensor for name, tensor in tensors.items() if f".{half}." in name}
        module.load_weights([part], allow_partial_loading=True)
    module.post_load_weights()
    again = bits(module)
    found["parts"] = [any(map(torch.equal, before, changed)), all(map(torch.equal, before, again))]
    return found
