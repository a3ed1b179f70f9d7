# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints: one clear line, a failed number, or a sound pass; never a traceback, never a wrong pass.

``FUZZ_EXAMPLES=5000 pytest tests/integration/test_fuzz.py`` tries more of them.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from tests.checkpoints import random_experts, write_checkpoint
from trtllm_b12x.tools.cli import main

EXPERTS, HIDDEN, SIZE = 3, 128, 16
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "300"))
PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
KEYS = {
    **dict.fromkeys(("num_experts_per_tok", "num_experts", "hidden_act", "swiglu_limit"), "config.json"),
    **dict.fromkeys(("quantization", "quant_algo", "group_size", "exclude_modules", "quantized_layers"), "hf_quant_config.json"),
    "weight_map": "model.safetensors.index.json",
}
CONTENTS: list[Any] = [
    *(None, 0, 1, -1, 2, 3, 17, True, 1.5, "", "NVFP4", "FP8", "MIXED_PRECISION", [], ["model.layers.0.mlp*"], {}),
    *({"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}}, {"x": 5}),
]


@cache
def sound_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as directory:
        experts = random_experts(EXPERTS, HIDDEN, SIZE)
        write_checkpoint(Path(directory), [experts], top_k=2, config={"num_experts": EXPERTS})
        names = list(load_file(Path(directory) / "model.safetensors"))
        index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
        (Path(directory) / "model.safetensors.index.json").write_text(json.dumps(index))
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


FRACTION = st.floats(0, 1, exclude_max=True)
SCALAR = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1e-38, 1e30, -1.0, float("nan"), float("inf")]))
KINDS = ["header", "entry", "data", "truncate", "scalar", "json", "json value", "matrix", "matrix"]


def damaged(example: st.DataObject) -> dict[str, bytes]:
    """Return the sound files with one damage, which hypothesis draws and names."""
    files, draw = dict(sound_files()), example.draw
    blob = files["model.safetensors"]
    (length,) = struct.unpack("<Q", blob[:8])
    header, data = blob[: 8 + length], bytearray(blob[8 + length :])
    entries = json.loads(header[8:])
    names = sorted(name for name in entries if name != "__metadata__")
    kind = draw(st.sampled_from(KINDS))
    if kind == "matrix":
        matrix = st.tuples(st.integers(0, EXPERTS - 1), st.sampled_from(sorted(PROJECTIONS)))
        matrices = draw(matrix), draw(matrix)
        tensor = draw(st.sampled_from(["weight", "weight_scale"]))
        first, second = (
            slice(*entries[f"model.layers.0.mlp.experts.{expert}.{projection}.{tensor}"]["data_offsets"])
            for expert, projection in matrices
        )
        change = draw(st.sampled_from(["zero", "random", "roll", "exchange", "half"]))
        data[first], data[second] = damaged_matrix(bytes(data[first]), bytes(data[second]), change)
        blob = header + bytes(data)
    elif kind == "header":
        blob = with_other_bytes(header, draw) + bytes(data)
    elif kind == "data":
        blob = header + with_other_bytes(bytes(data), draw)
    elif kind == "truncate":
        blob = blob[: int(draw(FRACTION) * len(blob))]
    elif kind == "entry":
        name = names[draw(st.integers(0, 10_000)) % len(names)]
        change, amount = draw(st.sampled_from(["drop", "rename", "dtype", "shape", "offsets"])), draw(st.integers(-2, 300))
        if change == "drop":
            del entries[name]
        elif change == "rename":
            entries[name.replace(".0.", f".{amount}.")] = entries.pop(name)
        elif change == "dtype":
            entries[name]["dtype"] = draw(st.sampled_from(["F32", "BF16", "U8", "F8_E4M3", "I64", "F9"]))
        elif change == "shape":
            entries[name]["shape"] = [*entries[name]["shape"][:-1], amount]
        else:
            entries[name]["data_offsets"][0] += amount
        text = json.dumps(entries).encode()
        blob = struct.pack("<Q", len(text)) + text + bytes(data)
    elif kind == "scalar":
        scalars = [name for name in names if not entries[name]["shape"]]
        start = entries[scalars[draw(st.integers(0, 10_000)) % len(scalars)]]["data_offsets"][0]
        data[start : start + 4] = struct.pack("<f", draw(SCALAR))
        blob = header + bytes(data)
    elif kind == "json":
        file = draw(st.sampled_from(["config.json", "hf_quant_config.json", "model.safetensors.index.json"]))
        files[file] = with_other_bytes(files[file], draw)
    else:
        key, value = draw(st.sampled_from(sorted(KEYS))), draw(st.sampled_from(CONTENTS))
        content = json.loads(files[KEYS[key]])
        (content if key in content else content.get("quantization", content))[key] = value
        files[KEYS[key]] = json.dumps(content).encode()
    files["model.safetensors"] = blob
    return files


def with_other_bytes(content: bytes, draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
    changed = bytearray(content)
    for position, byte in draw(st.lists(st.tuples(FRACTION, st.integers(0, 255)), min_size=1, max_size=8)):
        changed[int(position * len(changed))] = byte
    return bytes(changed)


def damaged_matrix(one: bytes, other: bytes, change: str) -> tuple[bytes, bytes]:
    """The bytes of a matrix after ``change``, and those of another one; scales stay scales, as both are bytes below 0x7F."""
    if change == "exchange":
        return other, one
    if one == other:
        return one, one
    mask = 0x7F if max(one) < 0x7F else 0xFF
    edits = {
        "zero": lambda: bytes(len(one)),
        "random": lambda: bytes(Random(0).randrange(mask) for _ in one),
        "roll": lambda: one[7:] + one[:7],
        "half": lambda: one[: len(one) // 2] + bytes(len(one) - len(one) // 2),
    }
    return edits[change](), other


@cache
def original_model() -> Path:
    """Write the unquantized model of the sound files."""
    tensors = load(sound_files()["model.safetensors"])
    places = itertools.product(range(EXPERTS), PROJECTIONS.items())
    plain = {f"{expert}.{half}.weight": matrix(tensors, expert, name) for expert, (name, half) in places}
    directory = Path(tempfile.mkdtemp())
    return write_checkpoint(directory, [plain], top_k=2, quantization={"quant_algo": None})


def matrix(tensors: dict[str, torch.Tensor], expert: int, projection: str) -> torch.Tensor:
    """float32 ``(rows, K)``, worked out without the package."""
    prefix = f"model.layers.0.mlp.experts.{expert}.{projection}."
    packed = tensors[prefix + "weight"].long()
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[codes & 7] * (1 - 2 * (codes >> 3))
    return values * tensors[prefix + "weight_scale"].float().repeat_interleave(16, 1) * tensors[prefix + "weight_scale_2"]


def moved(files: dict[str, bytes]) -> float:
    """The largest relative change of any expert's matrix."""
    before, after = load(sound_files()["model.safetensors"]), load(files["model.safetensors"])
    pairs = [(matrix(before, *place), matrix(after, *place)) for place in itertools.product(range(EXPERTS), PROJECTIONS)]
    return max(float((new - old).norm() / old.norm()) for old, new in pairs)


def sound(files: dict[str, bytes]) -> bool:
    """Check without the package what a pass claims: all tensors are complete, scales are finite and not negative."""
    tensors = load(files["model.safetensors"])
    shapes = {"weight": 2, "weight_scale": 16}
    kinds = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    for expert, projection, kind in itertools.product(range(EXPERTS), PROJECTIONS, kinds):
        rows, columns = (HIDDEN, SIZE) if projection == "down_proj" else (SIZE, HIDDEN)
        tensor = tensors[f"model.layers.0.mlp.experts.{expert}.{projection}.{kind}"]
        if kind in shapes and tensor.shape != (rows, columns // shapes[kind]):
            return False
        if not bool(tensor.float().isfinite().all()) or bool((tensor.float() < 0).any()):
            return False
    return True


@pytest.mark.all
# The same in every run (derandomize): a failure in CI is a failure everywhere.
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), with_original=st.booleans())
def test_no_damage_passes_unseen(tmp_path: Path, data: st.DataObject, with_original: bool) -> None:
    torch.set_num_threads(1)
    files = damaged(data)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    report = tmp_path / "report.out"
    report.unlink(missing_ok=True)
    arguments = ["verify", str(tmp_path), "--tokens", "63", "--require-b12x", "--out", str(report)]
    if with_original:
        arguments += ["--original", str(original_model())]
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    if result.exit_code == 2:
        (line,) = result.output.splitlines()
        assert line.startswith(f"error: {tmp_path}")
        return
    layers = json.loads(report.read_text())["layers"]
    assert len(layers) == 1
    if result.exit_code == 0:
        assert sound(files)
        assert layers[0]["served_by"] == "b12x"
        assert layers[0]["bits_exact"] is True
        assert layers[0]["num_experts"] == EXPERTS
        assert all(isinstance(case[key], float) for case in layers[0]["cases"] for key in ("rel_l2_none", "error"))
        assert not with_original or moved(files) <= 0.2
    else:
        assert result.exit_code == 1
        assert layers[0]["failures"] or any(case["failures"] for case in layers[0]["cases"])
