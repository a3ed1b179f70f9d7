"""ModelOpt NVFP4 checkpoints: which MoE layers they hold, and their tensors one at a time.

A checkpoint is a directory as ``modelopt.torch.export.export_hf_checkpoint`` writes it: ``config.json``, ``hf_quant_config.json``
(or ``quantization_config`` inside ``config.json``) and safetensors, in one file or in shards with an index.  Only headers
are read until a tensor is asked for; tensors are memory-mapped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
    r"(?P<kind>weight|weight_scale|weight_scale_2|input_scale|pre_quant_scale|bias)"
)
"""One tensor per expert: Qwen3-MoE ``model.layers.N.mlp``, Nemotron-H ``backbone.layers.N.mixer``, Mixtral's w1, w2, w3."""

_STACKED_TENSOR = re.compile(
    r"(?P<layer>.+)\.experts\.(?P<projection>gate_up_proj|down_proj)"
    r"(?P<kind>|_weight_scale|_weight_scale_2|_input_scale|_pre_quant_scale|_bias)"
)
"""All experts in one tensor, the inner dimension first and gate before up: Llama 4 as nvidia-modelopt 0.47 writes it."""

_ACTIVATIONS = {(True, "silu"): "Swiglu", (False, "relu2"): "Relu2"}
"""(has a gate, ``hidden_act``) to the host's ``ActivationType`` name."""

_SWIGLU_CONSTANTS = ("swiglu_limit", "swiglu_limits", "swiglu_alpha", "swiglu_beta")
"""Keys of config.json that change SwiGLU (gpt-oss, DeepSeek-V4)."""

_NVFP4_DTYPES = {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"}


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
    stacked: bool
    """All experts share one tensor per projection."""
    inner_first: bool
    """Stacked with the inner dimension before the rows; else the other way, as transformers keeps newer models."""
    activation_constants: bool
    """The configuration has SwiGLU limits or factors."""
    bias: bool
    pre_quant_scale: bool
    """AWQ."""
    apply_router_weight_on_input: bool


class LayerWeights(Mapping[str, torch.Tensor]):
    """The tensors of one layer by the host's names, ``"{expert}.w1.weight_scale"``; each is read when asked for.

    Raises:
        CheckpointError: on reading, where a scale is no scale: not finite, or negative.
    """

    def __init__(self, checkpoint: Checkpoint, layer: MoELayer) -> None:
        self._checkpoint, self._layer = checkpoint, layer
        self._kinds = tuple(_NVFP4_DTYPES) if layer.quant_algo == "NVFP4" else ("weight",)

    def __getitem__(self, key: str) -> torch.Tensor:
        name, tensor = self._read(key)
        kind = key.rpartition(".")[2]
        if kind == "weight_scale":
            # 0x7F is E4M3's NaN; the kernels read the scale without its sign.
            bad = bool((tensor.view(torch.uint8) >= 0x7F).any())
            found = "holds NaN or a negative value"
        else:
            bad = kind in ("weight_scale_2", "input_scale") and not bool(tensor.isfinite().all() & (tensor >= 0).all())
            found = f"is {tensor.flatten()[0].item()}" if bad else ""
        if bad:
            raise CheckpointError(
                f"{self._checkpoint.file_of(name)}: {name} {found}, a scale must be finite and not negative; "
                "calibrate and export the model again"
            )
        return tensor

    def _read(self, key: str) -> tuple[str, torch.Tensor]:
        """Name in the checkpoint and tensor, in the host's orientation: ``(rows, K)``."""
        expert, projection, kind = key.split(".")
        own = self._layer.projections[projection]
        if kind not in self._kinds or not 0 <= int(expert) < self._layer.num_experts:
            raise KeyError(key)
        if not self._layer.stacked:
            name = f"{self._layer.name}.experts.{expert}.{own}.{kind}"
            return name, self._checkpoint.tensor(name)
        name = _stacked_name(self._layer.name, own, kind)
        if kind in ("weight_scale_2", "input_scale"):
            return name, self._checkpoint.tensor(name)
        matrix = self._checkpoint.tensor(name, int(expert))
        if self._layer.inner_first:
            matrix = matrix.T
        if projection != "w2":
            half = self._layer.intermediate_size
            matrix = matrix[:half] if projection == "w1" else matrix[half:]
        return name, matrix.contiguous()

    def __iter__(self) -> Iterator[str]:
        experts, projections = range(self._layer.num_experts), self._layer.projections
        return (f"{e}.{p}.{kind}" for e in experts for p in projections for kind in self._kinds)

    def __len__(self) -> int:
        return self._layer.num_experts * len(self._layer.projections) * len(self._kinds)

    @property
    def nbytes(self) -> int:
        """Bytes of FP4 payload and block scales in the checkpoint (or of plain weights)."""
        layer = self._layer
        elements = layer.num_experts * len(layer.projections) * layer.hidden_size * layer.intermediate_size
        return elements * 9 // 16 if layer.quant_algo == "NVFP4" else elements * 2


def _stacked_name(layer: str, projection: str, kind: str) -> str:
    return f"{layer}.experts.{projection}" + ("" if kind == "weight" else f"_{kind}")


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

    def tensor(self, name: str, index: int | None = None) -> torch.Tensor:
        """The named tensor on the CPU, backed by the file; only entry ``index`` of its first dimension if given."""
        path = self.file_of(name)
        try:
            file = self._open(path.name)
            return file.get_tensor(name) if index is None else file.get_slice(name)[index]
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
            if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
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
        """Every MoE layer, by index and then by name (multi-token-prediction layers have indices of their own).

        Raises:
            CheckpointError: no layer at all, or one whose tensors are incomplete or contradict the configuration.
        """
        found: dict[str, _Found] = {}
        for name in self._file_of_tensor:
            match = _EXPERT_TENSOR.fullmatch(name) or _STACKED_TENSOR.fullmatch(name)
            if match:
                groups = match.groupdict()
                layer = found.setdefault(groups["layer"], _Found())
                layer.kinds.add(groups["kind"].removeprefix("_"))
                layer.stacked |= "expert" not in groups
                layer.experts.setdefault(int(groups.get("expert", 0)), set()).add(groups["projection"])
        if not found:
            raise CheckpointError(
                f"{self.directory}: no MoE layers (no tensors named *.experts.N.*_proj.weight or *.experts.gate_up_proj); "
                "verify takes mixture-of-experts checkpoints"
            )
        layers = (self._layer(name, tensors) for name, tensors in found.items())
        return sorted(layers, key=lambda layer: (layer.index, layer.name))

    def weights(self, layer: MoELayer) -> LayerWeights:
        return LayerWeights(self, layer)

    def _layer(self, name: str, found: _Found) -> MoELayer:
        top_k = self._setting("num_experts_per_tok", "num_experts_per_token")
        if top_k is None:
            raise CheckpointError(f"{self.directory / 'config.json'}: num_experts_per_tok is missing; restore it")
        algo, group_size = self._quantization.of_experts(name)
        packed = 2 if algo == "NVFP4" else 1
        projections = _host_names(found.experts.get(0, set()))
        if projections is None:
            raise CheckpointError(
                f"{self.directory}: {name}.experts has the projections {', '.join(sorted(found.experts.get(0, set())))} for "
                "expert 0; expected gate_proj, up_proj, down_proj, or up_proj and down_proj; copy or export the checkpoint again"
            )
        if found.stacked:
            weight = _stacked_name(name, projections["w1"], "weight")
            num_experts, *matrix = self._shape(weight, 3)
            inner_first = algo == "NVFP4" or matrix[0] == self._setting("hidden_size")
            inner, rows = matrix if inner_first else reversed(matrix)
            rows //= 2
        else:
            expected = self._setting("num_experts", "num_local_experts", "n_routed_experts")
            num_experts = expected if expected is not None else len(found.experts)
            odd = sorted(set(range(num_experts)) ^ set(found.experts))
            if odd:
                raise CheckpointError(
                    f"{self.directory}: {name} has tensors of {len(found.experts)} experts where {num_experts} are expected "
                    f"(expert {odd[0]} is odd); copy or export the checkpoint again"
                )
            weight = f"{name}.experts.0.{projections['w1']}.weight"
            rows, inner = self._shape(weight, 2)
            inner_first = False
        if not (num_experts > 0 and rows and inner and 0 < top_k <= num_experts):
            raise CheckpointError(
                f"{self.file_of(weight)}: {weight} leaves {num_experts} experts of {rows} x {inner * packed} with "
                f"top_k {top_k}; copy or export the checkpoint again"
            )
        gated = "w3" in projections
        words = (self._config.get(key) for key in ("mlp_hidden_act", "hidden_act", "hidden_activation"))
        word = next((word for word in words if isinstance(word, str)), "silu")
        layer = MoELayer(
            name=name,
            index=int(next(iter(re.findall(r"\.(\d+)\.", f".{name}.")[-1:]), 0)),
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=inner * packed,
            intermediate_size=rows,
            gated=gated,
            activation=_ACTIVATIONS.get((gated, word), word),
            quant_algo=algo,
            group_size=group_size,
            projections=projections,
            stacked=found.stacked,
            inner_first=inner_first,
            activation_constants=any(self._config.get(key) is not None for key in _SWIGLU_CONSTANTS),
            bias="bias" in found.kinds,
            pre_quant_scale="pre_quant_scale" in found.kinds,
            apply_router_weight_on_input=str(self._config.get("model_type", "")).startswith("llama4"),
        )
        self._check(layer)
        return layer

    def _check(self, layer: MoELayer) -> None:
        """Dtype and shape of every expert tensor of an NVFP4 layer, from the headers alone."""
        if layer.quant_algo != "NVFP4" or layer.group_size not in (None, 16):
            return
        h, i = layer.hidden_size, layer.intermediate_size
        for host_name, own in layer.projections.items():
            rows, columns = (h, i) if host_name == "w2" else (i, h)
            shapes = {
                "weight": [rows, columns // 2],
                "weight_scale": [rows, columns // 16],
                "weight_scale_2": [],
                "input_scale": [],
            }
            for kind, shape in shapes.items():
                if not layer.stacked:
                    for expert in range(layer.num_experts):
                        self._expect(f"{layer.name}.experts.{expert}.{own}.{kind}", _NVFP4_DTYPES[kind], shape)
                elif host_name != "w3":  # w1's and w3's are one tensor
                    if shape:
                        shape = [layer.num_experts, shape[1], shape[0] * (2 if host_name == "w1" else 1)]
                    self._expect(_stacked_name(layer.name, own, kind), _NVFP4_DTYPES[kind], shape)

    def _expect(self, name: str, expected_dtype: str, shape: list[int]) -> None:
        dtype, found = self.header(name)
        if found == [1] and shape == []:
            found = []
        if (dtype, found) != (expected_dtype, shape):
            raise CheckpointError(
                f"{self.file_of(name)}: {name} is {dtype} {found}, expected {expected_dtype} {shape}; "
                "export the checkpoint again, or exclude the layer in hf_quant_config.json if it is not quantized"
            )

    def _shape(self, name: str, dimensions: int) -> list[int]:
        _, shape = self.header(name)
        if len(shape) != dimensions:
            raise CheckpointError(
                f"{self.file_of(name)}: {name} has shape {shape}, expected {dimensions} dimensions; export the checkpoint again"
            )
        return shape

    def _setting(self, *names: str) -> int | None:
        values = (_typed(self.directory / "config.json", self._config, name, int) for name in names)
        return next((value for value in values if value is not None), None)


@dataclass
class _Found:
    """What the names alone tell of a layer: projections by expert, kinds of tensors."""

    experts: dict[int, set[str]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    stacked: bool = False


def _matches(name: str, pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return fnmatchcase(name, pattern)
    try:
        return re.fullmatch(pattern[3:], name) is not None
    except re.error:
        return False


def _typed(path: Path, section: Mapping[str, Any], key: str, kind: type) -> Any:
    """``section[key]``, which must be of this kind if it is there; None if it is not."""
    value = section.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise CheckpointError(
            f"{path}: {key} is {json.dumps(value)[:80]}, not {_KINDS[kind]}; copy or export the checkpoint again"
        )
    return value


_KINDS = {int: "a number", str: "a string", list: "a list", dict: "an object"}


def _host_names(projections: set[str]) -> dict[str, str] | None:
    """Host's name to the checkpoint's; None where the set is no MLP."""
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        if projections == {gate, up, down}:
            return {"w1": gate, "w3": up, "w2": down}
    if projections == {"gate_up_proj", "down_proj"}:
        return {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
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
        path = checkpoint.directory / "hf_quant_config.json"
        if path.exists():
            section = _typed(path, checkpoint._json(path.name), "quantization", dict)
            if section is None:
                raise CheckpointError(f"{path}: has no quantization section; export the checkpoint again")
            excluded, group_size = _typed(path, section, "exclude_modules", list), _typed(path, section, "group_size", int)
        else:
            path = checkpoint.directory / "config.json"
            section = _typed(path, checkpoint._config, "quantization_config", dict) or {}
            excluded = _typed(path, section, "ignore", list)
            groups = (_typed(path, section, "config_groups", dict) or {}).values()
            weights = [_typed(path, group, "weights", dict) or {} for group in groups if isinstance(group, dict)]
            group_size = next((_typed(path, entry, "group_size", int) for entry in weights), None)
        # nvidia-modelopt 0.47 with transformers 5.23 appends "\0" and a sentinel to names it renames back.
        patterns = tuple(str(pattern).split("\0")[0].rstrip(".") for pattern in excluded or ())
        layers = _typed(path, section, "quantized_layers", dict) or {}
        per_layer = {}
        for name in layers:
            entry = _typed(path, layers, name, dict) or {}
            per_layer[name] = {key: _typed(path, entry, key, kind) for key, kind in (("quant_algo", str), ("group_size", int))}
        return cls(_typed(path, section, "quant_algo", str), group_size, patterns, per_layer)

    def of_experts(self, layer: str) -> tuple[str, int | None]:
        """Algorithm (``none`` if not quantized) and group size of the layer's experts."""
        # As the host does: a pattern may name the projection or any module around it, as a wildcard or after "re:".
        parts = f"{layer}.experts.0.down_proj".split(".")
        names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        if self.algo is None or any(_matches(name, pattern) for pattern in self.exclude for name in names):
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
