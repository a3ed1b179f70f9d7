"""The GPU that kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Card:
    """What the choice of kernels knows of a GPU."""

    multiprocessors: int
    shared_memory: int
    """Bytes per multiprocessor."""
    capability: int
    """90, 120, ..."""


def card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card(4, 228 << 10, 90)
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_multiprocessor", 100 << 10)
    return Card(found.multi_processor_count, shared, 10 * found.major + found.minor)
