# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from tests.hosts.machine import Double, Machine, of
from trtllm_b12x.engines.trtllm.contract import GENERATIONS


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="session", params=of(*GENERATIONS))
def double(request: pytest.FixtureRequest, machine: Machine) -> Double:
    """This generation's double."""
    return machine.double(request.param)


@pytest.fixture
def own_double(machine: Machine, tmp_path: Path) -> Double:
    """A double of A, in an environment of the test's own."""
    # Without what processes of other tests have compiled, or were compiling when they were ended.
    source, ignore = machine.python.parents[1], shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, tmp_path / "venv", symlinks=True, ignore=ignore)
    return dataclasses.replace(machine.double("A"), python=tmp_path / "venv" / "bin" / "python")
