"""The bed as a pytest fixture: name this module in ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .bed import Bed, sm12x_on_hopper


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """FlashInfer's SM12x kernels on this machine's Hopper GPU."""
    with sm12x_on_hopper() as bed:
        yield bed
