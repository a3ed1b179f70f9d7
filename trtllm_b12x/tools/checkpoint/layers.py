# SPDX-License-Identifier: Apache-2.0
"""The MoE layers of a checkpoint, and their tensors by TensorRT-LLM's names."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trtllm_b12x import formats
from trtllm_b12x.formats.geometry import LayerShape

from .activation import activation
from .files import CheckpointError, Section, TensorFiles, read_json
from .quantization import BLOCK_FP8, Quantization
from .storage import UNCALIBRATED, UNQUANTIZED, algorithm, storage_of

_EXPERT_TENSOR = re.compile(
    r"(?P<layer>.+)\.experts\.(?P<expert>[0-9]{1,9})\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)\."
    r"(?P<kind>weight|weight_scale|weight_scale_inv|weight_scale_2|input_scale|pre_quant_scale|bias"
    r"|scale|weight_packed|weight_global_scale|input_global_scale)"
)
"""One tensor per expert: Qwen3-MoE ``model.layers.N.mlp``, Nemotron-H ``backbone.layers.N.mixer``, DeepSeek-V4 ``layers.N.ffn``,
Mixtral's w1, w2, w3. The last three kinds are from compressed-tensors, ``scale`` is from DeepSeek-V4."""

_STACKED_TENSOR = re.compile(
    r"(?P<layer>.+)\.experts\.(?P<projection>gate_up_proj|down_proj)"
    r"(?P<kind>|_weight_scale|_weight_scale_2|_input_scale|_pre_quant_scale|_bias|_blocks|_scales)"
)
"""All experts in one tensor, gate before up. gpt-oss has gate/up interleaved, in MXFP4 as ``_blocks`` and ``_scales``.
nvidia-modelopt 0.47 writes Llama 4 with the inner dimension first."""
_PROJECTIONS = (
    {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
    {"w1": "w1", "w3": "w3", "w2": "w2"},
    {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    {"w1": "up_proj", "w2": "down_proj"},
)
"""TensorRT-LLM's names of the projections to a checkpoint's names, by naming scheme."""

_STACKED_ELSEWHERE = re.compile(r".*_proj_(packed|scale|(input_)?global_scale|zero_point|shape)", re.DOTALL)
"""Tensors in which compressed-tensors stacks all experts."""

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")
"""Keys of config.json. The last three are from Step 3, from Hunyuan and LongCat, and from ERNIE 4.5."""

_NESTED = ("text_config", "llm_config", "thinker_config")
"""Keys of config.json under which multimodal models nest the language model's configuration."""


@dataclass(frozen=True, kw_only=True)
class MoELayer(LayerShape):
    """One MoE layer of a checkpoint: its shape, and how its tensors are stored."""

    name: str
    """Prefix of its tensors, for instance ``model.layers.3.mlp``."""
    index: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    quant_algo: str
    label: str
    """Algorithm that the configuration names. ``quant_algo`` is what is stored."""
    swiglu: tuple[float, float, float] | None
    """alpha, beta and limit of all experts; None without constants, or if TensorRT-LLM's formula is unknown."""
    projections: Mapping[str, str]
    """TensorRT-LLM's name (w1 gate or only, w3 up, w2 down) to the checkpoint's (``gate_proj`` ...)."""
    stacked: bool
    """All experts share one tensor per projection."""
    inner_first: bool
    """Stacked tensors have the inner dimension before the rows. transformers stores newer models with the rows first."""
    by_turns: bool
    """Stacked rows are gate/up interleaved (gpt-oss)."""
    kinds: tuple[str, ...]
    """Tensors that each matrix has: ``weight``, ``weight_scale`` ..., ``bias``."""
    aliases: Mapping[str, str]
    """Last part of a tensor's name to the alias that this checkpoint uses."""

    @property
    def gated(self) -> bool:
        return "w3" in self.projections

    @property
    def shape(self) -> LayerShape:
        return LayerShape(**{each.name: getattr(self, each.name) for each in fields(LayerShape)})

    def tensor_name(self, expert: int, projection: str, kind: str) -> str:
        """Return the checkpoint's name of a tensor. ``projection``: TensorRT-LLM's name; ``kind``: ``weight_scale`` ..."""
        prefix, kind = f"{self.name}.experts.", self.aliases.get(kind, kind)
        if not self.stacked:
            return f"{prefix}{expert}.{self.projections[projection]}.{kind}"
        return prefix + self.projections[projection] + ("" if kind == "weight" else f"_{kind}")


class LayerWeights(Mapping[str, torch.Tensor]):
    """The tensors of one layer by TensorRT-LLM's names, ``"{expert}.w1.weight_scale"``.

    Access reads a tensor, and raises CheckpointError if a scale is not finite or is negative.
    """

    def __init__(self, checkpoint: Checkpoint, layer: MoELayer) -> None:
        self._checkpoint, self._layer = checkpoint, layer
        self._storage = storage_of(layer.quant_algo)

    def __getitem__(self, key: str) -> torch.Tensor:
        name, tensor = self._read(key)
        kind = key.rpartition(".")[2]
        if fault := self._storage.fault(kind, tensor):
            problem = f"{name} {fault}, a scale must be finite and not negative"
            raise CheckpointError(self._checkpoint.file_of(name), problem, "calibrate and export the model again")
        return tensor

    def _read(self, key: str) -> tuple[str, torch.Tensor]:
        """Return the checkpoint's name of a tensor, and the tensor in TensorRT-LLM's orientation, ``(rows, K)``."""
        number, projection, kind = key.split(".")
        layer, expert = self._layer, int(number)
        if kind not in layer.kinds or not 0 <= expert < layer.num_experts:
            raise KeyError(key)
        name = layer.tensor_name(expert, projection, kind)
        if kind == "input_scale" and not layer.stacked and self._checkpoint.uncalibrated(layer, expert, projection):
            return name, torch.zeros(())
        if not layer.stacked or kind in self._storage.scalars:
            tensor = self._checkpoint.tensor(name)
            if layer.aliases.get(kind) in self._storage.reciprocals:
                tensor = torch.where(tensor > 0, 1 / tensor.float(), 0.0)  # TensorRT-LLM reads 0 as never calibrated
            return name, _as_bytes(tensor)
        matrix = self._checkpoint.tensor(name, expert)
        if matrix.dim() == 3:  # blocks of codes
            matrix = matrix.flatten(1)
        if layer.inner_first and matrix.dim() == 2:
            matrix = matrix.T
        if projection != "w2":
            gate, up = (matrix[0::2], matrix[1::2]) if layer.by_turns else matrix.split(layer.intermediate_size)
            matrix = gate if projection == "w1" else up
        return name, _as_bytes(matrix.contiguous())

    def __iter__(self) -> Iterator[str]:
        experts, projections = range(self._layer.num_experts), self._layer.projections
        return (f"{e}.{p}.{kind}" for e in experts for p in projections for kind in self._layer.kinds)

    def __len__(self) -> int:
        return self._layer.num_experts * len(self._layer.projections) * len(self._layer.kinds)

    @property
    def nbytes(self) -> int:
        """Bytes of payload and block scales in the checkpoint, or of plain weights."""
        layer = self._layer
        elements = layer.num_experts * len(layer.projections) * layer.hidden_size * layer.intermediate_size
        return formats.stored_bytes(layer.quant_algo, elements)


class Checkpoint:
    """A checkpoint directory. Raises CheckpointError if the directory, its configuration or a tensor header cannot be used."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not os.path.isdir(directory):  # also if the path is too long or holds a NUL
            remedy = "give the folder that holds config.json"
            if not os.path.isfile(directory) and re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", str(directory)):
                remedy = f"for a Hugging Face name, give the folder that this prints: hf download {directory}"
            problem = "is a file, not a folder" if os.path.isfile(directory) else "no such directory, or no permission to see it"
            raise CheckpointError(str(directory)[:300], problem, remedy)
        config = read_json(self.directory / "config.json")
        nested: dict[str, Any] = config
        while nested := next((nested[key] for key in _NESTED if isinstance(nested.get(key), dict)), {}):
            config = Section(config.path, {**config, **nested})
        self._config = config
        self._quantization = Quantization.from_files(self.directory, self._config)
        self._files = TensorFiles(self.directory)
        self.file_of, self.tensor = self._files.file_of, self._files.tensor

    def weights(self, layer: MoELayer) -> LayerWeights:
        return LayerWeights(self, layer)

    def unequal_scales(self, layer: MoELayer) -> bool:
        """Return whether gate and up of some expert differ in ``weight_scale_2``. Read two scalars per expert."""
        weights, kind = self.weights(layer), "weight_scale_2"
        if not layer.gated or kind not in layer.kinds:
            return False
        pairs = ((weights[f"{e}.w1.{kind}"], weights[f"{e}.w3.{kind}"]) for e in range(layer.num_experts))
        return any(not torch.equal(gate, up) for gate, up in pairs)

    def uncalibrated(self, layer: MoELayer, expert: int, projection: str) -> bool:
        """Return whether the input scale of FC1 or FC2 is missing. TensorRT-LLM 1.3 and later reads gate and up together."""
        together = ["w2"] if projection == "w2" else [name for name in layer.projections if name != "w2"]
        return any(layer.tensor_name(expert, name, "input_scale") not in self._files for name in together)

    @property
    def remarks(self) -> list[str]:
        """Warnings about engines that do not load this checkpoint, or that read it differently."""
        names = {name.rpartition(".")[0] for name in self._files}
        found = self._quantization.remarks(names, str(self._config.get("model_type", "")))
        for algo, first in {layer.quant_algo: layer for layer in self.layers[::-1] if layer.quant_algo != layer.label}.items():
            if (fate := storage_of(algo).mislabeled) and self._header(first.tensor_name(0, "w1", "weight"))[0] == "U8":
                form = next(row.name for row in formats.FORMATS if row.quant_algo == algo)
                found.append(
                    f"{self._quantization.path.name}: names {first.label}, but experts such as {first.name}'s are {form}: {fate}"
                )
        lacking = [
            f"expert {expert} of {layer.name}"
            for layer in self.layers
            if storage_of(layer.quant_algo) is not UNQUANTIZED and "input_scale" in layer.kinds and not layer.stacked
            for expert in range(layer.num_experts)
            if any(self.uncalibrated(layer, expert, projection) for projection in layer.projections)
        ]
        if lacking:
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            found.append(f"no input_scale: {lacking[0]}{more}. {UNCALIBRATED}")
        return found

    @cached_property
    def layers(self) -> list[MoELayer]:
        """Every MoE layer, by index and then by name (multi-token-prediction layers have indices of their own).

        Raise CheckpointError without a MoE layer, or if a layer's tensors are incomplete or contradict the configuration.
        """
        names: dict[str, _TensorNames] = {}
        for name in self._files:
            match = _EXPERT_TENSOR.fullmatch(name) or _STACKED_TENSOR.fullmatch(name)
            if match:
                groups = match.groupdict()
                layer = names.setdefault(groups["layer"], _TensorNames())
                layer.kinds.add(groups["kind"].removeprefix("_") or "weight")
                layer.stacked |= "expert" not in groups
                layer.modules.add(name.rpartition(".")[0])
                layer.experts.setdefault(int(groups.get("expert", 0)), set()).add(groups["projection"])
        if not names:
            problem = "no MoE layers (no tensors named *.experts.N.*_proj.weight or *.experts.gate_up_proj)"
            remedy = "give a mixture-of-experts checkpoint"
            if other := next((name for name in self._files if ".experts." in name), None):
                problem = f"its experts have names that verify does not know, such as {other}"
                remedy = "export one tensor for each projection of an expert, such as experts.0.gate_proj.weight"
            if other and _STACKED_ELSEWHERE.fullmatch(other):
                problem = f"its experts are stacked in compressed-tensors ({other}), which verify and TensorRT-LLM do not read"
                if any(name.endswith("_input_global_scale") for name in self._files):
                    problem += "; vLLM 0.33 raises AttributeError at their input_global_scale"
            raise CheckpointError(self.directory, problem, remedy)
        layers = (
            self._layer(name, tensors, *self._quantization.of_experts(name, tensors.modules)) for name, tensors in names.items()
        )
        return sorted(layers, key=lambda layer: (layer.index, layer.name))

    def _layer(self, name: str, names: _TensorNames, algo: str, group_size: int | None) -> MoELayer:
        top_k = self._config.typed(int, *_TOP_K)
        if top_k is None:
            problem = f"the number of experts per token is under none of {', '.join(_TOP_K)}"
            raise CheckpointError(self._config.path, problem, "add num_experts_per_tok")
        spelled = names.experts.get(0, set())
        projections = next((known for known in _PROJECTIONS if set(known.values()) == spelled), None)
        if projections is None:
            problem = f"expert 0 of {name} has the projections {', '.join(sorted(spelled)) or 'none'}"
            raise CheckpointError(
                self.directory, f"{problem}, expected gate_proj, up_proj and down_proj, or up_proj and down_proj"
            )
        prefix = f"{name}.experts."
        fp4_codes = next((kind for kind in ("blocks", "weight_packed") if kind in names.kinds), "")
        if names.stacked:
            weight, down = (prefix + projections[half] + f"_{fp4_codes}" * bool(fp4_codes) for half in ("w1", "w2"))
        else:
            weight = f"{prefix}0.{projections['w1']}.{fp4_codes or 'weight'}"
        label = algo
        # DeepSeek-V4 stores I8, and TensorRT-LLM checks the same header. MiMo-V2 and Ling store U8.
        if algo == BLOCK_FP8 and (self._header(weight)[0] == "I8" or self._quantization.experts == "mxfp4"):
            algo, group_size = (algorithm("MXFP4"), formats.group_size("MXFP4"))
        if not names.kinds.intersection(("input_scale", "input_global_scale")):
            algo = storage_of(algo).weight_only or algo
        storage = storage_of(algo)
        packed = storage.elements["weight"]
        if names.stacked:
            num_experts, *matrix = self._shape(weight, 3)
            height, width = self._shape(down, 3)[1:]
            inner_first = matrix != [2 * packed * width, height // packed]  # no sizes fit both orientations
            inner, rows = matrix if inner_first else reversed(matrix)
            rows //= 2
        else:
            num_experts, last = len(names.experts), max(names.experts)
            expected = self._config.typed(int, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
            expected = last + 1 if expected is None else expected
            if (num_experts, last) != (expected, expected - 1):
                problem = f"{name} has tensors of {num_experts} experts, numbered up to {last}, expected {expected}"
                raise CheckpointError(self.directory, problem)
            rows, inner = self._shape(weight, 2)
            inner_first = False
        file = self.file_of(weight)
        if not (num_experts > 0 and rows and inner and 0 < top_k <= num_experts):
            sizes = f"{num_experts} experts of {rows} x {inner * packed} with top_k {top_k}"
            raise CheckpointError(file, f"{weight} gives {sizes}")
        if algo == "none" and self._header(weight)[0] == "U8":
            problem = f"{weight} is packed, but {self._quantization.path.name} does not say how it is quantized"
            remedy = "copy hf_quant_config.json from the export, or restore its list of excluded modules"
            raise CheckpointError(file, problem, remedy)
        kinds = {storage.aliases.get(kind, kind) for kind in names.kinds}
        activation_name, constants, swiglu = activation(self._config, "w3" in projections, _index(name))
        layer = MoELayer(
            name=name,
            index=_index(name),
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=inner * packed,
            intermediate_size=rows,
            activation=activation_name,
            activation_constants=constants,
            swiglu=swiglu,
            dtype="bfloat16",
            quant_algo=algo,
            label=label,
            group_size=group_size,
            projections=projections,
            stacked=names.stacked,
            inner_first=inner_first,
            by_turns=names.stacked and self._config.get("model_type") == "gpt_oss",
            kinds=tuple(kind for kind in (*storage.dtypes, "bias") if kind in kinds or kind not in (*storage.optional, "bias")),
            aliases={ours: other for other, ours in storage.aliases.items() if other in names.kinds},
            bias="bias" in names.kinds,
            pre_quant_scale="pre_quant_scale" in names.kinds,
            apply_router_weight_on_input=str(self._config.get("model_type", "")).startswith("llama4"),
        )
        self._check(layer)
        return layer

    def _check(self, layer: MoELayer) -> None:
        """Check dtype and shape of every expert tensor by its header, if the layer has a format that we serve."""
        storage = storage_of(layer.quant_algo)
        if storage is UNQUANTIZED or layer.group_size not in (None, formats.group_size(layer.quant_algo)):
            return
        h, i = layer.hidden_size, layer.intermediate_size
        for projection in layer.projections:
            rows, columns = (h, i) if projection == "w2" else (i, h)
            for kind, dtypes in storage.dtypes.items():
                if kind not in layer.kinds:
                    continue
                shape = [] if kind in storage.scalars else [rows, columns // storage.elements[kind]]
                if not layer.stacked:
                    for expert in range(layer.num_experts):
                        name = layer.tensor_name(expert, projection, kind)
                        if kind != "input_scale" or name in self._files:
                            self._expect(name, dtypes, shape)
                elif projection != "w3":  # w1 and w3 share a tensor
                    name = layer.tensor_name(0, projection, kind)
                    if shape:
                        height, inner = rows * (2 if projection == "w1" else 1), shape[1]
                        shape = [layer.num_experts, *((inner, height) if layer.inner_first else (height, inner))]
                        if self._header(name)[1] == [layer.num_experts, columns, height // storage.elements[kind]] != shape:
                            raise CheckpointError(
                                self.file_of(name),
                                f"{name} scales blocks along the rows, as nvidia-modelopt writes stacked experts in MXFP8 "
                                "(Llama 4, gpt-oss). Products need blocks along the inner dimension",
                                "export the experts as NVFP4, or not quantized",
                            )
                    self._expect(name, dtypes, shape)

    def _expect(self, name: str, dtypes: tuple[str, ...], expected: list[int]) -> None:
        dtype, shape = self._header(name)
        if shape == [1] and expected == []:
            shape = []
        if dtype not in dtypes or shape != expected:
            raise CheckpointError(
                self.file_of(name),
                f"{name} is {dtype} {shape}, expected {' or '.join(dtypes)} {expected}",
                "export the checkpoint again, or exclude the layer in hf_quant_config.json if it is not quantized",
            )

    def _header(self, name: str) -> tuple[str, list[int]]:
        """Return dtype and shape. Blocks of gpt-oss ``(E, rows, K / 32, 16)`` are returned as ``(E, rows, K / 2)``."""
        dtype, shape = self._files.header(name)
        return dtype, [*shape[:2], math.prod(shape[2:])] if len(shape) == 4 else shape

    def _shape(self, name: str, dimensions: int) -> list[int]:
        _, shape = self._header(name)
        if len(shape) != dimensions:
            raise CheckpointError(self.file_of(name), f"{name} has shape {shape}, expected {dimensions} dimensions")
        return shape


@dataclass
class _TensorNames:
    """Facts that the tensor names of one layer show."""

    experts: dict[int, set[str]] = field(default_factory=dict)
    """Projections by expert."""
    kinds: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    stacked: bool = False


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View codes and E8M0 scales, which producers store in several dtypes, as uint8."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.int8, torch.float8_e8m0fnu) else tensor


def _index(name: str) -> int:
    return int(next(iter(re.findall(r"\.([0-9]{1,9})\.", f".{name}.")[-1:]), 0))
