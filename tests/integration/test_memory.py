"""Peak host memory of ``verify`` stays under two layers' bytes above what the process needs for a tiny checkpoint."""

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
from trtllm_b12x.cli import main
try:
    main(["verify", sys.argv[1], "--tokens", "8,64"], standalone_mode=False)
except SystemExit as status:
    assert not status.code, status.code
print(peak)
"""


def peak_bytes(checkpoint: Path) -> int:
    result = subprocess.run([sys.executable, "-c", PROBE, checkpoint], check=True, capture_output=True, text=True)
    return int(result.stdout.split()[-1]) * 1024


@pytest.mark.parametrize("size", [512, 128])
def test_one_layer_at_a_time(tmp_path: Path, size: int) -> None:
    """128 is padded to 256: a layer then has twice the checkpoint's bytes."""
    tiny = write_checkpoint(tmp_path / "tiny", [random_experts(2, 128, 128)], top_k=1)
    template = random_experts(1, 1024, size)
    layer = {f"{expert}.{key[2:]}": tensor for expert in range(32768 // size) for key, tensor in template.items()}
    large = write_checkpoint(tmp_path / "large", [layer, layer], top_k=2)
    layer_bytes = sum(tensor.nbytes for tensor in layer.values()) * (2 if size == 128 else 1)
    assert layer_bytes > 50e6
    grown = peak_bytes(large) - peak_bytes(tiny)
    assert grown < 2 * layer_bytes, f"{grown / layer_bytes:.2f} layers"
