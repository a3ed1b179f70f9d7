from __future__ import annotations

from collections.abc import Iterator

import pytest

from .sm12x_on_hopper import Bed, sm12x_on_hopper


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """FlashInfer's SM12x kernels on this machine's Hopper GPU."""
    with sm12x_on_hopper() as bed:
        yield bed
