# SPDX-License-Identifier: Apache-2.0
"""Compose a double of one generation: ``python -m tests.hosts.build A FOLDER`` writes ``FOLDER/tensorrt_llm``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from trtllm_b12x.engines.trtllm import contract

from .extract import OLD_PACKAGE, PACKAGES

HERE = Path(__file__).parent
Change = tuple[str, str, str]
"""Module, text, and what replaces it."""
LAYERS = {
    "A": ("a",),
    "B": ("a", "b", "c1/quantization.py", "c1/moe_lora.py"),
    "C1": ("a/communication.py", "a/moe_load_balancer.py", "c1"),
    "C2": ("a/communication.py", "a/moe_load_balancer.py", "c1", "c2"),
}
"""Generation to the folders and files its MoE package is made of; later ones replace earlier ones."""

_HOOK = "    def transform_weights(self, module):\n        pass\n\n    def cache_derived_state(self, module):\n"
_NO_HOOK = "    def post_load_weights(self, module):\n"
_SCALES = "    def _interleave_w2_weight_scale("
DIFFERENCES: dict[str, dict[str, dict[str, str]]] = {
    # Late 1.3: partial loading, LoRA, and one hook at the end of a load, which no reload asks whether weights were transformed.
    "B": {
        "fused_moe_cutlass": {
            "from .interface import MoE\n": "from .interface import MoE\nfrom .moe_lora import *\n",
            "        self._weights_created = False\n": (
                "        self._moe_lora_enabled = has_moe_lora_targets(model_config.lora_config)\n"
                "        self._weights_created = False\n"
            ),
            "    def _supports_load_balancer(self)": (
                "    def _moe_lora_active(self, lora_params):\n"
                "        return self._moe_lora_enabled and bool(lora_params)\n\n"
                "    def _supports_load_balancer(self)"
            ),
            "        enable_alltoall=None,\n    )": "        enable_alltoall=None,\n        lora_params=None,\n    )",
            "        if not isinstance(self.quant_method, UnquantizedFusedMoEMethod):\n"
            '            assert not allow_partial_loading, "Partial loading is not supported for quantized MoE now"\n'
            "        self.quant_method.load_weights(self, weights[0], self.weight_loading_mode)\n": (
                "        self.quant_method.load_weights(self, weights[0], self.weight_loading_mode, allow_partial_loading)\n"
            ),
        },
        "quantization": {
            _HOOK: _NO_HOOK,
            "class W4A16NVFP4CutlassFusedMoEMethod(": "class _OfJune(",
            "        if weights:\n            module._weights_transformed = False\n": "",
            "        load_expert_ids=None,\n    ):": "    ):",
            "*alphas, None, None, module.initial_local_expert_ids": "*alphas",
        },
        "interface": {
            "    def pre_reload_weights(self)": (
                "    def validate_configurable_moe(self, moe):\n        pass\n\n    def pre_reload_weights(self)"
            )
        },
    },
    # Experts may arrive one by one. MXFP8 since September 2026 interleaves once, at the end of partial loads too.
    "C2": {
        "quantization": {
            _SCALES: (
                f"    def finalize_streamed_expert(self, module, local_slot_id):\n        raise NotImplementedError\n\n{_SCALES}"
            ),
            "    BLOCK_SIZE = 32\n": (
                "    BLOCK_SIZE = 32\n\n    def process_weights_after_loading(self, module):\n"
                '        raise NotImplementedError("of SM100 alone")\n'
            ),
        }
    },
}
"""What is too little for a file of its own: module, text, and what replaces it."""

_DEFAULTS = {
    "tensorrt_llm._torch.model_config": "ModelConfig",
    "tensorrt_llm._torch.utils": "ActivationType",
    ".interface": "MoEWeightLoadingMode",
}
"""Modules of what stands as a default in signatures."""
_OF_BACKENDS = ("moe_cls", "init_load_balancer", "without_comm")
"""Parameters that ``create_moe_backend`` has and ``create_moe`` has not."""
_OF_LAYERS = {"C1": ["communication_method=None"], "C2": ["communication_method=None", "allow_backend_degradation=True"]}
"""Parameters that ``create_moe`` alone has, beside ``override_quant_config``."""


def build(generation: str, folder: Path, changes: Iterable[Change] = ()) -> Path:
    """Write the double's tree to ``folder``, to be put on ``PYTHONPATH``, and change it; return the folder."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE / "common", folder, ignore=ignore, dirs_exist_ok=True)
    package = folder / PACKAGES.get(generation, OLD_PACKAGE)
    package.mkdir(parents=True, exist_ok=True)
    for layer in LAYERS[generation]:
        source = HERE / layer
        if source.is_dir():
            shutil.copytree(source, package, ignore=ignore, dirs_exist_ok=True)
        else:
            shutil.copy(source, package)
    own = [(module, old, new) for module, pairs in DIFFERENCES.get(generation, {}).items() for old, new in pairs.items()]
    for module, old, new in (*own, *changes):
        path = package / f"{module}.py"
        text = path.read_text(encoding="utf-8")
        if old not in text:
            raise ValueError(f"{path} does not hold {old!r}: this change is out of step with the folder")
        path.write_text(text.replace(old, new), encoding="utf-8")
    path = package / "create_moe.py"
    path.write_text(_with_signatures(path.read_text(encoding="utf-8"), generation), encoding="utf-8")
    for parent in package.relative_to(folder).parents:
        if parent != Path():
            (folder / parent / "__init__.py").touch()
    return folder


def _with_signatures(text: str, generation: str) -> str:
    """Give ``create_moe_backend`` and ``create_moe`` the host's own parameters, which they find by name in ``facts``."""
    backend = contract.facts()[generation]["functions"]["create_moe.create_moe_backend"]
    at = backend.index("model_config=ModelConfig()") + 1
    layer = [*backend[:at], "override_quant_config=None", *backend[at:], *_OF_LAYERS.get(generation, [])]
    layer = [name for name in layer if name.partition("=")[0] not in _OF_BACKENDS]
    for name, parameters in (("create_moe_backend", backend), ("create_moe", layer)):
        text = text.replace(f"def {name}(facts):\n", f"def {name}({', '.join(parameters)}):\n    facts = dict(locals())\n")
    defaults = {**_DEFAULTS, **({".activation": "DEFAULT_MOE_ACTIVATION"} if generation == "C2" else {})}
    imports = "".join(f"from {module} import {name}\n" for module, name in defaults.items())
    return text.replace("\n\n\n", f"\n{imports}\n\n", 1)


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]))
