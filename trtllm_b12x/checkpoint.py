"""ModelOpt NVFP4 checkpoints: which MoE layers they hold, and their tensors one at a time.

A checkpoint is a directory as ``modelopt.torch.export.export_hf_checkpoint`` writes it: ``config.json``, ``hf_quant_config.json``
(or ``quantization_config`` inside ``config.json``) and safetensors, in one file or in shards with an index.  Only headers
are read until a tensor is asked for; tensors are memory-mapped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open


class CheckpointError(ValueError):
    """The checkpoint cannot be used; the message names file, tensor and remedy."""


_EXPERT_TENSOR = re.compile(
    r"(?P<layer>.+)\.experts\.(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)\."
    r"(?P<kind>weight|weight_scale|weight_scale_2|input_scale|pre_quant_scale)"
)
"""Per-expert naming: Qwen3-MoE ``model.layers.N.mlp``, Nemotron-H ``backbone.layers.N.mixer``, and their like."""

_ACTIVATIONS = {(True, "silu"): "Swiglu", (False, "relu2"): "Relu2"}
"""(has a gate, ``hidden_act``) to the host's ``ActivationType`` name."""

_NVFP4_DTYPES = {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"}
_PLAIN_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer of the model, before any split over ranks."""

    name: str
    """Prefix of its tensors, for instance ``model.layers.3.mlp``."""
    index: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    gated: bool
    activation: str
    """Name of the host's ``ActivationType`` member, or the checkpoint's own word where there is none."""
    quant_algo: str
    """``NVFP4``, another algorithm's name, or ``none``."""
    group_size: int | None
    projections: Mapping[str, str]
    """Host's name (w1 gate or only, w3 up, w2 down) to the checkpoint's (``gate_proj`` ...)."""


class LayerWeights(Mapping[str, torch.Tensor]):
    """The tensors of one layer by the host's names, ``"{expert}.w1.weight_scale"``; each is read when asked for."""

    def __init__(self, checkpoint: Checkpoint, layer: MoELayer) -> None:
        self._checkpoint, self._layer = checkpoint, layer
        kinds = _NVFP4_DTYPES if layer.quant_algo == "NVFP4" else ("weight",)
        self._names = {
            f"{expert}.{host}.{kind}": f"{layer.name}.experts.{expert}.{own}.{kind}"
            for expert in range(layer.num_experts)
            for host, own in layer.projections.items()
            for kind in kinds
        }

    def __getitem__(self, key: str) -> torch.Tensor:
        tensor = self._checkpoint.tensor(self._names[key])
        if tensor.dim() == 0 and not bool(tensor.isfinite() & (tensor >= 0)):
            raise CheckpointError(
                f"{self._checkpoint.file_of(self._names[key])}: {self._names[key]} is {tensor.item()}, a scale must be finite "
                "and not negative; calibrate and export the model again"
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of FP4 payload and block scales (or of plain weights) in the checkpoint."""
        kinds = (".weight", ".weight_scale")
        return sum(self._checkpoint.nbytes_of(name) for key, name in self._names.items() if key.endswith(kinds))


class Checkpoint:
    """A checkpoint directory.

    Raises:
        CheckpointError: the directory, its configuration or a tensor header cannot be used.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: no such directory; give the folder that holds config.json")
        config = self._json("config.json")
        # Multimodal configurations nest the language model's.
        nested: dict[str, Any] = next(
            (config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), {}
        )
        self._config: dict[str, Any] = {**config, **nested}
        self._quantization = _Quantization.from_files(self)
        self._files: dict[str, Any] = {}
        self._file_of_tensor = self._locate_tensors()

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def file_of(self, name: str) -> Path:
        try:
            return self.directory / self._file_of_tensor[name]
        except KeyError:
            raise CheckpointError(f"{self.directory}: tensor {name} is missing; copy or export the checkpoint again") from None

    def tensor(self, name: str) -> torch.Tensor:
        """The named tensor on the CPU, backed by the file."""
        path = self.file_of(name)
        try:
            return self._open(path.name).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({error}); copy or export the file again") from error

    def header(self, name: str) -> tuple[str, list[int]]:
        """Dtype (safetensors' name) and shape, without reading the data."""
        path = self.file_of(name)
        try:
            entry = self._open(path.name).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({error}); copy or export the file again") from error
        return entry.get_dtype(), entry.get_shape()

    def nbytes_of(self, name: str) -> int:
        dtype, shape = self.header(name)
        size = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}[dtype]
        for extent in shape:
            size *= extent
        return size

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.directory / file
            try:
                self._files[file] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be opened ({error}); copy or export the file again") from error
        return self._files[file]

    def _locate_tensors(self) -> dict[str, str]:
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            weight_map = self._json(index.name).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index}: has no weight_map; export the checkpoint again")
            for file in sorted(set(weight_map.values())):
                if not (self.directory / file).is_file():
                    raise CheckpointError(f"{self.directory / file}: named by {index.name} but missing; copy the shard")
            return weight_map
        files = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{self.directory}: holds no *.safetensors; give the folder that export_hf_checkpoint wrote")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 (no dict)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing; give the folder that export_hf_checkpoint wrote") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); copy or export the checkpoint again") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: holds no JSON object; copy or export the checkpoint again")
        return content

    # ---- layers ------------------------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> list[MoELayer]:
        """Every MoE layer, in the model's order.

        Raises:
            CheckpointError: no layer at all, or one whose tensors are incomplete or contradict the configuration.
        """
        experts: dict[str, dict[int, set[str]]] = {}
        for name in self._file_of_tensor:
            match = _EXPERT_TENSOR.fullmatch(name)
            if match:
                by_expert = experts.setdefault(match["layer"], {})
                by_expert.setdefault(int(match["expert"]), set()).add(match["projection"])
        if not experts:
            raise CheckpointError(
                f"{self.directory}: no MoE layers (no tensors named *.experts.N.*_proj.weight); "
                "verify takes mixture-of-experts checkpoints with per-expert tensors"
            )
        return sorted((self._layer(name, found) for name, found in experts.items()), key=lambda layer: (layer.index, layer.name))

    def weights(self, layer: MoELayer) -> LayerWeights:
        return LayerWeights(self, layer)

    def router_bias(self, layer: MoELayer) -> torch.Tensor | None:
        """``e_score_correction_bias (E,)`` of a sigmoid router, if the layer has one."""
        name = f"{layer.name}.gate.e_score_correction_bias"
        return self.tensor(name) if name in self._file_of_tensor else None

    def _layer(self, name: str, found: dict[int, set[str]]) -> MoELayer:
        expected = self._setting("num_experts", "num_local_experts", "n_routed_experts")
        num_experts = expected if expected is not None else len(found)
        missing = sorted(set(range(num_experts)) - set(found)) or sorted(set(found) - set(range(num_experts)))
        if missing:
            raise CheckpointError(
                f"{self.directory}: {name} has tensors of {len(found)} experts where {num_experts} are expected "
                f"(expert {missing[0]} is odd); copy or export the checkpoint again"
            )
        projections = _host_names(found[0])
        if projections is None:
            raise CheckpointError(
                f"{self.directory}: {name}.experts.0 has the projections {', '.join(sorted(found[0]))}; expected "
                "gate_proj, up_proj, down_proj, or up_proj and down_proj"
            )
        top_k = self._setting("num_experts_per_tok", "num_experts_per_token")
        if top_k is None:
            raise CheckpointError(f"{self.directory / 'config.json'}: num_experts_per_tok is missing; restore it")
        gated = "w3" in projections
        word = next((self._config[k] for k in ("mlp_hidden_act", "hidden_act") if isinstance(self._config.get(k), str)), "silu")
        algo, group_size = self._quantization.of_experts(name)
        w1 = f"{name}.experts.0.{projections['w1']}.weight"
        rows, columns = self._matrix(w1)
        layer = MoELayer(
            name=name,
            index=int(next(iter(re.findall(r"\.(\d+)\.", f".{name}.")[-1:]), 0)),
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=columns * (2 if algo == "NVFP4" else 1),
            intermediate_size=rows,
            gated=gated,
            activation=_ACTIVATIONS.get((gated, word), word),
            quant_algo=algo,
            group_size=group_size,
            projections=projections,
        )
        self._check(layer)
        return layer

    def _check(self, layer: MoELayer) -> None:
        """Dtype and shape of every expert tensor, from the headers alone."""
        h, i = layer.hidden_size, layer.intermediate_size
        for expert in range(layer.num_experts):
            for host_name, own in layer.projections.items():
                rows, columns = (h, i) if host_name == "w2" else (i, h)
                prefix = f"{layer.name}.experts.{expert}.{own}"
                if layer.quant_algo != "NVFP4":
                    self._expect(f"{prefix}.weight", _PLAIN_DTYPES if layer.quant_algo == "none" else None, [rows, columns])
                    continue
                if layer.group_size == 16:
                    self._expect(f"{prefix}.weight", ("U8",), [rows, columns // 2])
                    self._expect(f"{prefix}.weight_scale", ("F8_E4M3",), [rows, columns // 16])
                for kind in ("weight_scale_2", "input_scale"):
                    self._expect(f"{prefix}.{kind}", ("F32",), [])

    def _expect(self, name: str, dtypes: tuple[str, ...] | None, shape: list[int]) -> None:
        dtype, found = self.header(name)
        if dtypes is None:
            return
        if found == [1] and shape == []:
            found = []
        if dtype not in dtypes or found != shape:
            raise CheckpointError(
                f"{self.file_of(name)}: {name} is {dtype} {found}, expected {' or '.join(dtypes)} {shape}; "
                "export the checkpoint again, or exclude the layer in hf_quant_config.json if it is not quantized"
            )

    def _matrix(self, name: str) -> tuple[int, int]:
        _, shape = self.header(name)
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.file_of(name)}: {name} has shape {shape}, expected a matrix; export the checkpoint again"
            )
        return shape[0], shape[1]

    def _setting(self, *names: str) -> int | None:
        for name in names:
            value = self._config.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None


def _host_names(projections: set[str]) -> dict[str, str] | None:
    """Host's name to the checkpoint's; None where the set is no MLP."""
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        if projections == {gate, up, down}:
            return {"w1": gate, "w3": up, "w2": down}
    if projections == {"up_proj", "down_proj"}:
        return {"w1": "up_proj", "w2": "down_proj"}
    return None


@dataclass(frozen=True)
class _Quantization:
    """``quantization`` of hf_quant_config.json, or ``quantization_config`` of config.json: the same facts, other keys."""

    algo: str | None
    group_size: int | None
    exclude: tuple[str, ...]
    per_layer: Mapping[str, Mapping[str, Any]]

    @classmethod
    def from_files(cls, checkpoint: Checkpoint) -> _Quantization:
        if (checkpoint.directory / "hf_quant_config.json").exists():
            section = checkpoint._json("hf_quant_config.json").get("quantization")
            if not isinstance(section, dict):
                path = checkpoint.directory / "hf_quant_config.json"
                raise CheckpointError(f"{path}: has no quantization section; export the checkpoint again")
            excluded, group_size = section.get("exclude_modules"), section.get("group_size")
        else:
            section = checkpoint._config.get("quantization_config") or {}
            excluded = section.get("ignore")
            groups = (section.get("config_groups") or {}).values()
            group_size = next((group.get("weights", {}).get("group_size") for group in groups), None)
        # nvidia-modelopt 0.47 with transformers 5.23 appends "\0" and a sentinel to names it renames back.
        patterns = tuple(str(pattern).split("\0")[0].rstrip(".") for pattern in excluded or ())
        return cls(section.get("quant_algo"), group_size, patterns, section.get("quantized_layers") or {})

    def of_experts(self, layer: str) -> tuple[str, int | None]:
        """Algorithm (``none`` if not quantized) and group size of the layer's experts."""
        names = (layer, f"{layer}.experts", f"{layer}.experts.0", f"{layer}.experts.0.down_proj")
        if self.algo is None or any(fnmatchcase(name, pattern) for pattern in self.exclude for name in names):
            return "none", None
        if self.algo != "MIXED_PRECISION":
            return self.algo, self.group_size or (16 if self.algo == "NVFP4" else None)
        entries = {
            (entry.get("quant_algo"), entry.get("group_size"))
            for module, entry in self.per_layer.items()
            if module.startswith(f"{layer}.experts")
        }
        if len(entries) != 1:
            return ("MIXED_PRECISION" if entries else "none"), None
        algo, group_size = entries.pop()
        return str(algo), group_size or (16 if algo == "NVFP4" else None)
