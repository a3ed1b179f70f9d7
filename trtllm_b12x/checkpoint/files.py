"""What lies in a checkpoint's directory: JSON that cannot be trusted, and the safetensors that TensorRT-LLM would load."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"

_MAX_JSON_BYTES = 1 << 28
"""The index of a model with a million tensors has about 100 MB."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"

_KINDS = {int: "a whole number", float: "a number", str: "a string", list: "a list", dict: "an object"}


class CheckpointError(ValueError):
    """The checkpoint cannot be used; the message names file, tensor and remedy."""


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        CheckpointError: there is none, whatever the file is: a pipe, endless, nested too deeply, numbers of thousands of digits,
            text that is no Unicode.
    """
    try:
        _expect_regular(path)
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: has {path.stat().st_size} bytes, this is no configuration; copy it again")
        raw = path.read_bytes()
        if raw.startswith(_LFS_POINTER):
            raise CheckpointError(_pointer(path))
        content = json.loads(raw.decode("utf-8"))
        if re.search(rb"\\u[dD][89a-fA-F]", raw):
            json.dumps(content, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; give the folder that export_hf_checkpoint wrote") from None
    except PermissionError:
        raise CheckpointError(_no_permission(path)) from None
    except RecursionError:
        raise CheckpointError(f"{path}: cannot be read (nested too deeply); copy or export the checkpoint again") from None
    except UnicodeEncodeError:
        raise CheckpointError(f"{path}: holds half a surrogate pair, which is no text; export the checkpoint again") from None
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # JSONDecodeError, UnicodeDecodeError, integers beyond sys.get_int_max_str_digits()
        raise CheckpointError(f"{path}: cannot be read ({error}); copy or export the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no JSON object; copy or export the checkpoint again")
    return content


def typed(path: Path, section: Mapping[str, Any], key: str, kind: type) -> Any:
    """``section[key]``, which must be of this kind if it is there; None if it is not."""
    value = section.get(key)
    allowed = (int, float) if kind is float else kind
    if value is not None and (not isinstance(value, allowed) or isinstance(value, bool)):
        raise CheckpointError(
            f"{path}: {key} is {json.dumps(value)[:80]}, not {_KINDS[kind]}; copy or export the checkpoint again"
        )
    return value


class TensorFiles:
    """The tensors of every ``*.safetensors`` in a directory, as TensorRT-LLM finds them.

    ``HfWeightLoader.load_weights`` takes every file that the pattern matches, beside the index or not, except those with
    "consolidated" in their names where there are others, and merges them in whatever order the threads end
    (``tensorrt_llm/_torch/models/checkpoints/hf/weight_loader.py``, commit 02086d89).  It never looks into the index or a folder
    below.  So a name in two files is an error, and so is an index that names what is not loaded.

    Raises:
        CheckpointError: a file or the index cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open_files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        try:
            names = sorted(p.name for p in directory.glob("*.safetensors") if not p.name.startswith("."))
        except PermissionError:
            raise CheckpointError(_no_permission(directory)) from None
        names = [name for name in names if "consolidated" not in name] or names
        index = self._index()
        for name in sorted(set(index.values())):
            if "/" in name or "\\" in name:
                raise CheckpointError(
                    f"{directory / INDEX}: names {name[:200]}, but TensorRT-LLM loads only what lies in {directory} itself; "
                    "move the shards there and correct the index"
                )
            if name not in names:
                raise CheckpointError(f"{directory / name[:200]}: named by {INDEX} but missing; copy the shard")
        if not names:
            raise CheckpointError(self._nothing_here())
        for file in names:
            for name in self._open(file).keys():  # noqa: SIM118 (no dict)
                if name in self._file_of:
                    raise CheckpointError(
                        f"{directory / file}: holds {name}, and so does {self._file_of[name]}; TensorRT-LLM loads both files and "
                        "keeps either's; remove the one that is not part of the checkpoint"
                    )
                self._file_of[name] = file
        for name, file in index.items():
            found = self._file_of.get(name)
            if found != file:
                where = "missing there" if found is None else f"found in {found}"
                raise CheckpointError(
                    f"{directory / file}: tensor {name} cannot be read: {INDEX} says it is here, and it is {where}; "
                    "copy or export the checkpoint again"
                )

    def __iter__(self) -> Any:
        return iter(self._file_of)

    def close(self) -> None:
        """Close every file.  Tensors that were read stay valid: each keeps its own mapping."""
        self._open_files.clear()

    def file_of(self, name: str) -> Path:
        try:
            return self.directory / self._file_of[name]
        except KeyError:
            raise CheckpointError(f"{self.directory}: tensor {name} is missing; copy or export the checkpoint again") from None

    def tensor(self, name: str, index: int | None = None) -> torch.Tensor:
        """The named tensor on the CPU, backed by the file; only entry ``index`` of its first dimension if given."""
        path = self.file_of(name)
        try:
            file = self._open(path.name)
            return file.get_tensor(name) if index is None else file.get_slice(name)[index]
        except (SafetensorError, RuntimeError, IndexError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({error}); copy or export the file again") from error

    def header(self, name: str) -> tuple[str, list[int]]:
        """Dtype (safetensors' name) and shape, without reading the data."""
        path = self.file_of(name)
        try:
            entry = self._open(path.name).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({error}); copy or export the file again") from error
        return entry.get_dtype(), entry.get_shape()

    def _index(self) -> dict[str, str]:
        index = self.directory / INDEX
        if not index.exists():
            return {}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{index}: has no weight_map; export the checkpoint again")
        return weight_map

    def _open(self, file: str) -> Any:
        if file not in self._open_files:
            path = self.directory / file
            try:
                _expect_regular(path)
                with path.open("rb") as opened:  # safe_open calls a file missing that may not be read
                    if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                        raise CheckpointError(_pointer(path))
                self._open_files[file] = safe_open(path, framework="pt")
            except PermissionError:
                raise CheckpointError(_no_permission(path)) from None
            except (OSError, SafetensorError, ValueError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{path}: cannot be opened ({error}); copy or export the file again") from error
        return self._open_files[file]

    def _nothing_here(self) -> str:
        below = next(self.directory.glob("*/*.safetensors"), None)
        if below is not None:
            return (
                f"{self.directory}: its *.safetensors lie in {below.parent.name}/, but TensorRT-LLM loads only what lies in "
                "the folder of config.json; move them there"
            )
        others = sorted(p.name for p in self.directory.iterdir() if p.suffix in (".bin", ".pth", ".gguf"))
        held = f" (it holds {others[0]})" if others else ""
        return f"{self.directory}: holds no *.safetensors{held}; give the folder that export_hf_checkpoint wrote"


def expect_directory(directory: Path) -> None:
    """
    Raises:
        CheckpointError: it is no directory, or one of the Hugging Face cache's that only leads to the files.
    """
    if not _safely(directory.is_dir):
        if re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", str(directory)):
            prints = f"give the folder that this prints: hf download {directory}"
            raise CheckpointError(f"{directory}: no such directory; for a Hugging Face name, {prints}")
        raise CheckpointError(f"{str(directory)[:300]}: no such directory; give the folder that holds config.json")
    if _safely((directory / "config.json").exists):
        return
    roots = [directory] if (directory / "snapshots").is_dir() else sorted(directory.glob("models--*"))
    if roots:
        found = next(iter(sorted(root / "snapshots" for root in roots)[0].glob("*/config.json")), None)
        give = f"give {found.parent}" if found else "give a folder below snapshots/ that holds config.json"
        raise CheckpointError(f"{directory}: is a folder of the Hugging Face cache, not a checkpoint; {give}")


def _safely(question: Any) -> bool:
    """Names too long for the file system, and such with a NUL, raise here."""
    try:
        return bool(question())
    except (OSError, ValueError):
        return False


def _expect_regular(path: Path) -> None:
    """A pipe or a device would wait, or never end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise CheckpointError(f"{path}: cannot be opened (it is {kind}, not a file); copy or export the checkpoint again")


def _pointer(path: Path) -> str:
    return f"{path}: is a Git LFS pointer, not the file itself; run git lfs pull in {path.parent}"


def _no_permission(path: Path) -> str:
    return f"{path}: may not be read by this user; change its permissions, or run as the user who owns it"
