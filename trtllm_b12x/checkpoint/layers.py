"""The MoE layers of a checkpoint, and their tensors by the host's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trtllm_b12x import formats

from . import kinds
from .activation import Activation
from .files import CheckpointError, TensorFiles, expect_directory, read_json, typed
from .pattern import moe_layers
from .quantization import Quantization

_EXPERT_TENSOR = re.compile(
    r"(?P<layer>.+)\.experts\.(?P<expert>[0-9]{1,9})\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)\."
    r"(?P<kind>weight|weight_scale|weight_scale_inv|weight_scale_2|input_scale|pre_quant_scale|bias)"
)
"""One tensor per expert: Qwen3-MoE ``model.layers.N.mlp``, Nemotron-H ``backbone.layers.N.mixer``, Mixtral's w1, w2, w3."""

_STACKED_TENSOR = re.compile(
    r"(?P<layer>.+)\.experts\.(?P<projection>gate_up_proj|down_proj)"
    r"(?P<kind>|_weight_scale|_weight_scale_2|_input_scale|_pre_quant_scale|_bias)"
)
"""All experts in one tensor, gate before up: Llama 4 as nvidia-modelopt 0.47 writes it has the inner dimension first."""


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
    activation: Activation
    quant_algo: str
    """The host's name of the algorithm, or ``none``."""
    group_size: int | None
    projections: Mapping[str, str]
    """Host's name (w1 gate or only, w3 up, w2 down) to the checkpoint's (``gate_proj`` ...)."""
    stacked: bool
    """All experts share one tensor per projection."""
    inner_first: bool
    """Stacked with the inner dimension before the rows; else the other way, as transformers keeps newer models."""
    spelled: Mapping[str, str]
    """Kind of tensor to the word in the checkpoint's names, where that is another."""
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
        self._kind = kinds.of(layer.quant_algo)
        self._scalars: dict[str, torch.Tensor] = {}  # everyone asks for them, expert by expert

    def __getitem__(self, key: str) -> torch.Tensor:
        kind = key.rpartition(".")[2]
        if kind not in self._kind.scalars:
            return self._sound(key, kind)
        if key not in self._scalars:
            self._scalars[key] = self._sound(key, kind).clone()
        return self._scalars[key]

    def _sound(self, key: str, kind: str) -> torch.Tensor:
        name, tensor = self._read(key)
        found = self._kind.fault(kind, tensor)
        if found:
            raise CheckpointError(
                f"{self._checkpoint.file_of(name)}: {name} {found}, a scale must be finite and not negative; "
                "calibrate and export the model again"
            )
        return tensor

    def _read(self, key: str) -> tuple[str, torch.Tensor]:
        """Name in the checkpoint and tensor, in the host's orientation: ``(rows, K)``."""
        expert, projection, kind = key.split(".")
        own = self._layer.projections[projection]
        if kind not in self._kind.dtypes or not 0 <= int(expert) < self._layer.num_experts:
            raise KeyError(key)
        if not self._layer.stacked:
            name = _tensor_name(self._layer, int(expert), own, kind)
            return name, self._checkpoint.tensor(name)
        name = _stacked_name(self._layer.name, own, kind)
        if kind in self._kind.scalars:
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
        return (f"{e}.{p}.{kind}" for e in experts for p in projections for kind in self._kind.dtypes)

    def __len__(self) -> int:
        return self._layer.num_experts * len(self._layer.projections) * len(self._kind.dtypes)

    @property
    def nbytes(self) -> int:
        """Bytes of payload and block scales in the checkpoint (or of plain weights)."""
        layer = self._layer
        elements = layer.num_experts * len(layer.projections) * layer.hidden_size * layer.intermediate_size
        return formats.stored_bytes(layer.quant_algo, elements)


def _tensor_name(layer: MoELayer, expert: int, projection: str, kind: str) -> str:
    return f"{layer.name}.experts.{expert}.{projection}.{layer.spelled.get(kind, kind)}"


def _stacked_name(layer: str, projection: str, kind: str) -> str:
    return f"{layer}.experts.{projection}" + ("" if kind == "weight" else f"_{kind}")


class Checkpoint:
    """A checkpoint directory; a context manager that closes its files.

    Raises:
        CheckpointError: the directory, its configuration or a tensor header cannot be used.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        expect_directory(self.directory)
        config = read_json(self.directory / "config.json")
        # Multimodal configurations nest the language model's.
        nested: dict[str, Any] = next(
            (config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), {}
        )
        self._config: dict[str, Any] = {**config, **nested}
        self._quantization = Quantization.from_files(self.directory, self._config)
        self._files = TensorFiles(self.directory)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def file_of(self, name: str) -> Path:
        """
        Raises:
            CheckpointError: there is no such tensor.
        """
        return self._files.file_of(name)

    def tensor(self, name: str, index: int | None = None) -> torch.Tensor:
        """The named tensor on the CPU, backed by the file; only entry ``index`` of its first dimension if given."""
        return self._files.tensor(name, index)

    # ---- layers ------------------------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> list[MoELayer]:
        """Every MoE layer, by index and then by name (multi-token-prediction layers have indices of their own).

        Raises:
            CheckpointError: no layer at all, or one whose tensors are incomplete or contradict the configuration.
        """
        found: dict[str, _Found] = {}
        for name in self._files:
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
        told = (name for name, kind in kinds.every().items() if any(kind.told_by(layer.kinds) for layer in found.values()))
        algorithm = None if self._quantization.said else next(told, None)
        if algorithm is not None:
            raise CheckpointError(
                f"{self.directory / 'hf_quant_config.json'}: missing, though the experts are {algorithm}'s by their tensors; "
                "copy it from the export"
            )
        self._expect_promised(found)
        algorithms = self._quantization.of_experts(found)
        layers = (self._layer(name, tensors, *algorithms[name]) for name, tensors in found.items())
        return sorted(layers, key=lambda layer: (layer.index, layer.name))

    def weights(self, layer: MoELayer) -> LayerWeights:
        return LayerWeights(self, layer)

    def _expect_promised(self, found: Mapping[str, _Found]) -> None:
        """Each layer that the configuration makes an MoE layer has experts."""
        path = self.directory / "config.json"
        promised = moe_layers(path, self._config)
        if promised is None:
            return
        trunks: dict[str, set[int]] = {}  # a multi-token-prediction module counts its layers from 0 again
        for name in found:
            trunks.setdefault(re.sub(r"\.[0-9]+\.", ".", f".{name}."), set()).add(_index(name))
        held = max(trunks.values(), key=len)
        missing = next((index for index in promised if index not in held), None)
        if missing is not None:
            raise CheckpointError(
                f"{path}: promises experts in layer {missing}, but no tensor of them is there; copy or export it again"
            )

    def _layer(self, name: str, found: _Found, algo: str, group_size: int | None) -> MoELayer:
        top_k = self._setting("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
        if top_k is None:
            raise CheckpointError(f"{self.directory / 'config.json'}: num_experts_per_tok is missing; restore it")
        kind = kinds.of(algo)
        packed = kind.columns["weight"]
        projections = _host_names(found.experts.get(0, set()))
        if projections is None:
            raise CheckpointError(
                f"{self.directory}: {name}.experts has the projections {', '.join(sorted(found.experts.get(0, set())))} for "
                "expert 0; expected gate_proj, up_proj, down_proj, or up_proj and down_proj; copy or export the checkpoint again"
            )
        if found.stacked:
            weight = _stacked_name(name, projections["w1"], "weight")
            num_experts, *matrix = self._shape(weight, 3)
            height, width = self._shape(_stacked_name(name, projections["w2"], "weight"), 3)[1:]
            inner_first = matrix != [2 * packed * width, height // packed]  # no sizes fit both ways
            inner, rows = matrix if inner_first else reversed(matrix)
            rows //= 2
        else:
            expected = self._setting("num_experts", "num_local_experts", "n_routed_experts")
            num_experts = expected if expected is not None else len(found.experts)
            if num_experts != len(found.experts) or max(found.experts) != num_experts - 1:
                # The first that is missing, or the first that is too many.
                odd = next((e for e in range(min(num_experts, len(found.experts) + 1)) if e not in found.experts), None)
                odd = min(e for e in found.experts if e >= num_experts) if odd is None else odd
                raise CheckpointError(
                    f"{self.directory}: {name} has tensors of {len(found.experts)} experts where {num_experts} are expected "
                    f"(expert {odd} is odd); copy or export the checkpoint again"
                )
            weight = f"{name}.experts.0.{projections['w1']}.weight"
            rows, inner = self._shape(weight, 2)
            inner_first = False
        if not (num_experts > 0 and rows and inner and 0 < top_k <= num_experts):
            raise CheckpointError(
                f"{self.file_of(weight)}: {weight} leaves {num_experts} experts of {rows} x {inner * packed} with "
                f"top_k {top_k}; copy or export the checkpoint again"
            )
        if algo == "none" and self._files.header(weight)[0] == "U8":
            raise CheckpointError(
                f"{self.file_of(weight)}: {weight} is packed, but {self._quantization.path.name} says that it is not quantized; "
                "restore its list of excluded modules"
            )
        gated = "w3" in projections
        layer = MoELayer(
            name=name,
            index=_index(name),
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=inner * packed,
            intermediate_size=rows,
            gated=gated,
            activation=Activation.of(self.directory / "config.json", self._config, gated),
            quant_algo=algo,
            group_size=group_size,
            projections=projections,
            stacked=found.stacked,
            inner_first=inner_first,
            spelled={ours: other for other, ours in kind.others.items() if other in found.kinds},
            bias="bias" in found.kinds,
            pre_quant_scale="pre_quant_scale" in found.kinds,
            apply_router_weight_on_input=str(self._config.get("model_type", "")).startswith("llama4"),
        )
        self._check(layer)
        return layer

    def _check(self, layer: MoELayer) -> None:
        """Dtype and shape of every expert tensor of a layer in one of our formats, from the headers alone."""
        form = kinds.of(layer.quant_algo)
        if form is kinds.PLAIN or layer.group_size not in (None, form.group_size):
            return
        h, i = layer.hidden_size, layer.intermediate_size
        for host_name, own in layer.projections.items():
            rows, columns = (h, i) if host_name == "w2" else (i, h)
            for kind, dtype in form.dtypes.items():
                shape = [] if kind in form.scalars else [rows, columns // form.columns[kind]]
                if not layer.stacked:
                    for expert in range(layer.num_experts):
                        self._expect(_tensor_name(layer, expert, own, kind), dtype, shape)
                elif host_name != "w3":  # w1's and w3's are one tensor
                    name = _stacked_name(layer.name, own, kind)
                    if shape:
                        stored, inner = rows * (2 if host_name == "w1" else 1), shape[1]
                        shape = [layer.num_experts, *((inner, stored) if layer.inner_first else (stored, inner))]
                        if self._files.header(name)[1] == [layer.num_experts, columns, stored // form.columns[kind]] != shape:
                            raise CheckpointError(
                                f"{self.file_of(name)}: {name} scales blocks of rows, not of what a product sums over, as "
                                "nvidia-modelopt writes stacked experts (Llama 4, gpt-oss) in MXFP8; no kernel can serve them: "
                                "export the experts as NVFP4, or not quantized"
                            )
                    self._expect(name, dtype, shape)

    def _expect(self, name: str, expected_dtype: str, shape: list[int]) -> None:
        dtype, found = self._files.header(name)
        if found == [1] and shape == []:
            found = []
        if (dtype, found) != (expected_dtype, shape):
            raise CheckpointError(
                f"{self.file_of(name)}: {name} is {dtype} {found}, expected {expected_dtype} {shape}; "
                "export the checkpoint again, or exclude the layer in hf_quant_config.json if it is not quantized"
            )

    def _shape(self, name: str, dimensions: int) -> list[int]:
        _, shape = self._files.header(name)
        if len(shape) != dimensions:
            raise CheckpointError(
                f"{self.file_of(name)}: {name} has shape {shape}, expected {dimensions} dimensions; export the checkpoint again"
            )
        return shape

    def _setting(self, *names: str) -> int | None:
        values = (typed(self.directory / "config.json", self._config, name, int) for name in names)
        return next((value for value in values if value is not None), None)


@dataclass
class _Found:
    """What the names alone tell of a layer: projections by expert, kinds of tensors."""

    experts: dict[int, set[str]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    stacked: bool = False


def _index(name: str) -> int:
    """The layer's number in its name."""
    return int(next(iter(re.findall(r"\.([0-9]{1,9})\.", f".{name}.")[-1:]), 0))


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
