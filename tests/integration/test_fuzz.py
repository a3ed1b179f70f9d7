"""Damaged checkpoints: one clear line, a failed number, or a sound pass; never a traceback, never a wrong pass.

``FUZZ_EXAMPLES=5000 pytest tests/integration/test_fuzz.py`` tries more of them.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

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


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, Any]:
    kind = draw(st.sampled_from(["header", "entry", "data", "truncate", "scalar", "json", "json value", "matrix", "matrix"]))
    if kind == "matrix":
        matrix = st.tuples(st.integers(0, EXPERTS - 1), st.sampled_from(sorted(PROJECTIONS)))
        tensor, change = (
            st.sampled_from(["weight", "weight_scale"]),
            st.sampled_from(["zero", "random", "roll", "exchange", "half"]),
        )
        return kind, tuple(draw(part) for part in (matrix, matrix, tensor, change))
    if kind == "header" or kind == "data":
        return kind, draw(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8))
    if kind == "truncate":
        return kind, draw(st.floats(0, 1, exclude_max=True))
    if kind == "entry":
        change = st.sampled_from(["drop", "rename", "dtype", "shape", "offsets"])
        dtype = st.sampled_from(["F32", "BF16", "U8", "F8_E4M3", "I64", "F9"])
        return kind, tuple(draw(part) for part in (st.integers(0, 10_000), change, st.integers(-2, 300), dtype))
    if kind == "scalar":
        value = draw(st.one_of(st.floats(width=32), st.sampled_from([0.0, 1e-38, 1e30, -1.0, float("nan"), float("inf")])))
        return kind, (draw(st.integers(0, 10_000)), value)
    file = draw(st.sampled_from(["config.json", "hf_quant_config.json", "model.safetensors.index.json"]))
    if kind == "json":
        return kind, (file, draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 255)))
    return kind, (draw(st.sampled_from(sorted(KEYS))), draw(st.sampled_from(CONTENTS)))


def apply(files: dict[str, bytes], damage: tuple[str, Any]) -> dict[str, bytes]:
    kind, what = damage
    files = dict(files)
    blob = files["model.safetensors"]
    (length,) = struct.unpack("<Q", blob[:8])
    header, data = blob[8 : 8 + length], bytearray(blob[8 + length :])
    entries = json.loads(header)
    names = sorted(name for name in entries if name != "__metadata__")
    if kind == "header" or kind == "data":
        changed = bytearray(blob)
        first, size = (0, 8 + length) if kind == "header" else (8 + length, len(data))
        for position, byte in what:
            changed[first + int(position * size)] = byte
        blob = bytes(changed)
    elif kind == "truncate":
        blob = blob[: int(what * len(blob))]
    elif kind == "scalar":
        scalars = [name for name in names if not entries[name]["shape"]]
        start = entries[scalars[what[0] % len(scalars)]]["data_offsets"][0]
        data[start : start + 4] = struct.pack("<f", what[1])
        blob = blob[: 8 + length] + bytes(data)
    elif kind == "matrix":
        bytes_of = {name: slice(*entries[name]["data_offsets"]) for name in names}
        first, second = (
            bytes_of[f"model.layers.0.mlp.experts.{expert}.{projection}.{what[2]}"] for expert, projection in what[:2]
        )
        data[first], data[second] = damaged_matrix(bytes(data[first]), bytes(data[second]), what[3])
        blob = blob[: 8 + length] + bytes(data)
    elif kind == "entry":
        number, change, amount, dtype = what
        name = names[number % len(names)]
        if change == "drop":
            del entries[name]
        elif change == "rename":
            entries[name.replace(".0.", f".{amount}.")] = entries.pop(name)
        elif change == "dtype":
            entries[name]["dtype"] = dtype
        elif change == "shape":
            entries[name]["shape"] = [*entries[name]["shape"][:-1], amount]
        else:
            entries[name]["data_offsets"][0] += amount
        text = json.dumps(entries).encode()
        blob = struct.pack("<Q", len(text)) + text + bytes(data)
    elif kind == "json":
        file, position, byte = what
        edited = bytearray(files[file])
        edited[int(position * len(edited))] = byte
        files[file] = bytes(edited)
    else:
        key, value = what
        content = json.loads(files[KEYS[key]])
        (content if key in content else content.get("quantization", content))[key] = value
        files[KEYS[key]] = json.dumps(content).encode()
    files["model.safetensors"] = blob
    return files


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
    plain = {
        f"{expert}.{own}.weight": matrix(tensors, expert, name) for expert in range(EXPERTS) for name, own in PROJECTIONS.items()
    }
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
    changes = []
    for expert in range(EXPERTS):
        for projection in PROJECTIONS:
            old, new = matrix(before, expert, projection), matrix(after, expert, projection)
            changes.append(float((new - old).norm() / old.norm()))
    return max(changes)


def sound(files: dict[str, bytes]) -> bool:
    """Check without the package what a pass claims: all tensors are complete, scales are finite and not negative."""
    tensors = load(files["model.safetensors"])
    shapes = {"weight": 2, "weight_scale": 16}
    for expert in range(EXPERTS):
        for projection in PROJECTIONS:
            rows, columns = (HIDDEN, SIZE) if projection == "down_proj" else (SIZE, HIDDEN)
            for kind in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                tensor = tensors[f"model.layers.0.mlp.experts.{expert}.{projection}.{kind}"]
                if kind in shapes and tensor.shape != (rows, columns // shapes[kind]):
                    return False
                values = tensor.float()
                if not bool(values.isfinite().all()) or bool((values < 0).any()):
                    return False
    return True


# The same in every run (derandomize): a failure in CI is a failure everywhere.
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(damage=damages(), with_original=st.booleans())
def test_no_damage_passes_unseen(tmp_path: Path, damage: tuple[str, Any], with_original: bool) -> None:
    torch.set_num_threads(1)
    damaged = apply(sound_files(), damage)
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
    report = tmp_path / "report.out"
    report.unlink(missing_ok=True)
    arguments = ["verify", str(tmp_path), "--tokens", "63", "--require-b12x", "--json", str(report)]
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
        assert sound(damaged)
        assert layers[0]["served_by"] == "b12x"
        assert layers[0]["bits_exact"] is True
        assert layers[0]["num_experts"] == EXPERTS
        assert all(isinstance(case[key], float) for case in layers[0]["cases"] for key in ("rel_l2_none", "error"))
        assert not with_original or moved(damaged) <= 0.2
    else:
        assert result.exit_code == 1
        assert layers[0]["failures"] or any(case["failures"] for case in layers[0]["cases"])
