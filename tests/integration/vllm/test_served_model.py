# SPDX-License-Identifier: Apache-2.0
"""Models of ``benchmarks.served`` in vLLM's own classes on the CPU: random weights, loading, and the float32 computation.

The other side of every comparison is transformers' model in float32, with weights that another function dequantizes.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.served import agreement, child, drawn, models, reference, sides
from tests.integration.vllm import layers, whole
from trtllm_b12x.engines.vllm import facts

pytestmark = pytest.mark.skipif(not facts.version().startswith("0.33"), reason="reads the models of vLLM 0.33")
COMMON = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 500, "hidden_size": 128}
TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": COMMON | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gpt_oss": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2, "intermediate_size": 192},
}
ARCHITECTURES = {"qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM"}
NAMES = ["qwen3-30b-a3b-nvfp4", "qwen3-30b-a3b-w4a16", "qwen3-30b-a3b-mxfp8", "gpt-oss-20b"]
LAYERS = 2


@contextmanager
def card() -> Iterator[None]:
    """Make vLLM see an SM120, also where it asks torch. Its registry inspects classes in this process."""
    from vllm import ModelRegistry

    properties = mock.Mock(multi_processor_count=84, major=12, minor=0, total_memory=80 << 30)
    properties.name = "SM120, pretended"
    loguru = {} if importlib.util.find_spec("loguru") else {"loguru": mock.MagicMock()}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, loguru))
        for name, value in (
            ("is_available", True),
            ("get_device_properties", properties),
            ("get_device_capability", (12, 0)),
            ("device_count", 2),
            ("current_device", "cpu"),
            ("mem_get_info", (60 << 30, 80 << 30)),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=value))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_device_index", return_value="cpu"))
        stack.enter_context(mock.patch.object(torch.cuda, "Stream"))
        for module in ("_custom_ops", "model_executor.layers.quantization.utils.nvfp4_utils"):  # which ask an extension
            path = f"vllm.{module}.cutlass_scaled_mm_supports_fp4"
            stack.enter_context(mock.patch(path, return_value=False))
        for kind, architecture in ARCHITECTURES.items():
            found = getattr(importlib.import_module(f"vllm.model_executor.models.{kind}"), architecture)
            ModelRegistry.register_model(architecture, found)
        yield


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[None]:
    layers.pretend_sm120()
    with card(), whole.one_rank():
        yield


@contextmanager
def built(name: str, folder: Path, **more: Any) -> Iterator[tuple[Any, dict[str, Any], Any]]:
    """Yield the model of vLLM's class without weights, its configuration, and vLLM's."""
    from vllm.config import DeviceConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    models.write(name, folder, LAYERS, **TINY[models.DRAWN[name].base["model_type"]])
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        attention_config={"backend": "TRITON_ATTN"},
        **more,
    )
    config = arguments.create_engine_config()
    config.device_config = DeviceConfig(torch.device("cpu"))
    with set_current_vllm_config(config), layers.model_dtype():
        model = initialize_model(vllm_config=config, model_config=config.model_config)
        torch.set_default_dtype(torch.float32)
        yield model, models.read(str(folder)), config


def dequantized(module: Any, prefix: str = "") -> torch.Tensor:
    """Return a weight in float32: this side of the comparison has its own function."""
    kinds = [kind for kind in ("weight", "weight_scale", "weight_scale_2") if hasattr(module, prefix + kind)]
    tensors = {kind: getattr(module, prefix + kind).data for kind in kinds}
    if "weight_scale" not in tensors:
        return tensors["weight"].float()
    scales = tensors.pop("weight_scale_2", torch.ones(1)).float()
    matrices = tensors["weight"] if prefix else tensors["weight"][None]
    rows = []
    for e in range(len(matrices)):
        part = {kind: tensor[e] if prefix else tensor for kind, tensor in tensors.items()}
        wide = layers.dequantize(part)
        of_expert = scales[e] if prefix and len(scales) > 1 else scales
        assert len(of_expert.unique()) == 1
        rows.append(wide * of_expert.flatten()[0])
    return torch.stack(rows) if prefix else rows[0]


def transformers_logits(model: Any, config: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Return what transformers computes in float32 from the weights in vLLM's parameters."""
    import transformers

    kind = config["model_type"]
    names = {"qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"), "gpt_oss": ("GptOssConfig", "GptOssForCausalLM")}[kind]
    left_out = ("quantization_config", "architectures", "dtype", "experts_per_token")
    theirs = getattr(transformers, names[0])(**{name: value for name, value in config.items() if name not in left_out})
    theirs._attn_implementation = "eager"
    theirs._experts_implementation = "eager"
    other = getattr(transformers, names[1])(theirs).float().eval()
    state = {}
    modules = dict(model.named_modules())
    embedding = modules["model.embed_tokens"] if kind == "qwen3_moe" else modules["model.embedding"]
    state["model.embed_tokens.weight"] = embedding.weight.data[: config["vocab_size"]].float()
    state["lm_head.weight"] = modules["lm_head"].weight.data[: config["vocab_size"]].float()
    state["model.norm.weight"] = modules["model.norm"].weight.data.float()
    sizes = [config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads", "num_key_value_heads")]
    for number in range(LAYERS):
        mine, at = f"model.layers.{number}.", f"model.layers.{number}."
        attention = modules[f"{mine}{'self_attn' if kind == 'qwen3_moe' else 'attn'}"]
        for letter, part in zip("qkv", dequantized(attention.qkv_proj).split(sizes), strict=True):
            state[f"{at}self_attn.{letter}_proj.weight"] = part
        state[f"{at}self_attn.o_proj.weight"] = dequantized(attention.o_proj)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{at}{norm}.weight"] = modules[f"{mine}{norm}"].weight.data.float()
        layer = next(module for path, module in modules.items() if path.startswith(mine) and hasattr(module, "w13_weight"))
        hidden, size = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
        w13, w2 = dequantized(layer, "w13_")[:, : 2 * size, :hidden], dequantized(layer, "w2_")[:, :hidden, :size]
        if kind == "qwen3_moe":
            for norm in ("q_norm", "k_norm"):
                state[f"{at}self_attn.{norm}.weight"] = getattr(attention, norm).weight.data.float()
            state[f"{at}mlp.gate.weight"] = modules[f"{mine}mlp.gate"].weight.data.float()
            state |= {f"{at}mlp.experts.gate_up_proj": w13, f"{at}mlp.experts.down_proj": w2}
            continue
        for letter, part in zip("qkv", attention.qkv_proj.bias.data.float().split(sizes), strict=True):
            state[f"{at}self_attn.{letter}_proj.bias"] = part
        state[f"{at}self_attn.o_proj.bias"] = attention.o_proj.bias.data.float()
        state[f"{at}self_attn.sinks"] = attention.sinks.data.float()
        router = modules[f"{mine}mlp.router"]
        state |= {f"{at}mlp.router.weight": router.weight.data.float(), f"{at}mlp.router.bias": router.bias.data.float()}
        state |= {f"{at}mlp.experts.gate_up_proj": w13.mT, f"{at}mlp.experts.down_proj": w2.mT}
        state[f"{at}mlp.experts.gate_up_proj_bias"] = layer.w13_bias.data[:, : 2 * size].float()
        state[f"{at}mlp.experts.down_proj_bias"] = layer.w2_bias.data[:, :hidden].float()
    other.load_state_dict(state)
    with torch.no_grad():
        result: torch.Tensor = other(tokens).logits
    return result


@pytest.mark.parametrize("name", NAMES)
def test_float32_logits_are_transformers(name: str, tmp_path: Path) -> None:
    """Sequences are longer than gpt-oss's sliding window."""
    with built(name, tmp_path) as (model, config, _):
        assert drawn.fill(model) > 20
        tokens = torch.randint(0, config["vocab_size"], (2, 160), generator=torch.Generator().manual_seed(0))
        first = 130
        with torch.no_grad():
            found, _ = reference.logits(model, config, tokens, first)
        expected = transformers_logits(model, config, tokens)[:, first:]
        assert found.shape == expected.shape
        assert 0.5 < float(expected.std()) < 2
        assert layers.distance(found, expected) < 1e-4


def test_padded_parameters_hold_the_same_weights(tmp_path: Path) -> None:
    """Marlin pads gpt-oss (here 128 x 192 to 256 x 256), and what is added is zero."""
    with built("gpt-oss-20b", tmp_path) as (model, _, _):
        drawn.fill(model)
        layer = agreement.layers(model)[0][1]
        assert layer.w13_weight.shape[1] > 2 * 192
        assert layer.w13_weight.shape[2] > 128 // 2
        for parameter in drawn.parameters(model):
            values = drawn.draw(parameter, "cpu")
            stored = parameter.target[tuple(slice(n) for n in values.shape)] if values.dim() == parameter.target.dim() else None
            if stored is not None:
                assert torch.equal(stored.view(torch.uint8), values.view(torch.uint8)), parameter.name
        assert not layer.w13_weight[:, 2 * 192 :].any()
        assert not layer.w13_weight[:, :, 128 // 2 :].any()


@pytest.mark.parametrize("name", NAMES[:1] + NAMES[3:])
def test_one_layer_and_logits_are_judged(name: str, tmp_path: Path) -> None:
    """What the sides save goes through the judge: an exact side, one with noise, and one that saved nothing."""
    with built(name, tmp_path) as (model, config, _):
        drawn.fill(model)
        tokens = torch.tensor(agreement.sequences(config["vocab_size"]))[:, :-1]
        with torch.no_grad():
            exact, _ = reference.logits(model, config, tokens, agreement.PROMPT - 1)
            layer_outputs = {
                path: {n: reference.experts(layer, *_floats(agreement.inputs(layer, n))) for n in (1, 8)}
                for path, layer in agreement.layers(model)
            }
        noisy = exact * (1 + 0.1 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(0)))
        sides = {
            side: {kind: str(tmp_path / f"{side}.{kind}.pt") for kind in ("logits", "layer")}
            for side in ("with", "without", "marlin")
        }
        torch.save(exact, sides["with"]["logits"])
        torch.save(noisy, sides["without"]["logits"])
        torch.save(layer_outputs, sides["with"]["layer"])
        record = tmp_path / "record.json"
        agreement.judge(model, {"sides": sides, "config": config, "vocabulary": config["vocab_size"], "record": str(record)})
        found = json.loads(record.read_text())["judge"]
        assert found["not_measured"] == {}
        assert found["logits"]["float32"]["with"]["error"] < 1e-6
        assert found["logits"]["float32"]["with"]["same_argmax"] == 1
        assert 0.08 < found["logits"]["float32"]["without"]["error"] < 0.12
        assert found["logits"]["verdict"].endswith("with is nearer")
        own, given = (found["logits"]["bfloat16"][name] for name in ("own routes", "routes of float32"))
        assert 1e-3 < given["error"] < 0.03
        assert given["same_routes"] == 1 > own["same_routes"] > 0.5
        assert {row["tokens"]: list(row["float32"]) for row in found["layer"]["rows"]} == {1: ["with"], 8: ["with"]}
        assert max(row["float32"]["with"] for row in found["layer"]["rows"]) < 1e-6


def test_what_is_drawn_does_not_depend_on_the_default_dtype() -> None:
    """vLLM loads while the default dtype is the model's, and serves while it is float32."""
    layer = mock.Mock(layer_name="model.layers.1.mlp.experts")
    layer.moe_config = mock.Mock(hidden_dim_unpadded=64, num_experts=128, experts_per_token=8, in_dtype=torch.bfloat16)
    parameter = drawn.Parameter("model.norm.weight", torch.empty(64, dtype=torch.float32), "near 1", (64,))
    plain = *agreement.inputs(layer, 64), drawn.draw(parameter, "cpu")
    with layers.model_dtype():
        assert all(map(torch.equal, plain, (*agreement.inputs(layer, 64), drawn.draw(parameter, "cpu"))))


def test_ranks_draw_their_parts_of_one_model(tmp_path: Path) -> None:
    """Each of two ranks has the rows, columns, heads or experts that vLLM gives it, of what one GPU draws."""
    from tests.integration.vllm import served_ranks

    command = [sys.executable, "-m", "tests.integration.vllm.served_ranks", str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in (0, 1)]
    assert [process.wait(300) for process in ranks] == [0, 0]
    for i, (name, expert_parallel) in enumerate(served_ranks.CASES):
        parts = [torch.load(tmp_path / f"{i}-{rank}.pt") for rank in (0, 1)]
        with built(name, tmp_path / name) as (model, _, _):
            drawn.fill(model)
            for key, tensor in served_ranks.values(model).items():
                joined = _joined(key, [part[key] for part in parts], name == "gpt-oss-20b", expert_parallel)
                assert torch.equal(joined, tensor), key


def _joined(key: str, parts: list[torch.Tensor], interleaved: bool, expert_parallel: bool) -> torch.Tensor:
    """Join what two ranks have of a parameter."""
    name = key.rpartition(".")[2]
    if "qkv_proj" in key and name != "weight_scale_2":
        return _joined_heads(parts)
    if "routed_experts" in key and expert_parallel:
        return torch.cat(parts)
    if name.startswith("w13_"):
        halves = [(part,) if interleaved else part.chunk(2, 1) for part in parts]
        return torch.cat([torch.cat(pair, 1) for pair in zip(*halves, strict=True)], 1)
    if name == "w2_bias":
        assert not parts[1].any(), "one rank adds it"
        return parts[0]
    if name.startswith("w2_") or ("o_proj" in key and name.startswith("weight")):
        return torch.cat(parts, -1)
    if name == "sinks" or any(word in key for word in ("embed", "lm_head")):
        return torch.cat(parts)
    assert torch.equal(*parts), key
    return parts[0]


def _joined_heads(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join q, k and v of two ranks, with two and one heads each of 64."""
    split = [part.split([2 * 64, 64, 64]) for part in parts]
    return torch.cat([torch.cat(pair) for pair in zip(*split, strict=True)])


def _floats(inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weights, ids = inputs
    return x.float(), weights, ids


def test_an_engine_is_measured_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engine, scheduler and loader around a worker that computes in float32: the child's whole way through a job.

    The experts are ours. What they cannot do without a GPU is in the record with its reason.
    """
    from trtllm_b12x.core import settings
    from trtllm_b12x.engines.vllm import plugin

    for switch in (settings.KERNELS, settings.CROSSOVER):
        monkeypatch.delenv(switch.name)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("SERVED_JOB", "")
    monkeypatch.setattr(child, "ANSWERS", 2)
    monkeypatch.setattr(child, "ANSWER", 4)
    monkeypatch.setattr(agreement, "REQUESTS", 2)
    monkeypatch.setattr(agreement, "STEPS", 6)
    monkeypatch.setattr(agreement, "TOKENS", (1, 8))
    name = "qwen3-30b-a3b-w4a16"
    folder = models.write(name, tmp_path / "models" / name, LAYERS, **TINY["qwen3_moe"])
    config = models.read(str(folder))
    config["quantization_config"]["ignore"].append("*self_attn*")  # whose kernels are a GPU's
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(models, "write", lambda *a, **k: folder)
    plan = sides.Plan((name,), requests=(1, 3), prompts=(32,), tokens=8, layers=LAYERS)
    runner = sides.Runner(plan, tmp_path, {})
    (tmp_path / "records").mkdir()
    steps = {step.turn: step for step in sides.steps(plan) if step.side in ("with", "float32")}
    plugin.install()
    try:
        for turn in ("first", "judge"):
            job = runner.job(steps[turn])
            worker = {"worker_cls": "tests.integration.vllm.served_worker.CpuWorker", "enforce_eager": True}
            job["engine"] |= {**worker, "attention_config": {"backend": "TRITON_ATTN"}, "max_num_batched_tokens": 512}
            path = tmp_path / f"{turn}.job.json"
            path.write_text(json.dumps(job))
            assert child.main(str(path)) == 0
            gc.collect()  # the engine, while the card is pretended
    finally:
        plugin.uninstall()
    record, judged = (json.loads(runner.path(steps[turn]).read_text()) for turn in ("first", "judge"))
    assert record["finished"]
    assert sorted(record["decode"]) == ["1", "3"]
    assert record["decode"]["3"]["steps"] >= 4
    assert record["ttft"]["32"]["ms"] > 0
    assert [len(row["tokens"]) for row in record["answers"]["greedy"]] == [4, 4]
    assert all(len(row["logprobs"]) == 4 for row in record["answers"]["greedy"])
    assert record["forced"]["logits"] == {"shape": [2, 6, 500], "finite": True}
    assert record["facts"]["experts"] == {"W4A16_NVFP4Sm12xExperts": LAYERS}
    assert record["facts"]["backends"] == {"EMULATION": LAYERS}
    assert {"construct", "weights", "load", "ready"} <= record["start"].keys()
    assert list(record["failed"]) == ["kernels 1"]

    assert record["forced"]["layer"] == {}
    found = judged["judge"]
    assert found["not_measured"] == {}
    assert found["logits"]["float32"]["with"]["error"] < 1e-5
    assert found["logits"]["float32"]["with"]["same_argmax"] == 1
    assert {row["tokens"] for row in found["layer"]["rows"]} == {1, 8}
    assert max(row["float32"]["with"] for row in found["layer"]["rows"]) < 0.01
