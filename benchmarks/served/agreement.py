# SPDX-License-Identifier: Apache-2.0
"""Compare each side's outputs with float32: logits under forced tokens, and single layers of experts on equal inputs."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.served import compare, reference

REQUESTS, PROMPT, STEPS = 8, 200, 32
"""Forced requests, tokens per prompt, and tokens that each request is forced to take."""
TOKENS = (1, 8, 64, 512)
"""Token counts of calls of a single layer."""


def sequences(vocabulary: int) -> list[list[int]]:
    """Return the token sequences of the forced requests, without the ends of the vocabulary, where special tokens are."""
    generator = torch.Generator().manual_seed(64)
    return torch.randint(vocabulary // 8, 7 * vocabulary // 8, (REQUESTS, PROMPT + STEPS), generator=generator).tolist()


def layers(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return the first and the last layer of experts, with their names."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "w13_weight") and hasattr(module, "moe_config")
    ]
    return found[:1] + found[1:][-1:]


def inputs(layer: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x ``(T, hidden)``, router weights and ids ``(T, k)`` of a call, the same for every side.

    Weights are float32, even while vLLM loads and the model's dtype is the default.
    """
    config = layer.moe_config
    generator = torch.Generator().manual_seed(zlib.crc32(f"{layer.layer_name} {tokens}".encode()))
    x = torch.randn(tokens, config.hidden_dim_unpadded, generator=generator, dtype=torch.float32).to(config.in_dtype)
    scores = torch.rand(tokens, config.num_experts, generator=generator, dtype=torch.float32)
    ids = scores.topk(config.experts_per_token, -1).indices.int()
    return x, torch.rand(ids.shape, generator=generator, dtype=torch.float32).softmax(-1), ids


def call(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Call a loaded layer of experts as vLLM's runner does, which pads x. If the backend routes, make it choose these routes."""
    hidden, method = x.shape[1], layer.quant_method
    if padding := layer.hidden_size - hidden:
        x = torch.nn.functional.pad(x, (0, padding))
    if method.is_monolithic:
        scores = torch.full((len(x), layer.moe_config.num_experts), -math.inf, device=x.device, dtype=torch.float32)
        scores.scatter_(1, ids.long(), weights.log())
        takes = method.moe_kernel.fused_experts._supports_router_logits_dtype(torch.float32, layer.moe_config.routing_method)
        logits = scores.clamp(min=-1e4).to(torch.float32 if takes else x.dtype)
        output = method.apply_monolithic(layer=layer, x=x, router_logits=logits, input_ids=None)
    else:
        output = method.apply(layer, x, weights, ids, None, None)
    result: torch.Tensor = output[:, :hidden]
    return result


def judge(model: torch.nn.Module, job: dict[str, Any]) -> None:
    """Write ``job["record"]``: every side's outputs against float32, and our outputs against those of each other side.

    Weights must be loaded and not yet processed. Without a float32 computation, sides are compared and the reason is recorded.
    """
    record: dict[str, Any] = {"judge": {"sides": sorted(job["sides"]), "not_measured": {}}}
    found = record["judge"]
    for name, part in (("layer", _layers), ("logits", _logits)):
        try:
            with torch.no_grad():
                found[name] = part(model, job, found["not_measured"])
        except Exception as error:
            found["not_measured"][name] = f"{type(error).__name__}: {error}"[:300]
    Path(job["record"]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _saved(job: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the tensors that each side has saved."""
    paths = {side: Path(files[kind]) for side, files in job["sides"].items() if kind in files}
    return {side: torch.load(path) for side, path in paths.items() if path.exists()}


def _layers(model: torch.nn.Module, job: dict[str, Any], lacking: dict[str, str]) -> dict[str, Any]:
    rows = []
    for name, layer, tokens, outputs in _calls(model, _saved(job, "layer")):
        row: dict[str, Any] = {"layer": name, "tokens": tokens}
        try:
            x, weights, ids = (t.to(layer.w13_weight.device) for t in inputs(layer, tokens))
            expected = reference.experts(layer, x.float(), weights, ids).cpu()
            row["float32"] = {side: compare.distance(output, expected) for side, output in outputs.items()}
        except reference.UnknownModelError as error:
            lacking["layer against float32"] = str(error)
        row["with"] = {
            side: compare.distance(outputs["with"], outputs[side]) for side in outputs if side != "with" and "with" in outputs
        }
        rows.append(row)
    verdicts = _verdicts([row["float32"] for row in rows if "float32" in row])
    return {"rows": rows, "verdict": verdicts}


def _calls(model: torch.nn.Module, saved: dict[str, Any]) -> Iterator[tuple[str, Any, int, dict[str, torch.Tensor]]]:
    """Yield each layer and token count with the outputs of the sides that have them."""
    for name, layer in layers(model):
        for tokens in TOKENS:
            outputs = {side: calls[name][tokens] for side, calls in saved.items() if tokens in calls.get(name, {})}
            if outputs:
                yield name, layer, tokens, outputs


def _logits(model: torch.nn.Module, job: dict[str, Any], lacking: dict[str, str]) -> dict[str, Any]:
    """Compare logits. ``bfloat16`` is the yardstick: the same exact experts, with activations between modules in bfloat16.

    With its own routes, its error against float32 comes only from rounding. With the routes of float32, it is the error of a
    model whose tokens keep their experts.
    """
    saved = _saved(job, "logits")
    found: dict[str, Any] = {}
    ours = saved.get("with")
    if ours is not None:
        found["with"] = {side: compare.logits(ours, other) for side, other in saved.items() if side != "with"}
    device = next(model.parameters()).device
    tokens = torch.tensor(sequences(job["vocabulary"]), device=device)
    try:
        expected, routes = reference.logits(model, job["config"], tokens[:, :-1], PROMPT - 1)
    except reference.UnknownModelError as error:
        lacking["logits against float32"] = str(error)
        return found
    found["float32"] = {side: compare.logits(logits.to(device), expected) for side, logits in saved.items()}
    found["verdict"] = _verdicts([{side: row["error"] for side, row in found["float32"].items()}])
    found["bfloat16"] = {}
    for name, given in (("own routes", None), ("routes of float32", routes)):
        rounded, taken = reference.logits(model, job["config"], tokens[:, :-1], PROMPT - 1, torch.bfloat16, given)
        found["bfloat16"][name] = compare.logits(rounded, expected) | {"same_routes": compare.routes(taken, routes)}
    return found


def _verdicts(rows: list[dict[str, float]]) -> str:
    """Return the verdict on the worst rows with and without the package, or an empty string."""
    both = [row for row in rows if {"with", "without"} <= row.keys()]
    if not both:
        return ""
    return compare.verdict(max(row["with"] for row in both), max(row["without"] for row in both))
