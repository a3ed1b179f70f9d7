# SPDX-License-Identifier: Apache-2.0
"""The gate on real wheels: verdict, reasons, and the one command that mends them, run as it is printed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import environments
from .environments import CASES, COMPLETE, MAIN, ROOT, Environment, made

pytestmark = pytest.mark.all


def reasons(report: dict[str, Any]) -> list[str]:
    return [rejection["reason"] for rejection in report["verdicts"][0]["rejections"]]


def details(report: dict[str, Any]) -> str:
    return "; ".join(rejection["detail"] for rejection in report["verdicts"][0]["rejections"])


def mend(environment: Environment, report: dict[str, Any]) -> dict[str, Any]:
    """Run what is printed, once, and ask again."""
    commands = {tuple(rejection["commands"]) for rejection in report["verdicts"][0]["rejections"]}
    assert len(commands) == 1, commands
    for command in commands.pop():
        program, *arguments = shlex.split(command)
        assert program == "pip"
        environment.pip(*arguments)
    return environment.doctor()


def named(name: str) -> environments.Case:
    (case,) = (case for case in CASES if case.name == name)
    return case


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The newest of everything; who spoils it mends it."""
    environment = Environment(tmp_path_factory.mktemp("complete") / "env")
    environment.add(*COMPLETE)
    report = environment.doctor("--compile")
    assert report["active"], report
    assert report["proofs"]["b12x"]["products"] > 0
    assert report["environment"]["expert_parallel"] is True
    return environment


SPOILED = [
    [
        ("import of the DSL raises", "importing the CuTe DSL fails; RuntimeError: no _cutlass_ir, in "),
        ("import of the DSL kills", "kills the process; SIGSEGV"),
    ],
    [("no cuda-python", "No module named 'cuda")],
]
"""Damages that one command fixes."""


def test_each_damage_and_what_mends_it(complete: Environment) -> None:
    for damages in SPOILED:
        commands = set()
        for name, words in damages:
            spoil = named(name).spoil
            assert spoil is not None
            spoil(complete)
            report = complete.doctor()
            assert reasons(report) == ["DSL_PAYLOAD"], name
            assert words in details(report), name
            commands.add(tuple(report["verdicts"][0]["rejections"][0]["commands"]))
        assert len(commands) == 1, commands
        mended = mend(complete, report)
        assert mended["active"], (damages, mended["verdicts"][0])


@pytest.mark.parametrize(
    ("name", "expected", "words", "moves"),
    [
        ("pins of May 2026", ["DSL_PAYLOAD", "FLASHINFER_TOO_OLD"], "nvidia-cutlass-dsl-libs-cu13 is not installed", 2),
        ("base over cu13", ["DSL_PAYLOAD", "REQUIREMENT"], "overwritten by nvidia-cutlass-dsl-libs-base", 1),
        ("tvm-ffi 0.1.6", ["REQUIREMENT"], "apache-tvm-ffi<0.2,>=0.1.11 (0.1.6 is installed)", 1),
    ],
)
def test_no_and_the_command_turns_it_into_yes(tmp_path: Path, name: str, expected: list[str], words: str, moves: int) -> None:
    """One environment of each kind. ``environments.json`` holds verdict and command of all others."""
    environment = made(named(name), tmp_path / "env")
    report = environment.doctor()
    assert reasons(report) == expected
    assert words in details(report)
    assert len(report["verdicts"][0]["rejections"][0]["moves"]) == moves
    mended = mend(environment, report)
    assert reasons(mended) == []
    assert mended["environment"]["payload_cuda"] >= [13, 0]


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What the newest TensorRT-LLM pins."""
    environment = Environment(tmp_path_factory.mktemp("newest") / "env")
    environment.add(*MAIN)
    return environment


def test_on_the_newest_pins_nothing_has_to_move(newest: Environment) -> None:
    """Active as it is; ``[kernels]`` asks for nothing more, ``[expert-parallel]`` for another FlashInfer."""
    assert newest.doctor()["active"]
    pins = {name for name, _ in MAIN} | {"torch", "triton", "numpy"}
    for extra, moved in (("kernels", set()), ("expert-parallel", {"flashinfer-python"})):
        command = [sys.executable, "-m", "pip", "--python", newest.python, "install", "--dry-run", "--quiet", "--report", "-"]
        result = subprocess.run([*command, f"{ROOT}[{extra}]"], capture_output=True, text=True, check=True)
        installs = {item["metadata"]["name"] for item in json.loads(result.stdout)["install"]}
        assert installs & pins == moved


def test_what_the_driver_plans_on_the_oldest_line(newest: Environment, tmp_path: Path) -> None:
    # The driver's plans there are on a tile of 128, and FlashInfer's own padding is not reached.  For 0.7.2: test_b12x.py.
    command = (newest.python, "-m", "tests.forks", "call", "tests.integration.b12x_on_cpu:kinds_and_padding", str(tmp_path))
    found = json.loads(newest.run(*command).stdout.splitlines()[-1])
    assert found["kinds"]["any"][-1] == "static"
    for size, planned in {1344: 1408, 640: 640}.items():
        assert found[f"padding {size}"]["planned"] == planned
