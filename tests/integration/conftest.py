# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from .sm12x_on_hopper import Bed, sm12x_on_hopper
from .sm12x_on_hopper.own import card_on_hopper


@pytest.fixture(scope="session", autouse=True)
def another_card() -> Iterator[None]:
    """With ``SM12X_ON_HOPPER=120`` the device tests of our kernels run what is compiled for such a card, on a Hopper GPU."""
    sm = os.environ.get("SM12X_ON_HOPPER")
    if not sm:
        yield
        return
    with card_on_hopper(torch.cuda.get_device_properties(0).multi_processor_count, int(sm)):
        yield


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """FlashInfer's SM12x kernels on this machine's Hopper GPU."""
    with sm12x_on_hopper() as bed:
        yield bed
