# SPDX-License-Identifier: Apache-2.0
"""The choice between our kernels and vLLM's Marlin on the CPU, where vLLM packs weights for Marlin and multiplies none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.clock import Clock, standing_in
from tests.integration.vllm import layers
from trtllm_b12x.core import process, settings
from trtllm_b12x.dispatch.policy import HOST, Timings
from trtllm_b12x.engines.vllm import facts, machine, marlin, plugin, problem, weights
from trtllm_b12x.kernels import MoECall

SIZES = 8, 2, 256, 128
FORMATS = "MXFP8", "W4A16_NVFP4", "MXFP4"
MODULE = f"{layers.FUSED_MOE}.experts.marlin_moe"


@pytest.fixture(scope="module", autouse=True)
def pretended() -> Iterator[None]:
    layers.pretend_sm120()
    with layers.vllm_config():
        yield


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for switch in (settings.KERNELS, settings.CROSSOVER):
        monkeypatch.delenv(switch.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    process.forget()
    plugin.install()
    yield
    plugin.uninstall()
    process.forget()


@contextmanager
def operators() -> Iterator[list[Any]]:
    """Stand in for CUDA's operators. vLLM's own code calls them; yields what the products are given."""
    calls: list[Any] = []

    def repack(b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, **rest: Any) -> torch.Tensor:
        return b_q_weight.new_empty(size_k // 16, size_n * num_bits // 2)  # as ``_gptq_marlin_repack_fake`` of vLLM

    def multiply(hidden_states: torch.Tensor, num_topk: int, **rest: Any) -> torch.Tensor:
        calls.append({"hidden_states": hidden_states, **rest})
        return hidden_states.repeat_interleave(num_topk, 0)

    with (
        mock.patch("vllm._custom_ops.gptq_marlin_repack", repack),
        mock.patch("vllm._custom_ops.moe_sum", lambda parts, out, *rest: torch.sum(parts, 1, out=out)),
        mock.patch(f"{MODULE}._fused_marlin_moe", multiply),
        mock.patch(f"{MODULE}.moe_align_block_size", return_value=(None, None, None)),
        mock.patch("vllm.model_executor.layers.quantization.utils.marlin_utils.num_compute_units", return_value=1, create=True),
    ):
        yield calls


@pytest.mark.parametrize(
    ("form", "hidden", "size", "activation"),
    [
        *((form, 256, 128, "silu") for form in FORMATS),
        ("MXFP4", 480, 96, "swigluoai"),
        ("MXFP8", 320, 96, "swigluoai"),
        ("MXFP8", 256, 128, "relu2_no_mul"),
        ("W4A16_NVFP4", 320, 96, "swigluoai"),
        ("W4A16_NVFP4", 256, 96, "relu2_no_mul"),
    ],
)
def test_marlin_reads_memory_of_ours_in_the_shapes_that_vllm_packs(form: str, hidden: int, size: int, activation: str) -> None:
    more: dict[str, Any] = {"activation": activation, "has_bias": (form, activation) == ("MXFP4", "swigluoai")}
    slot = next(slot for slot in facts.SLOTS if slot.format == form)
    unpacked = layers.config_of(8, 2, hidden, size, **more)
    geometry = problem.geometry_of(unpacked, slot)
    drawn = layers.random_experts(form, 8, hidden, size, gated=activation != "relu2_no_mul", bias=more["has_bias"])
    with operators() as calls:
        config = layers.config_of(8, 2, hidden, size, **more, moe_backend="marlin")
        method, layer = layers.loaded(form, config, layers.by_turns(drawn) if more["has_bias"] else drawn)
        theirs = method.moe_kernel.fused_experts
        tensors, _ = weights.draw(geometry, torch.device("cpu"))
        x, router_weights, ids = layers.routes(unpacked, 5)
        run = marlin.runner(type(theirs), tensors, geometry, unpacked, 8)
        result = run(MoECall(x, ids, router_weights))
        packed_x = torch.zeros(5, marlin.packed_sizes(geometry)[0], dtype=x.dtype)
        layers.call(method, layer, packed_x, router_weights, ids)
    ours, packed = calls
    assert result.shape == packed_x.shape == ours["hidden_states"].shape
    assert bool(result.isfinite().all())
    assert set(ours) == set(packed)
    for name, expected in packed.items():
        if isinstance(expected, torch.Tensor) and name not in ("intermediate_cache13", "intermediate_cache2", "workspace"):
            assert (ours[name].shape, ours[name].dtype) == (expected.shape, expected.dtype), name
        elif name in ("quant_type", "activation", "block_size_m", "input_dtype"):
            assert ours[name] == expected, name
    for name, owner in (("w1", tensors.w1), ("w2", tensors.w1), ("w1_scale", tensors.scales[0]), ("w2_scale", tensors.scales[0])):
        assert ours[name].untyped_storage().data_ptr() == owner.untyped_storage().data_ptr(), name
    assert tensors.w2.untyped_storage().data_ptr() == tensors.w1.untyped_storage().data_ptr()


def test_a_rank_has_its_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts

    config = layers.config_of(*SIZES, num_local_experts=4, parallel={"ep_size": 2, "use_ep": True})
    geometry = problem.geometry_of(config, facts.SLOTS[0])
    with operators() as calls:
        run = marlin.runner(MarlinExperts, weights.draw(geometry, torch.device("cpu"))[0], geometry, config, 8)
        x, router_weights, ids = layers.routes(config, 5)
        run(MoECall(x, ids, router_weights))
    assert calls[0]["expert_map"].tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
    assert len(calls[0]["w1"]) == 4


def test_a_layer_too_small_for_padded_views_is_not_timed() -> None:
    config = layers.config_of(2, 2, 32, 32)
    geometry = problem.geometry_of(config, next(slot for slot in facts.SLOTS if slot.format == "MXFP4"))
    with pytest.raises(ValueError, match="Marlin pads a layer of"):
        marlin.view(weights.draw(geometry, torch.device("cpu"))[0], geometry)


@pytest.mark.parametrize(("ratio", "keeps"), [(0.5, False), (1.0, False), (1.03, False), (1.032, True), (2.0, True)])
def test_marlin_keeps_the_layer_if_it_gains_three_percent(ratio: float, keeps: bool) -> None:
    rows = {n: {HOST: 10.0 * n, marlin.OURS: 10.0 * n * ratio} for n in marlin.COUNTS}
    assert bool(marlin.verdict(Timings(rows))) == keeps


def test_equal_weights() -> None:
    """A factor at one count outweighs the same factor at another."""
    rows = {1: {HOST: 20.0, marlin.OURS: 10.0}, 1024: {HOST: 2000.0, marlin.OURS: 4000.0}}
    assert not marlin.verdict(Timings(rows))
    rows[8] = {HOST: 1000.0, marlin.OURS: 2000.0}
    assert marlin.verdict(Timings(rows)) == "measured 342.0 us, ours 430.9 us (geometric mean over 1, 8, 1024 tokens)"


def clock(ratio: float) -> Clock:
    """``grouped``, which is ``HOST`` among ours, and Marlin take 3 us for a token."""
    return Clock(lambda name, tokens: 3.0 * tokens * (ratio if name == marlin.OURS else 1.0))


def backend(form: str) -> tuple[str, str]:
    method = layers.method_of(form, layers.config_of(*SIZES))
    return getattr(method, f"{form[-5:].lower()}_backend").name, method.experts_cls.__name__


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("ratio", [0.9, 1.2])
def test_the_faster_serves_and_its_times_are_stored(
    form: str, ratio: float, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    starts = []
    with operators(), standing_in(clock(ratio)) as measured:
        for version in ("", "", "9.9"):
            if version:
                monkeypatch.setattr(facts, "version", mock.Mock(return_value=version))
            process.forget()
            caplog.clear()
            name, kind = backend(form)
            ours = "experts run on trtllm-b12x" in caplog.text
            assert (name == "MARLIN") == ("Marlin" in kind) == (ratio > 1) == (not ours)
            starts.append(len(measured.asked))
            if ratio > 1:
                (line,) = (line for line in caplog.messages if "keeps the" in line)
                mean = 3 * 2 ** ((0 + 3 + 6 + 8 + 10) / 5)
                assert line == (
                    f"vLLM's MARLIN keeps the {form} experts (8 of 256 x 128): measured {mean:,.1f} us, "
                    f"ours {1.2 * mean:,.1f} us (geometric mean over 1, 8, 64, 256, 1024 tokens)"
                )
    assert starts == [2, 2, 3]  # crossover and comparison, nothing, the comparison by another vLLM
    assert len(list((tmp_path / "trtllm_b12x").glob("marlin-*.json"))) == 2


def test_counts_end_with_the_engines(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.config import get_current_vllm_config

    caplog.set_level(logging.INFO)
    scheduler = get_current_vllm_config().scheduler_config
    for limit, counts in ((100, "1, 8, 64"), (2048, "1, 8, 64, 256, 1024"), (100, "1, 8, 64")):
        process.forget()
        caplog.clear()
        with operators(), standing_in(clock(1.2)), mock.patch.object(scheduler, "max_num_batched_tokens", limit):
            assert backend("MXFP8")[0] == "MARLIN"
        assert f"(geometric mean over {counts} tokens)" in caplog.text


def test_a_measurement_that_fails_leaves_ours(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Here Marlin's operators are missing."""
    caplog.set_level(logging.INFO)
    with standing_in(clock(1.2)):
        assert backend("MXFP8") == ("TRITON_MXFP8", "MXFP8Sm12xExperts")
    assert "keeps" not in caplog.text
    assert "Marlin is not timed beside 8 experts, top 2, 256 x 128, Swiglu, MXFP8: " in caplog.text
    assert not list(tmp_path.rglob("marlin-*.json"))


@pytest.mark.parametrize("setting", ["64", "FILE"])
def test_a_setting_that_asks_for_our_kernels_is_obeyed(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "times.json").write_text("{}")
    monkeypatch.setenv(settings.CROSSOVER.name, setting.replace("FILE", str(tmp_path / "times.json")))
    with operators(), standing_in(clock(1.2)) as measured:
        assert backend("MXFP8")[0] == "TRITON_MXFP8"
        assert not measured.asked


@pytest.mark.parametrize("theirs", [None, type("HummingExperts", (), {})])
def test_other_experts_than_marlin_are_not_timed(theirs: Any) -> None:
    from trtllm_b12x.engines.vllm import experts

    slot, config = facts.SLOTS[0], layers.config_of(*SIZES)
    with operators(), standing_in(clock(1.2)) as measured:
        assert not machine.rehearse(experts.experts_class(slot, theirs), config)
        assert not measured.asked


def test_locks_that_marlin_makes_are_not_kept() -> None:
    """Sleep level 2 would discard their memory, and vLLM would not set them to zero again."""
    from vllm.v1.worker import workspace

    before = getattr(workspace, "_manager")  # noqa: B009
    seen = []

    def apply(self: Any, *arguments: Any) -> None:
        seen.append(workspace.current_workspace_manager())

    with operators(), mock.patch(f"{MODULE}.MarlinExperts.apply", apply), standing_in(clock(1.2)):
        assert backend("MXFP8")[0] == "MARLIN"
    assert len(seen) >= len(marlin.COUNTS)
    assert all(manager is not before for manager in seen)
    assert getattr(workspace, "_manager") is before  # noqa: B009


def test_the_first_rank_that_has_measured_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks measure at once. At the next start all read one file, so that the answer stays."""
    load, keep = marlin.store.load, marlin.store.keep
    other: list[Any] = []

    def kept(key: Any, times: Timings) -> None:
        other.append(times)
        keep(key, times)

    def loaded(key: Any) -> Any:
        found = load(key)
        if isinstance(key, marlin.Key) and not other:  # another rank ends before this one's second look
            kept(key, Timings({n: {HOST: 1.0, marlin.OURS: 2.0} for n in marlin.COUNTS}))
        return found

    monkeypatch.setattr(marlin.store, "load", loaded)
    with operators(), standing_in(clock(0.9)):
        assert backend("MXFP8")[0] == "MARLIN"
    assert len(other) == 1
