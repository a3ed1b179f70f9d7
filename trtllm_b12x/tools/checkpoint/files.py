# SPDX-License-Identifier: Apache-2.0
"""Read untrusted JSON, and the safetensors that TensorRT-LLM would load from a directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trtllm_b12x.core import disk
from trtllm_b12x.tools.progress import UnusableError

INDEX = "model.safetensors.index.json"

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"

_TYPES = {int: "a whole number", float: "a number", str: "a string", list: "a list", dict: "an object"}

_NO_PERMISSION = "you have no permission to read it", "run this as its owner, or let its owner run chmod -R a+rX on the folder"

_GIVE_EXPORT = "give the folder that export_hf_checkpoint wrote, or a folder below snapshots/ in a Hugging Face cache"


class CheckpointError(UnusableError):
    """The checkpoint cannot be used. The message is one line: where, what is wrong, what to do."""

    def __init__(self, place: object, problem: str, remedy: str = "copy or export the checkpoint again") -> None:
        super().__init__(f"{place}: {problem}; {remedy}")


class Section(dict[str, Any]):
    """A JSON object, and the file that holds it."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.path = path

    def typed(self, kind: type, *keys: str) -> Any:
        """Return the value of the first key that is present, or None. Raise CheckpointError if its type is wrong."""
        for key in keys:
            value = self.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
                raise CheckpointError(self.path, f"{key} is {json.dumps(value)[:80]}, not {_TYPES[kind]}")
            return value
        return None

    def section(self, key: str) -> Section:
        """Return the object under ``key``, empty if the key is missing."""
        return Section(self.path, self.typed(dict, key) or {})


def read_json(path: Path) -> Section:
    """Parse a JSON file that holds an object. Raise CheckpointError if it is missing or not valid."""
    with _opening(path):
        raw = path.read_bytes()
    _refuse_pointer(path, raw)
    try:
        content = json.loads(raw.decode("utf-8"))
    except (RecursionError, ValueError) as error:  # also UnicodeDecodeError, integers beyond sys.get_int_max_str_digits()
        raise CheckpointError(path, f"cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(path, "holds no JSON object")
    return Section(path, content)


class TensorFiles:
    """The tensors of every ``*.safetensors`` in a directory, as TensorRT-LLM finds them.

    ``HfWeightLoader.load_weights`` (``tensorrt_llm/_torch/models/checkpoints/hf/weight_loader.py``, commit 02086d89) loads
    every file, listed in the index or not. If there are others, it skips files with "consolidated" in their names. It merges
    files in no fixed order, and reads neither the index nor subfolders. So CheckpointError is raised if two files hold the same
    name, or if the index lists a tensor that is not loaded.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open_files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        names = sorted(path.name for path in directory.glob("*.safetensors") if not path.name.startswith("."))
        names = [name for name in names if "consolidated" not in name] or names
        index = self._index()
        missing = min(set(index.values()).difference(names), default=None)
        if missing is not None:
            raise CheckpointError(directory / INDEX, f"lists {missing[:200]}, which is not in this folder", "copy the shard")
        if not names and not os.access(directory, os.R_OK):
            raise CheckpointError(directory, *_NO_PERMISSION)
        if not names:
            raise CheckpointError(directory, "holds no *.safetensors", _GIVE_EXPORT)
        for file in names:
            for name in self._open(file).keys():  # noqa: SIM118 (no dict)
                if name in self._file_of:
                    raise CheckpointError(
                        directory / file,
                        f"holds {name}, and so does {self._file_of[name]}. TensorRT-LLM loads both files and keeps either tensor",
                        "remove the file that is not part of the checkpoint",
                    )
                self._file_of[name] = file
        for name, file in index.items():
            if name not in self._file_of:
                raise CheckpointError(directory / file, f"tensor {name} is missing, but {INDEX} lists it here")

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def file_of(self, name: str) -> Path:
        try:
            return self.directory / self._file_of[name]
        except KeyError:
            raise CheckpointError(self.directory, f"tensor {name} is missing") from None

    def tensor(self, name: str, index: int | None = None) -> torch.Tensor:
        """Map a tensor into CPU memory, or only entry ``index`` of its first dimension."""
        with self._reading(name) as file:
            tensor: torch.Tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
        return tensor

    def header(self, name: str) -> tuple[str, list[int]]:
        """Return the dtype (safetensors' name) and the shape, without reading the data."""
        with self._reading(name) as file:
            entry = file.get_slice(name)
        return entry.get_dtype(), entry.get_shape()

    @contextmanager
    def _reading(self, name: str) -> Iterator[Any]:
        path = self.file_of(name)
        try:
            yield self._open(path.name)
        except (SafetensorError, RuntimeError, IndexError) as error:
            raise CheckpointError(path, f"tensor {name} cannot be read ({error})") from error

    def _index(self) -> dict[str, str]:
        index = self.directory / INDEX
        if not index.exists():
            return {}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(index, "has no weight_map")
        return weight_map

    def _open(self, file: str) -> Any:
        if file not in self._open_files:
            path = self.directory / file
            with _opening(path):
                with path.open("rb") as opened:  # safe_open reports a file without read permission as missing
                    _refuse_pointer(path, opened.read(len(_LFS_POINTER)))
                self._open_files[file] = safe_open(path, framework="pt")
        return self._open_files[file]


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Turn errors of opening a file into CheckpointErrors."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(path, "missing", _GIVE_EXPORT) from None
    except PermissionError:
        raise CheckpointError(path, *_NO_PERMISSION) from None
    except IsADirectoryError:
        raise CheckpointError(path, "is a folder, not a file") from None
    except (OSError, SafetensorError, ValueError) as error:
        if not disk.is_utf8(path):
            raise CheckpointError(path, "safetensors opens no path that is not UTF-8", "rename it") from None
        raise CheckpointError(path, f"cannot be opened ({error})") from error


def _refuse_pointer(path: Path, start: bytes) -> None:
    if start.startswith(_LFS_POINTER):
        raise CheckpointError(path, "is a Git LFS pointer, not the file itself", f"run git lfs pull in {path.parent}")
