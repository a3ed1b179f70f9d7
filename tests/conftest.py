from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers whatever ran before, in whichever worker."""
    torch.manual_seed(0)
