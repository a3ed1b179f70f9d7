"""When layers are measured, and whose word counts; a stand-in clock has the times, on machines without a GPU."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trtllm_b12x.crossover import deciding, store

import trtllm_b12x
from tests import layers
from tests.checkpoints import random_experts
from tests.clock import Clock, capturing, standing_in
from trtllm_b12x import fused_moe, process, settings, votes
from trtllm_b12x.dispatch.policy import HOST, Fixed, Measured, Times
from trtllm_b12x.dispatch.schedule import Schedule
from trtllm_b12x.environment import answers
from trtllm_b12x.kernels.reference import QuantizedReferenceKernel, ReferenceKernel, UnquantizedReferenceKernel

TENSORS = random_experts(4, 128, 192)


def even(name: str, tokens: int) -> float:
    """Kernels win below 32 tokens, Triton's below 4, grouped ones from 512 to 2047."""
    if name == "grouped":
        return 11.0 if 512 <= tokens < 2048 else 20.0
    return {"b12x": 9.0, "triton": 4.0 * tokens**0.5, HOST: 12.0}[name] if tokens < 32 or name == HOST else 20.0


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setenv(settings.CROSSOVER.name, "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO, logger="trtllm_b12x")
    process.forget()
    yield
    process.forget()


@pytest.fixture
def clock() -> Iterator[Clock]:
    with standing_in(Clock(even)) as found:
        yield found


def built(**arguments: Any) -> Any:
    return layers.load(layers.create(4, 128, 192, **arguments), TENSORS)


def called(module: Any, tokens: int = 3) -> torch.Tensor:
    result: torch.Tensor = module(*layers.inputs(module, tokens, TENSORS))
    return result


def served(module: Any, *counts: int) -> list[Any]:
    return [type(module.backend.schedule.at(tokens)) for tokens in counts]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """That say which split applies."""
    return [r.getMessage() for r in caplog.records if "CUTLASS" in r.getMessage() and "4 experts, top 2" in r.getMessage()]


def test_without_anything_to_measure_on_the_fixed_split_holds(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    module = built()
    called(module)
    called(module, 70)
    assert served(module, 1, 63, 64) == [ReferenceKernel, ReferenceKernel, type(None)]
    assert module.backend.schedule.kernels[0].capacity == 63
    (line,) = lines(caplog)
    assert line.endswith("default, fixed: CUTLASS from 64 tokens")
    assert not list(tmp_path.rglob("crossover*"))


def test_the_first_call_measures_every_layer_of_the_geometry_and_all_follow(
    clock: Clock, every_family: None, caplog: pytest.LogCaptureFixture
) -> None:
    modules = [built(), built(), layers.load(layers.create(8, 128, 192), random_experts(8, 128, 192))]
    assert list(modules[0].backend.schedule.families) == ["b12x", "triton", "grouped"]  # each eligible kernel, spare or not
    assert modules[0].backend.schedule.kernels[0].capacity == 64  # 32 rows for each of the experts
    assert modules[2].backend.schedule.kernels[0].capacity == 128
    assert served(modules[0], 1, 63, 64) == [ReferenceKernel, ReferenceKernel, type(None)]  # until then
    for _ in range(2):
        for module in modules[:2]:
            called(module, 100)
    assert len(clock.asked) == 1
    assert clock.layers == 2
    assert 0 < clock.largest_gap < 0.2  # each path computes the layer: they differ by what quantization costs
    for module in modules[:2]:
        kinds = [UnquantizedReferenceKernel, UnquantizedReferenceKernel, ReferenceKernel, ReferenceKernel, type(None), type(None)]
        assert served(module, 1, 4, 6, 16, 40, 64) == kinds
        assert 1900 < module.backend.schedule.below < 2200
    called(modules[2])
    assert len(clock.asked) == 2
    assert [line.partition("measured")[0] for line in lines(caplog)] == ["rank 0: 4 experts, top 2, 128 x 256, Swiglu: "]
    numbers = layers.errors(modules[0], *layers.inputs(modules[0], 9, TENSORS), called(modules[0], 9), TENSORS)
    assert numbers[1] < 0.005


def test_beyond_decode_kernels_serve_what_they_were_measured_to_be_the_quickest_at(
    clock: Clock, every_family: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="trtllm_b12x")
    module = built()
    assert module.backend.schedule.families["grouped"].capacity == 8192
    on = [line.partition(" layers on ")[2].split(",")[0] for line in caplog.messages if " layers on " in line]
    assert on == ["+".join(name for name in module.backend.schedule.families if name != "grouped")]  # what may serve
    assert served(module, 64, 600, 8192) == [type(None)] * 3  # until then
    called(module)
    assert served(module, 40, 64, 450, 600, 1024, 1990, 2200, 8192, 9000) == [
        *[type(None)] * 3,
        *[QuantizedReferenceKernel] * 3,
        *[type(None)] * 3,
    ]
    assert {1024, 4096} <= set(module.backend.schedule.split.times.counts)
    kernels = module.backend.schedule.families
    splits = [Fixed(300), Fixed(300, measured=True)]  # as another rank's setting has it, and as verify wants it
    assert [Schedule(kernels, split).at(200) for split in splits] == [None, kernels["grouped"]]
    for kind in (UnquantizedReferenceKernel, QuantizedReferenceKernel):
        monkeypatch.setattr(kind, "features", dataclasses.replace(kind.features, graph_safe=True))
    captured = {name: path.captured for name, path in deciding.paths(module.backend, None).items()}
    assert captured == {"b12x": False, "triton": True, "grouped": False, HOST: False}  # prefill is launched
    assert layers.errors(module, *layers.inputs(module, 600, TENSORS), called(module, 600), TENSORS)[1] < 0.005
    assert [*built(max_num_tokens=2048).backend.schedule.families.values()][-1].capacity == 2048  # more never come at once
    small = built(max_num_tokens=32).backend
    assert (list(small.schedule.families), "grouped" in small.verdict.families) == (["b12x", "triton"], True)
    monkeypatch.setenv(settings.CROSSOVER.name, "300")
    fixed = built()
    assert list(fixed.backend.schedule.families) == ["b12x"]  # which serves every one of them
    called(fixed)
    assert served(fixed, 299, 300, 600) == [ReferenceKernel, *[type(None)] * 2]


def test_a_family_that_is_alone_has_no_count_of_its_own(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_B12X_KERNELS", "grouped")
    module = built()
    called(module, 600)
    assert served(module, 63, 600, 4096) == [type(None), QuantizedReferenceKernel, type(None)]
    monkeypatch.setenv(settings.CROSSOVER.name, "64")
    module = built()
    assert module.backend.verdict.families == ("grouped",)
    assert (module.backend.schedule.kernels, module.backend.schedule.below) == ((), 1)
    called(module)


def test_a_host_that_always_wins_has_everything(clock: Clock) -> None:
    clock._microseconds = lambda name, tokens: 1.0 if name == HOST else 2.0
    module = built()
    called(module)
    assert served(module, 1, 8, 63) == [type(None)] * 3
    assert module.backend.schedule.below == 1
    assert called(module).isfinite().all()
    clock._microseconds = lambda name, tokens: 1.02 if name == HOST else 1.0  # less than three percent
    process.forget()
    answers.clear()
    module = built()
    called(module)
    assert served(module, 1, 8, 63) == [type(None)] * 3


def test_where_launches_change_the_choice_has_a_step(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceKernel, "launches", lambda self, tokens: tokens >= 40)
    clock._microseconds = lambda name, tokens: 12.0 if name == HOST else 13.0 if tokens >= 40 else 9.0
    clock.time_for = 7
    module = built()
    called(module)
    assert clock.steps["b12x"] == [40]
    assert module.backend.schedule.split.times.counts == [1, 2, 4, 8, 16, 32, 64]
    assert served(module, 39, 40) == [ReferenceKernel, type(None)]


def test_never_under_capture_and_a_graph_that_follows_has_what_was_measured(clock: Clock) -> None:
    module = built()
    with capturing():
        called(module)
    assert not clock.asked
    assert isinstance(module.backend.schedule.split, Fixed)
    called(module)
    other = built()
    with capturing():  # another layer of the geometry, whose first call it is
        called(other)
    assert len(clock.asked) == 1
    assert isinstance(other.backend.schedule.split, Measured)


def test_not_while_a_compiler_traces_the_call(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    module = built()
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        called(module)
    assert not clock.asked
    called(module)
    assert len(clock.asked) == 1


@pytest.mark.embedded
def test_once_after_the_hosts_tuning_whatever_came_before(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuning = [False]
    monkeypatch.setattr(fused_moe.layer_class(), "_is_tuning", staticmethod(lambda: tuning[0]))
    module = built()
    called(module)  # as hosts warm attention up
    assert len(clock.asked) == 1
    tuning[0] = True
    called(module, 100)
    assert len(clock.asked) == 1
    tuning[0] = False
    clock._microseconds = lambda name, tokens: 1.0 if name == HOST else 2.0  # tuned, the host is faster
    for tokens in (100, 8, 3):
        called(module, tokens)
    assert len(clock.asked) == 2
    assert served(module, 3) == [type(None)]
    tuning[0] = True
    called(module, 100)
    tuning[0] = False
    called(module)
    assert len(clock.asked) == 2
    assert len(list(tmp_path.rglob("crossover-*.json"))) == 2
    process.forget()
    again = built()
    called(again)  # the tuned host's table holds before it has tuned, too
    assert served(again, 3) == [type(None)]
    assert len(clock.asked) == 2


def test_a_layer_whose_kernels_are_not_tested_yet_waits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    module = built()
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceKernel, "settled", False)
        called(module)
        assert not clock.asked
    called(module)
    assert len(clock.asked) == 1


def test_a_load_and_a_move_keep_what_was_measured(clock: Clock) -> None:
    module = built()
    called(module)
    layers.load(module, random_experts(4, 128, 192, seed=3))
    module.to("cpu")
    called(module)
    assert len(clock.asked) == 1
    assert isinstance(module.backend.schedule.split, Measured)


# ---- whose word counts ---------------------------------------------------------------------------------------------------


def stored(times: Times) -> None:
    """What another process of this machine would have measured."""
    found = built().backend.schedule
    store.keep(deciding.key(found.kernels[0].geometry, torch.device("cpu"), found, False), times)
    process.forget()


def test_a_number_before_all_else(clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    stored(Times({1: {"b12x": 1.0, HOST: 2.0}}))
    monkeypatch.setenv(settings.CROSSOVER.name, "8")
    module = built()
    assert module.backend.schedule.kernels[0].capacity == 7
    called(module)
    assert served(module, 7, 8) == [ReferenceKernel, type(None)]
    assert not clock.asked
    assert lines(caplog)[-1].endswith("TRTLLM_B12X_CROSSOVER=8, fixed: CUTLASS from 8 tokens")
    monkeypatch.setenv(settings.CROSSOVER.name, "100")
    assert served(built(), 99, 100) == [ReferenceKernel, type(None)]


def test_a_file_then_what_is_stored_then_a_measurement(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(Times({1: {"b12x": 1.0, HOST: 2.0}, 2: {"b12x": 3.0, HOST: 2.0}, 4: {"b12x": 3.0, HOST: 2.0}}))
    module = built()
    called(module)
    assert served(module, 1, 2, 30) == [ReferenceKernel, type(None), type(None)]
    assert lines(caplog)[-1].endswith("stored: b12x 1-1, then CUTLASS")
    (file,) = tmp_path.rglob("crossover-*.json")
    content = json.loads(file.read_text())
    content["microseconds"] = {"1": {"b12x": 2.0, HOST: 1.0}, "2": {"b12x": 2.0, HOST: 1.0}}
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"tables": [content]}))
    monkeypatch.setenv(settings.CROSSOVER.name, str(given))
    process.forget()
    module = built()
    called(module)
    assert served(module, 1, 2, 30) == [type(None)] * 3
    assert lines(caplog)[-1].endswith(f"TRTLLM_B12X_CROSSOVER={given}: CUTLASS")
    content["card"] = {"name": "another"}
    given.write_text(json.dumps(content))
    process.forget()
    module = built()
    called(module)
    assert served(module, 1, 2) == [ReferenceKernel, type(None)]
    assert "has no table for 4 experts, top 2" in caplog.text
    assert "of another card (name); the card is asked" in caplog.text
    assert not clock.asked
    file.write_text(json.dumps(content))
    process.forget()
    called(built())
    assert len(clock.asked) == 1
    assert json.loads(file.read_text())["card"] == {"name": "cpu"}


def test_what_cannot_be_measured_leaves_the_fixed_split(clock: Clock, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    clock._before = fails
    modules = [built(), built()]
    for _ in range(2):
        for module in modules:
            called(module)
    assert len(clock.asked) == 1
    assert served(modules[0], 1, 63, 64) == [ReferenceKernel, ReferenceKernel, type(None)]
    assert caplog.text.count("cannot be measured: OutOfMemoryError: CUDA out of memory") == 1
    assert lines(caplog)[-1].endswith("default, fixed: CUTLASS from 64 tokens")
    assert not list(tmp_path.rglob("crossover*"))


def test_a_fault_of_ours_costs_the_card_its_say_and_no_kernel(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("nobody expects it")

    monkeypatch.setattr(deciding, "key", fails)
    module = built()
    for _ in range(2):
        called(module)
    assert served(module, 1, 63, 64) == [ReferenceKernel, ReferenceKernel, type(None)]
    assert caplog.text.count("the crossover stays as it is: KeyError: 'nobody expects it'") == 1


def test_a_router_that_needs_more_than_logits_is_done_without(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    module = built()
    draw = deciding.draw_of(module.backend, module.backend.kernel.geometry, torch.device("cpu"))
    with_router = draw(6, 1, False)
    routing = type(module.backend.routing_method)

    def fails(self: Any, *_: Any) -> None:
        raise AttributeError("e_score_correction_bias")

    monkeypatch.setattr(routing, "apply", fails)
    without = draw(6, 1, False)
    for ids, router_weights in (with_router, without):
        assert ids.shape == router_weights.shape == (6, 2)
        assert ids.dtype == torch.int32
        assert router_weights.dtype == torch.float32
        assert all(len(set(row)) == 2 for row in ids.tolist())
    assert torch.equal(with_router[0], without[0])
    busiest = [sum(int(draw(64, seed, skewed)[0].flatten().bincount().max()) for seed in range(9)) for skewed in (False, True)]
    assert busiest[1] > 1.2 * busiest[0]  # experts are preferred, at every seed others


# ---- ranks ---------------------------------------------------------------------------------------------------------------


def test_other_ranks_times_count_and_one_that_has_none_takes_theirs(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this rank's side; with real processes: integration/test_distributed.py."""
    said: dict[str, str] = {}

    def share(mapping: Any, about: str, text: str, wait_s: float) -> list[str] | None:
        said[about] = text
        counts = [1 << power for power in range(2 + len(said))]
        other = Times({n: {"b12x": 30.0 if n < 2 else 1.0, HOST: 1.0 if n < 2 else 30.0} for n in counts})
        return [text, other.text()]

    monkeypatch.setattr(votes, "share", share)
    module = built()
    called(module)
    assert served(module, 1, 2) == [type(None), ReferenceKernel]
    first, *_, last = (Times.of(text) for text in said.values())
    assert first.points == {n: {"b12x": 9.0, HOST: 12.0} for n in (1, 2, 4, 8, 16)}
    assert set(first.counts) < set(last.counts)
    assert len(clock.rounds) > 1
    assert module.backend.schedule.split.times.counts == [1, 2, 4, 8, 16, 32, 64]  # what both have

    def fails() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    clock._before = fails
    process.forget()
    answers.clear()
    said.clear()
    module = built()
    called(module)
    assert set(said.values()) == {""}
    assert len(said) > 1  # it is heard in every round of the others
    assert len(clock.asked) == 2  # and does not try again
    assert served(module, 1, 2) == [type(None), ReferenceKernel]


def test_a_number_that_another_rank_was_given_is_this_ones_too(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: dict[str, str] = {}

    def share(mapping: Any, about: str, text: str, wait_s: float) -> list[str] | None:
        said[about] = text
        return [text, "24"]

    monkeypatch.setattr(votes, "share", share)
    module = built()
    called(module)
    assert served(module, 23, 24) == [ReferenceKernel, type(None)]
    assert lines(caplog)[-1].endswith("another rank's TRTLLM_B12X_CROSSOVER=24, fixed: CUTLASS from 24 tokens")
    monkeypatch.setenv(settings.CROSSOVER.name, "8")
    process.forget()
    called(built())
    assert list(said.values()) == ["8"]  # under the name by which others hear it in their first round


def test_until_all_ranks_have_spoken_the_fixed_split_holds_and_nobody_waits_twice(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    said: dict[str, str] = {}
    there = [0]
    """Rounds that the others have come to."""

    def share(mapping: Any, about: str, text: str, wait_s: float) -> list[str] | None:
        waits.append(wait_s)
        assert said.setdefault(about, text) == text
        return [text] if len(said) <= there[0] else None

    monkeypatch.setattr(votes, "share", share)
    modules = [built(), built()]
    for module in modules:
        called(module)
    assert waits == [deciding.WAIT_S, 0]
    assert clock.rounds == [[1, 2, 4, 8, 16]]
    assert served(modules[0], 1, 63, 64) == [ReferenceKernel, ReferenceKernel, type(None)]
    assert caplog.text.count("other ranks have not measured yet") == 1
    there[0] = 1
    called(modules[0])
    assert waits == [deciding.WAIT_S, 0, 0, 0]
    assert clock.rounds == [[32]]  # of a bench with what is left of the time
    assert clock.budgets == [deciding.UNTUNED_S, pytest.approx(deciding.UNTUNED_S - 0.05)]
    assert clock.named[0]["least"] is clock.named[-1]["least"]
    there[0] = 99
    for module in modules:
        called(module)
    assert served(modules[1], 16, 40) == [ReferenceKernel, type(None)]
    assert max(waits[1:]) == 0


def test_both_measurements_of_a_host_that_calls_before_it_tunes_stay_in_the_budget(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = built()
    called(module)
    deciding.tuning()
    called(module)
    assert clock.budgets == [deciding.UNTUNED_S, pytest.approx(2.0 - 0.05 * len(clock.rounds))]
    process.forget()
    answers.clear()
    deciding.tuning()
    called(built())
    assert clock.budgets[2:] == [2.0]


def test_the_status_says_it(clock: Clock) -> None:
    module = built()
    called(module)
    (summary,) = trtllm_b12x.status().crossovers.values()
    assert summary.startswith("measured in ")
    assert "then CUTLASS" in summary
