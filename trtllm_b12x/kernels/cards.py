# SPDX-License-Identifier: Apache-2.0
"""The GPU that kernels are compiled for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trtllm_b12x.formats.geometry import Geometry


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that kernels are chosen by."""

    multiprocessors: int
    shared_memory: int
    """Bytes per multiprocessor."""
    capability: int
    """90, 120, ..."""


SHARED_MEMORY = 100 << 10
"""Bytes of shared memory of an SM of capability 12.x (CUDA C++ programming guide, table of technical specifications)."""
MODELS: dict[str, dict[str, int]] = {
    "sm_120a": {
        "RTX PRO 6000": 188,
        "RTX 5090": 170,
        "RTX PRO 5000": 110,
        "RTX 5080": 84,
        "RTX PRO 4500": 82,
        "RTX 5090 Laptop": 82,
        "RTX 5070 Ti": 70,
        "RTX PRO 4000": 70,
        "RTX 5080 Laptop": 60,
        "RTX 5070": 48,
        "RTX 5070 Ti Laptop": 46,
        "RTX 5060 Ti": 36,
        "RTX 5070 Laptop": 36,
        "RTX PRO 2000": 34,
        "RTX 5060": 30,
        "RTX 5060 Laptop": 26,
        "RTX 5050": 20,
    },
    "sm_121a": {"GB10": 48},
}
"""Number of multiprocessors by target and card: CUDA cores on NVIDIA's product pages divided by 128 per multiprocessor."""


def models(target: str, names: Iterable[str] = ()) -> tuple[Card, ...]:
    """Return the cards of ``target``, one for each number of multiprocessors.

    ``names``: keys of ``MODELS`` in any case, with or without ``GeForce`` or ``NVIDIA``, or numbers of multiprocessors; default:
    all. Raise ValueError, with the known names, for an unknown name.
    """
    known = {_plain(name): count for name, count in MODELS[target].items()}
    counts = []
    for name in names:
        count = int(name) if name.strip().isdecimal() else known.get(_plain(name), 0)
        if not 0 < count <= 1024:
            raise ValueError(f"{name!r} is not a card of {target}; there are {', '.join(MODELS[target])}, or a number of SMs")
        counts.append(count)
    return tuple(Card(count, SHARED_MEMORY, int(target[3:6])) for count in sorted(set(counts or known.values()), reverse=True))


def _plain(name: str) -> str:
    return "".join(word for word in name.lower().replace("-", " ").split() if word not in ("nvidia", "geforce", "rtx"))


def card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card(4, 228 << 10, 90)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_multiprocessor", SHARED_MEMORY)
    return Card(properties.multi_processor_count, shared, 10 * properties.major + properties.minor)


def warmup_command(geometry: Geometry, card: Card) -> str:
    g, capability = geometry, card.capability
    sizes = f"--hidden {g.hidden_size} --intermediate {g.intermediate_size} --experts {g.num_experts * g.ranks} --top-k {g.top_k}"
    form = f"--activation {g.activation.lower()} --format {g.format.lower()}" + f" --ep {g.ranks}" * g.expert_parallel
    form += " --dtype float16" * (g.dtype is torch.float16)
    return f"trtllm-b12x warmup {sizes} {form} --target sm_{capability}a --card {card.multiprocessors}"
