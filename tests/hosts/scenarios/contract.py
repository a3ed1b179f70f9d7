"""What the package relies on in a host: hooks, names, and models that read the backend's name."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from tests.hosts.scenarios import model_config


def orphaned_hooks() -> dict[str, Any]:
    """Hooks of ours that this host's own method does not have, and would never call."""
    from trtllm_b12x.engines.trtllm import host as hosts

    host = hosts.load()
    ours = {name for cls in host.Weights.__mro__[:-1] for name in vars(cls) if callable(getattr(cls, name))}
    parent = host.NVFP4CutlassFusedMoEMethod
    return {"orphans": sorted(name for name in ours if not name.startswith("__") and not hasattr(parent, name))}


def left_alone() -> dict[str, Any]:
    """A host that no adapter fits: which class it names, twice, and what is left of the patches."""
    create_moe = importlib.import_module("tensorrt_llm._torch.modules.fused_moe.create_moe")
    early = create_moe.get_moe_cls
    classes = [early(model_config()).__name__ for _ in range(2)]
    import trtllm_b12x

    names, status = [create_moe.get_moe_cls, create_moe.create_moe_backend], trtllm_b12x.status()
    wrapped = [hasattr(name, "__wrapped__") for name in names]
    return {"classes": classes, "generation": status.generation, "patches": status.patches, "wrapped": wrapped}


def renamed_names(generation: str, folder: str) -> dict[str, Any]:
    """One name of the host changed after the other, a process each: what comes of a load and a call, with us and without."""

    import torch

    from tests.checkpoints import random_experts
    from tests.hosts import build
    from trtllm_b12x.engines.trtllm import contract

    # Before the processes part; nothing of it looks at the host.
    for slow in ("torch.fx.experimental.symbolic_shapes", "trtllm_b12x.engines.trtllm.host", "trtllm_b12x.kernels.reference"):
        importlib.import_module(slow)
    tensors = random_experts(4, 128, 192)

    def run(path: Path) -> str:
        sys.path.insert(0, str(path))
        import trtllm_b12x

        trtllm_b12x.install()
        from tensorrt_llm._torch.models.modeling_double import Model
        from tensorrt_llm._torch.pyexecutor import model_loader

        model = model_loader.load(lambda: Model(model_config(skip_create_weights_in_init=True), 1), {"layer0": tensors})
        output = model.layer0(torch.ones(3, 128, dtype=torch.bfloat16), torch.zeros(3, 4))
        status = trtllm_b12x.status()
        return f"{status.generation} {status.promoted}" if output.isfinite().all() else "not finite"

    def outcome(path: Path, enabled: str) -> str:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.environ["TRTLLM_B12X"] = enabled
            try:
                answer = run(path)
            except BaseException as error:
                answer = f"raised {type(error).__name__}: {error}"
            os.write(write, answer.encode()[:400])
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as stream:
            answer = stream.read()
        os.waitpid(child, 0)
        return answer

    # Attributes where the host writes and reads them, not what constructors and operators call by the same name.
    of_layer = r"(?:\b(?:self|impl|module|backend|moe)\.|def |^    \"){0}\b"
    of_weights, of_record = r"[.\"]{0}\b", r"\b{0}\b(?!=plan)"
    names = dict.fromkeys((*contract.LAYER, "quant_method"), of_layer) | dict.fromkeys(contract.WEIGHTS, of_weights)
    if generation.startswith("C"):
        names |= dict.fromkeys((name for fields in contract.RECORDS.values() for name in fields), of_record)
    if os.environ.get("RENAMED") != "all":  # a process and a double each
        names = dict(list(names.items())[::3])
    outcomes = {}
    for name, pattern in names.items():
        path = build.build(generation, Path(folder) / name)
        shared = (path / "tensorrt_llm" / f"{module}.py" for module in ("_ops", "_scheduling", "_wrapping"))
        package = (path / build.PACKAGES.get(generation, build.OLD_PACKAGE)).rglob("*.py")
        for file in (*(file for file in package if file.stem != "create_moe"), *shared):  # which names arguments
            text = re.sub(pattern.format(name), lambda found: f"{found[0]}_", file.read_text(), flags=re.MULTILINE)
            file.write_text(text)
        with_us = outcome(path, "1")
        outcomes[name] = [with_us, outcome(path, "0") if with_us.startswith(("raised", "not")) else ""]
    return {"outcomes": outcomes}


def models_that_read_the_backend() -> dict[str, Any]:
    """Decoder layers that read ``moe_backend``, on one of two ranks: what comes of each call, the host alone and with us."""
    import torch
    from tensorrt_llm._torch.models.modeling_fused import MODELS, DecoderLayer
    from tensorrt_llm.mapping import Mapping

    import trtllm_b12x
    from tests.checkpoints import random_experts

    tensors = random_experts(4, 128, 256)

    def outcomes(model: str, backend: str) -> tuple[str, list[Any]]:
        mapping = Mapping(world_size=2, tp_size=2, moe_tp_size=2)
        try:
            layer = DecoderLayer(model, model_config(backend, skip_create_weights_in_init=True, mapping=mapping))
            layer.experts.create_weights()
            layer.experts.load_weights([tensors])
            layer.experts.post_load_weights()
        except Exception as error:
            return type(error).__name__, []
        calls = []
        for tokens in (1, 3, 4, 8):
            generator = torch.Generator().manual_seed(tokens)
            x = torch.randn(tokens, 128, generator=generator).to(torch.bfloat16)
            try:
                calls.append(layer(x, torch.randn(tokens, 4, generator=generator)).float())
            except Exception as error:
                calls.append(f"{type(error).__name__}: {error}")
        return type(layer.backend).__name__, calls

    def against(answers: list[Any], reference: list[Any]) -> list[Any]:
        """Relative L2 against the host's CUTLASS, or what was raised."""
        return [
            answer if isinstance(answer, str) else round(float((answer - cutlass).norm() / cutlass.norm()), 3)
            for answer, cutlass in zip(answers, reference, strict=False)
        ]

    rows = []
    for model in MODELS:
        for backend in ("CUTLASS", "TRTLLM", "CUTEDSL", "DENSEGEMM", "MARLIN"):
            trtllm_b12x.uninstall()
            reference = outcomes(model, "CUTLASS")[1]
            alone, expected = outcomes(model, backend)
            trtllm_b12x.install()
            promoted, found = outcomes(model, backend)
            rows.append([model, backend, alone, promoted, against(expected, reference), against(found, reference)])
    trtllm_b12x.uninstall()
    return {"rows": rows}
