# SPDX-License-Identifier: Apache-2.0
"""Peak host memory of ``verify``: one layer at its real size, and 200 MB above what the process needs for a tiny checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import random_experts, write_checkpoint

# Anonymous memory only: the checkpoint itself is mapped from the file.  Sampled, because the kernel keeps no peak of it.
PROBE = """
import re, sys, threading, time, torch
peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]))
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
from trtllm_b12x.tools.cli import main
try:
    main(["verify", sys.argv[1], "--tokens", "8,63,64"], standalone_mode=False)
except SystemExit as status:
    assert not status.code, status.code
print(peak)
"""

EXPERTS, HIDDEN, SIZE, TILE = 128, 2048, 704, 768
"""Qwen3-30B-A3B's layer, but for an intermediate size off the kernel's tile."""


def peak_bytes(checkpoint: Path) -> int:
    result = subprocess.run([sys.executable, "-c", PROBE, checkpoint], check=True, capture_output=True, text=True)
    return int(result.stdout.split()[-1]) * 1024


@pytest.mark.all
def test_one_layer_at_a_time(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path / "tiny", [random_experts(2, 128, 128)], top_k=1)
    template = random_experts(1, HIDDEN, SIZE)
    layer = {f"{expert}.{key[2:]}": tensor for expert in range(EXPERTS) for key, tensor in template.items()}
    large = write_checkpoint(tmp_path / "large", [layer], top_k=8)
    layer_bytes = EXPERTS * 3 * HIDDEN * TILE * 9 // 16
    grown = peak_bytes(large) - peak_bytes(tiny)
    assert layer_bytes < grown < layer_bytes + 200e6, f"{(grown - layer_bytes) / 1e6:.0f} MB beside the layer"
