# SPDX-License-Identifier: Apache-2.0
"""Two processes with vLLM's groups over gloo choose alike, also if one of them cannot run our kernels."""

from __future__ import annotations

import json
import logging
import pkgutil
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp

from tests.integration.vllm import layers, whole
from trtllm_b12x.core import process, settings
from trtllm_b12x.engines.vllm import plugin

WORLD = 2
TIMEOUT_S = 120
FORMS = ("MXFP8", "MXFP4", "W4A16_NVFP4", "MXFP8")
"""Formats of the layers of a model. The third has EPLB, which asks no other rank."""
CASES: dict[str, tuple[str, list[Exception | str], list[bool]]] = {
    "none": ("machine._rehearse", [], [True, True, False, True]),
    "rehearsal": ("machine._rehearse", [RuntimeError("it does not compile")] * 4, [False] * 4),
    "memory": ("machine._rehearse", [torch.OutOfMemoryError("no memory")], [False, True, False, True]),  # then it is free
    "slower": ("marlin.refusal", ["measured 1.0 us, ours 2.0 us"] * 4, [False] * 4),
    "selection": ("experts.experts_class", [ValueError("not on this rank")] * 4, [False] * 4),
}
"""Function that fails on the second rank, its errors or results there, and which layers are ours on both."""


def choices() -> list[bool]:
    found = []
    for number, form in enumerate(FORMS):
        config = layers.config_of(8, 2, 256, 128, parallel={"tp_size": WORLD, "enable_eplb": number == 2})
        found.append("trtllm_b12x" in layers.method_of(form, config).experts_cls.__module__)
    return found


def rank(number: int, folder: str) -> None:
    lines: list[str] = []
    logger, handler = logging.getLogger("trtllm_b12x"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    plugin.install()
    result = {}
    with whole.ranks(WORLD, number, Path(folder) / "store"):
        for case, (name, errors, _) in CASES.items():
            process.forget()
            lines.clear()
            function = pkgutil.resolve_name(f"trtllm_b12x.engines.vllm.{name}")
            effects = [*(errors if number == 1 else []), *[mock.DEFAULT] * 4]
            with mock.patch(f"trtllm_b12x.engines.vllm.{name}", side_effect=effects, wraps=function):
                result[case] = choices(), list(lines)
    (Path(folder) / f"{number}.json").write_text(json.dumps(result))


def test_ranks_choose_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.KERNELS.name)
    layers.pretend_sm120()
    context = mp.start_processes(rank, (str(tmp_path),), WORLD, join=False, start_method="fork")
    assert context is not None
    try:
        until = time.monotonic() + TIMEOUT_S
        while not context.join(timeout=max(0.0, until - time.monotonic())):
            assert time.monotonic() < until, "the ranks hang"
    finally:
        for child in context.processes:
            child.kill()
    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(WORLD))
    for case, (_, errors, ours) in CASES.items():
        assert (first[case][0], second[case][0]) == (ours, ours), (case, first, second)
        assert any("another rank" in line for line in first[case][1]) == bool(errors), case
        said = "KERNEL_PLAN_FAILED", "error of ours", "experts (8 of 256 x 64): measured 1.0 us, ours 2.0 us"
        assert any(text in line for line in second[case][1] for text in said) == bool(errors), case
