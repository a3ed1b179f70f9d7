"""How a checkpoint says that it is quantized, and what the forms are that are not nvidia-modelopt's, or not ours."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import kinds
from .files import CheckpointError, read_json, typed

OTHER_ALGORITHMS = {
    "none": "not quantized",
    "W4A16_NVFP4": "W4A16_NVFP4: NVFP4 weights for activations in bf16, without the input scales that CUTLASS and b12x need",
    "NVFP4_AWQ": "NVFP4_AWQ: NVFP4 behind AWQ's pre-quantization scales, which CUTLASS serves",
    "W4A16_AWQ": "W4A16_AWQ: 4-bit integers with AWQ scales, which CUTLASS and vLLM serve",
    "W4A8_AWQ": "W4A8_AWQ: 4-bit integers with AWQ scales and FP8 activations, which CUTLASS serves",
    "FP8": "FP8 with one scale per tensor, which CUTLASS serves",
    "FP8_PB_WO": "FP8 with a scale per 128 x 128 block, which TensorRT-LLM serves",
    "FP8_BLOCK_SCALES": "FP8 with a scale per 128 x 128 block, which TensorRT-LLM serves",
    "MXFP4": "MXFP4 (blocks of 32, no second scale), which TensorRT-LLM serves",
}
"""``quant_algo`` of nvidia-modelopt to what it is and who serves it."""

_REGEX_SECONDS = 10.0

# A process of its own: the interpreter's regular expressions cannot be stopped, and a short one can run for years.
_MATCH = """
import json, re, sys
patterns, names = json.load(sys.stdin)
def matches(pattern, name):
    try:
        return re.fullmatch(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return False
json.dump([[matches(pattern, name) for name in names] for pattern in patterns], sys.stdout)
"""


@dataclass(frozen=True)
class Quantization:
    """``quantization`` of hf_quant_config.json, or ``quantization_config`` of config.json: the same facts, other keys."""

    path: Path
    """Which file says so."""
    said: bool
    """False: no file says anything about quantization."""
    algo: str | None
    group_size: int | None
    exclude: tuple[str, ...]
    per_layer: Mapping[str, Mapping[str, Any]]

    @classmethod
    def from_files(cls, directory: Path, config: Mapping[str, Any]) -> Quantization:
        """
        Raises:
            CheckpointError: a key has the wrong type, or the form is not nvidia-modelopt's; the message names it.
        """
        path = directory / "hf_quant_config.json"
        if path.exists():
            section = typed(path, read_json(path), "quantization", dict)
            if section is None:
                raise CheckpointError(f"{path}: has no quantization section; export the checkpoint again")
            excluded, group_size = typed(path, section, "exclude_modules", list), typed(path, section, "group_size", int)
            said = True
        else:
            path = directory / "config.json"
            section = typed(path, config, "quantization_config", dict)
            said, section = section is not None, section or {}
            method = typed(path, section, "quant_method", str)
            meant = next((kind for kind in kinds.every().values() if method in kind.settings), None)
            if meant is not None:  # TensorRT-LLM reads this too (model_config.py, load_hf_quant_config)
                section = {**meant.settings[str(method)], **section}
                blocks = section.get("weight_block_size", [1, meant.group_size])
                if blocks != [1, meant.group_size]:
                    raise CheckpointError(
                        f"{path}: weight_block_size is {str(blocks)[:40]}; TensorRT-LLM takes {method} with a scale for each 1 x "
                        f"{meant.group_size}: quantize the model again"
                    )
            elif method is not None and "quant_algo" not in section:
                raise CheckpointError(f"{path}: {_foreign(path, method, section)}")
            excluded = [
                *(typed(path, section, "ignore", list) or ()),
                *(typed(path, section, "modules_to_not_convert", list) or ()),
                *(typed(path, section, "ignored_layers", list) or ()),
            ]
            groups = (typed(path, section, "config_groups", dict) or {}).values()
            weights = [typed(path, group, "weights", dict) or {} for group in groups if isinstance(group, dict)]
            group_size = next((typed(path, entry, "group_size", int) for entry in weights), None)
        # nvidia-modelopt 0.47 with transformers 5.23 appends "\0" and a sentinel to names it renames back.
        patterns = tuple(str(pattern).split("\0")[0].rstrip(".") for pattern in excluded or ())
        layers = typed(path, section, "quantized_layers", dict) or {}
        per_layer = {}
        for name in layers:
            entry = typed(path, layers, name, dict) or {}
            per_layer[name] = {key: typed(path, entry, key, kind) for key, kind in (("quant_algo", str), ("group_size", int))}
        return cls(path, said, typed(path, section, "quant_algo", str), group_size, patterns, per_layer)

    def of_experts(self, layers: Iterable[str]) -> dict[str, tuple[str, int | None]]:
        """Algorithm (``none`` if not quantized) and group size of the experts of each of ``layers``.

        Raises:
            CheckpointError: a pattern takes longer than 10 s to match.
        """
        layers = list(layers)
        excluded = self._excluded(layers)
        return {layer: ("none", None) if layer in excluded else self._algorithm(layer) for layer in layers}

    def _algorithm(self, layer: str) -> tuple[str, int | None]:
        if self.algo is None:
            return "none", None
        if self.algo != "MIXED_PRECISION":
            return self.algo, self.group_size or kinds.of(self.algo).group_size
        entries = {
            (entry.get("quant_algo"), entry.get("group_size"))
            for module, entry in self.per_layer.items()
            if module.startswith(f"{layer}.experts")
        }
        if len(entries) != 1:
            return ("MIXED_PRECISION" if entries else "none"), None
        algo, group_size = entries.pop()
        return str(algo), group_size or kinds.of(str(algo)).group_size

    def _excluded(self, layers: list[str]) -> set[str]:
        """As the host does: a pattern may name the projection or any module around it, as a wildcard or after "re:"."""
        parts = {layer: f"{layer}.experts.0.down_proj".split(".") for layer in layers}
        around = {layer: [".".join(p[:count]) for count in range(1, len(p) + 1)] for layer, p in parts.items()}
        regular = [pattern[3:] for pattern in self.exclude if pattern.startswith("re:")]
        wildcards = [pattern for pattern in self.exclude if not pattern.startswith("re:")]
        hit = {name for names in around.values() for name in names if any(fnmatchcase(name, p) for p in wildcards)}
        if regular:
            hit |= self._matched(regular, sorted({name for names in around.values() for name in names}))
        return {layer for layer, names in around.items() if not hit.isdisjoint(names)}

    def _matched(self, patterns: list[str], names: list[str]) -> set[str]:
        try:
            result = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _MATCH],
                input=json.dumps([patterns, names]),
                capture_output=True,
                text=True,
                timeout=_REGEX_SECONDS,
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise CheckpointError(
                f"{self.path}: matching the regular expressions among its excluded modules takes more than {_REGEX_SECONDS:g} s "
                f"(the longest is {max(patterns, key=len)[:80]}), and would in TensorRT-LLM; write simpler ones"
            ) from None
        hits = json.loads(result.stdout)
        return {name for row in hits for name, hit in zip(names, row, strict=True) if hit}


def _foreign(path: Path, method: str, section: Mapping[str, Any]) -> str:
    """What a ``quant_method`` other than nvidia-modelopt's is, who serves it, and what to do for b12x."""
    export = "export the unquantized model with nvidia-modelopt's NVFP4_DEFAULT_CFG for b12x"
    if method == "compressed-tensors":
        groups = [g for g in (typed(path, section, "config_groups", dict) or {}).values() if isinstance(g, dict)]
        weights = [typed(path, group, "weights", dict) or {} for group in groups]
        form = " ".join([str(section.get("format")), *(str(group.get("format")) for group in groups)])
        if "nvfp4" in form or any(w.get("strategy") == "tensor_group" and w.get("num_bits") == 4 for w in weights):
            # model_config.py reads its configuration; the names of its tensors only two models' mappers do (pull request 17726).
            return (
                "is NVFP4 as llm-compressor writes it (compressed-tensors): the same numbers under other names (weight_packed, "
                f"weight_global_scale) that TensorRT-LLM's experts are not loaded from; vLLM serves it; {export}"
            )
        bits = next((str(w["num_bits"]) for w in weights if isinstance(w.get("num_bits"), int)), "unknown")
        return f"is compressed-tensors (llm-compressor) with weights of {bits} bits, not NVFP4; vLLM serves it; {export}"
    known = {
        "mxfp4": "is MXFP4 (gpt-oss: blocks of 32, no second scale), not NVFP4; TensorRT-LLM serves it without b12x",
        "gptq": "is GPTQ (4-bit or 8-bit integers), not NVFP4; vLLM serves it",
        "awq": "is AWQ (4-bit integers), not NVFP4; vLLM serves it",
    }
    if method == "fp8":
        blocks = section.get("weight_block_size")
        size = " x ".join(map(str, blocks)) if isinstance(blocks, list) and blocks else ""
        form = f"with a scale per {size[:20]} block" if size else "with one scale per tensor"
        return f"is FP8 {form}, not NVFP4; TensorRT-LLM serves it without b12x; {export}"
    return f"{known.get(method, f'is quantized by {method[:40]}, not by nvidia-modelopt')}; {export}"
