"""Compose a double of one generation: ``python -m tests.hosts.build A FOLDER`` writes ``FOLDER/tensorrt_llm``."""

from __future__ import annotations

import re
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
    "B": ("a", "b", "c1/quantization.py", "c1/communication.py", "c1/moe_lora.py"),
    "C1": ("c1",),
    "C2": ("c1", "c2"),
}
"""Generation to the folders and files its MoE package is made of; later ones replace earlier ones."""

DIFFERENCES = {
    # Late 1.3: partial loading, LoRA, and a hook.
    "B": {
        "fused_moe_cutlass": [
            ("from .interface import MoE\n", "from .interface import MoE\nfrom .moe_lora import has_moe_lora_targets\n"),
            (
                "        self._weights_created = False\n",
                "        self._moe_lora_enabled = has_moe_lora_targets(model_config.lora_config)\n"
                "        self._weights_created = False\n",
            ),
            (
                "    def _supports_load_balancer(self)",
                "    def _moe_lora_active(self, lora_params: dict[str, Any] | None) -> bool:\n"
                "        return self._moe_lora_enabled and bool(lora_params)\n\n"
                "    def _supports_load_balancer(self)",
            ),
            (
                "        enable_alltoall: bool | None = None,\n    )",
                "        enable_alltoall: bool | None = None,\n        lora_params: Any = None,\n    )",
            ),
            (
                "        if not isinstance(self.quant_method, UnquantizedFusedMoEMethod):\n"
                '            assert not allow_partial_loading, "Partial loading is not supported for quantized MoE now"\n'
                "        self.quant_method.load_weights(self, weights[0], self.weight_loading_mode)\n",
                "        self.quant_method.load_weights(self, weights[0], self.weight_loading_mode, allow_partial_loading)\n",
            ),
        ],
        "quantization": [
            # The end of a load is one hook, which no reload asks whether weights were transformed.
            (
                "    def transform_weights(self, module: Any) -> None:\n"
                "        pass\n\n"
                "    def cache_derived_state(self, module: Any) -> None:\n        self.setup_quant_scales(module)\n\n"
                "    def post_load_weights(self, module: Any) -> None:\n"
                '        """Nobody calls it any more."""\n'
                "        self.transform_weights(module)\n        self.cache_derived_state(module)\n",
                "    def post_load_weights(self, module: Any) -> None:\n        self.setup_quant_scales(module)\n",
            ),
            ("        if weights:\n            module._weights_transformed = False\n", ""),
            ("        load_expert_ids: list[int] | None = None,\n    ) -> None:", "    ) -> None:"),
            (
                "            module.initial_local_expert_ids,\n        )\n        del module.tmp_weight_scale_2",
                "        )\n        del module.tmp_weight_scale_2",
            ),
        ],
        "interface": [
            (
                "    def pre_reload_weights(self)",
                "    def validate_configurable_moe(self, moe: Any) -> None:\n        pass\n\n    def pre_reload_weights(self)",
            ),
        ],
    },
}
"""What is too little for a file of its own: module to what is replaced in it."""


_OF_BACKENDS = ("moe_cls", "init_load_balancer", "without_comm")
"""Parameters that ``create_moe_backend`` has and ``create_moe`` has not."""
_OF_LAYERS = {
    "A": [],
    "B": [],
    "C1": ["communication_method=None"],
    "C2": ["communication_method=None", "allow_backend_degradation=True"],
}
"""Parameters that ``create_moe`` alone has, beside ``override_quant_config``."""


def build(generation: str, folder: Path, changes: Iterable[Change] = ()) -> Path:
    """Write the double's tree to ``folder``, to be put on ``PYTHONPATH``, and change it; return the folder."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE / "common", folder, ignore=ignore, dirs_exist_ok=True)
    package = folder / PACKAGES.get(generation, OLD_PACKAGE)
    for layer in LAYERS[generation]:
        source = HERE / layer
        if source.is_dir():
            shutil.copytree(source, package, ignore=ignore, dirs_exist_ok=True)
        else:
            shutil.copy(source, package)
    differences = DIFFERENCES.get(generation, {})
    for module, old, new in (*((module, *pair) for module, pairs in differences.items() for pair in pairs), *changes):
        path = package / f"{module}.py"
        text = path.read_text(encoding="utf-8")
        if old not in text:
            raise ValueError(f"{path} does not hold {old!r}: this change is out of step with the folder")
        path.write_text(text.replace(old, new), encoding="utf-8")
    for path in package.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "(facts: SimpleNamespace)" in text:
            path.write_text(_with_signatures(text, generation, path.stem), encoding="utf-8")
    for parent in package.relative_to(folder).parents:
        if parent != Path():
            (folder / parent / "__init__.py").touch()
    return folder


def _with_signatures(text: str, generation: str, module: str) -> str:
    """Give each function of one parameter, ``facts``, the host's own parameters, which it finds in that name."""
    signatures = {
        name.removeprefix(f"{module}."): parameters
        for name, parameters in contract.facts()[generation]["functions"].items()
        if name.count(".") == 1 and name.startswith(f"{module}.")
    }
    backend = signatures["create_moe_backend"]
    at = backend.index("model_config=ModelConfig()") + 1
    layer = [*backend[:at], "override_quant_config=None", *backend[at:]]
    signatures["create_moe"] = [name for name in layer if name.partition("=")[0] not in _OF_BACKENDS] + _OF_LAYERS[generation]

    def replaced(found: re.Match[str]) -> str:
        return f"def {found[1]}({', '.join(signatures[found[1]])}){found[2]}:\n    facts = SimpleNamespace(**locals())\n"

    return re.sub(r"def (\w+)\(facts: SimpleNamespace\)( -> \w+):\n", replaced, text)


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]))
