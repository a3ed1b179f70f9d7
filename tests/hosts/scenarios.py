"""What is done in a process of its own with a double of TensorRT-LLM on the path: ``python -m tests.hosts.scenarios NAME ...``.

Each prints one JSON object, the last line, for ``tests/integration/test_hosts.py``.  ``serve`` runs many, each in a child.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def model_config(backend: str = "CUTLASS", algo: str | None = "NVFP4", **arguments: Any) -> Any:
    from tensorrt_llm._torch.model_config import ModelConfig
    from tensorrt_llm.models.modeling_utils import QuantAlgo, QuantConfig

    quant_config = QuantConfig(quant_algo=None if algo is None else QuantAlgo(algo), group_size=16)
    return ModelConfig(quant_config=quant_config, moe_backend=backend, **arguments)


def logged(least: int = logging.NOTSET) -> list[str]:
    """What the package says from now on, for as long as this process lives, at this level or above."""
    lines: list[str] = []
    handler = logging.Handler(least)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trtllm_b12x").addHandler(handler)
    return lines


def build_and_run(config: Any = None, listen: bool = True) -> dict[str, Any]:
    """A model through the file that bound ``create_moe`` early, by the host's own loader, and one decode call."""
    import torch
    from tensorrt_llm._torch.models.modeling_double import Model
    from tensorrt_llm._torch.pyexecutor import model_loader

    import trtllm_b12x
    from tests.checkpoints import random_experts

    lines = logged() if listen else []
    warnings = logged(logging.WARNING) if listen else []
    config = config or model_config(skip_create_weights_in_init=True)
    tensors = random_experts(4, 128, 192)
    model = model_loader.load(lambda: Model(config, 3, excluded=(2,)), {f"layer{i}": tensors for i in (0, 1)})
    layers = [getattr(model, f"layer{i}") for i in range(3)]
    backends = [getattr(layer, "backend", layer) for layer in layers]
    x, logits = torch.ones(3, 128, dtype=torch.bfloat16), torch.randn(3, 4)
    output = layers[0](x, logits)
    status = trtllm_b12x.status()
    return {
        "wrappers": [type(layer).__name__ for layer in layers],
        "backends": [type(backend).__name__ for backend in backends],
        "methods": [type(backend.quant_method).__name__ for backend in backends],
        "kernels": [getattr(backend, "kernel", None) is not None for backend in backends],
        "finite": bool(output.isfinite().all()),
        "built_once": model.built_once,
        "generation": status.generation,
        "promoted": status.promoted,
        "families": status.families,
        "layers": status.layers,
        "patches": list(status.patches),
        "log": lines,
        "warnings": warnings,
    }


def before_import() -> dict[str, Any]:
    import trtllm_b12x

    trtllm_b12x.install()
    assert "tensorrt_llm" not in sys.modules
    return build_and_run()


def after_import() -> dict[str, Any]:

    import trtllm_b12x

    trtllm_b12x.install()
    trtllm_b12x.install()
    return build_and_run()


def by_itself() -> dict[str, Any]:
    """Nothing of ours is called: only what the interpreter's start has done."""
    return build_and_run()


def unheard() -> dict[str, Any]:
    """The same, in a process that sets no handler of its own."""
    return build_and_run(listen=False)


def mpi_worker() -> dict[str, Any]:
    """In a worker that TensorRT-LLM's session would spawn: only variables of its own names arrive, and its ``sys.path``."""
    from mpi4py.futures import MPIPoolExecutor

    variables = {name: value for name, value in os.environ.items() if name.startswith(("TRTLLM", "TLLM"))}
    with MPIPoolExecutor(max_workers=1, path=sys.path, env=variables) as pool:
        result: dict[str, Any] = pool.submit(build_and_run).result()
    return result


def spawned() -> dict[str, Any]:
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(build_and_run)


def ray_ranks() -> dict[str, Any]:
    """Two actors as the host's Ray executor has them, each with its rank of a model."""
    import ray
    from torch.distributed import TCPStore

    from tests.hosts import scenarios

    # As RayExecutor tells its workers; for the whole job: nothing is started that does not serve.
    port = TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port
    told = {"TLLM_DISABLE_MPI": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    environment = {"env_vars": {**os.environ, **told}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    try:
        ranks: list[Any] = [ray.remote(scenarios.RayRank).remote(rank) for rank in range(2)]
        models = ray.get([rank.model.remote() for rank in ranks], timeout=120)
        return {"models": models}
    finally:
        ray.shutdown()


class RayRank:
    def __init__(self, rank: int) -> None:
        import torch

        self._rank = rank
        where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        torch.distributed.init_process_group("gloo", init_method=where, world_size=2, rank=rank)

    def model(self) -> dict[str, Any]:
        from tensorrt_llm.mapping import Mapping

        mapping = Mapping(world_size=2, rank=self._rank, tp_size=2, moe_ep_size=2)
        return build_and_run(model_config(skip_create_weights_in_init=True, mapping=mapping))


def worker_main(_torch_model_class_mapping: dict[str, type]) -> dict[str, Any]:
    """What a worker gets: classes by reference, whose modules it imports to unpickle them."""
    return {**build_and_run(), "classes": sorted(_torch_model_class_mapping)}


def custom_module_dirs(directory: str) -> dict[str, Any]:
    """The option in the parent: the folder's parent on the path, the folder imported by name.  The model is built in a worker."""
    from mpi4py.futures import MPIPoolExecutor

    folder = Path(directory)
    sys.path.insert(0, str(folder.parent))
    importlib.import_module(folder.name)
    from tensorrt_llm._torch.models.modeling_utils import MODEL_CLASS_MAPPING

    from tests.hosts import scenarios

    with MPIPoolExecutor(max_workers=1, path=sys.path, env={}) as pool:
        result: dict[str, Any] = pool.submit(scenarios.worker_main, MODEL_CLASS_MAPPING).result()
    return result


def balanced() -> dict[str, Any]:
    """With the host's load balancer on: a layer of the backend, and of the class the host checks its own list against."""
    import torch

    import trtllm_b12x
    from tests import layers

    class Balancer:
        def is_dynamic_routing(self) -> bool:
            return True

    host = layers.host
    importlib.import_module(f"{host.create_moe.__package__}.moe_load_balancer")._balancer = Balancer()  # type: ignore[attr-defined]
    trtllm_b12x.install()
    layer = host.create_moe.create_moe(
        host.RenormalizeMoeRoutingMethod(2),
        4,
        128,
        192,
        dtype=torch.bfloat16,
        model_config=model_config(skip_create_weights_in_init=True, moe_load_balancer=object()),
        **layers.activation(True),
    )
    if not hasattr(layer, "backend"):
        layer.create_weights()  # later hosts bind here
    backend = getattr(layer, "backend", layer)
    backend.create_weights()
    status = trtllm_b12x.status()
    return {"backend": type(backend).__name__, "method": type(backend.quant_method).__name__, "reasons": status.reasons}


def lora() -> dict[str, Any]:
    """LoRA on attention alone, and on the experts: the class, and what a call with adapters reaches."""
    from types import SimpleNamespace

    import torch

    import trtllm_b12x
    from tests import layers
    from tests.checkpoints import random_experts
    from trtllm_b12x.verification import kernel_calls

    host, tensors = layers.host, random_experts(4, 128, 192)

    def outcome(targets: list[str], promote: bool) -> list[Any]:
        (trtllm_b12x.install if promote else trtllm_b12x.uninstall)()
        adapters = SimpleNamespace(lora_target_modules=targets)
        config = model_config(skip_create_weights_in_init=True, lora_config=adapters)
        try:
            layer = host.create_moe.create_moe(
                host.RenormalizeMoeRoutingMethod(2),
                4,
                128,
                192,
                dtype=torch.bfloat16,
                model_config=config,
                **layers.activation(True),
            )
            layer.create_weights()
        except ValueError as error:
            return [type(error).__name__]
        layers.load(layer, tensors)
        if not promote:
            return [type(layer.backend).__name__]
        with kernel_calls(layer.backend) as reached:
            layer(*layers.inputs(layer, 3, tensors), lora_params={"num_seqs": 1})
        return [type(layer.backend).__name__, len(reached)]

    experts = ["attn_q", "moe_h_to_4h", "moe_4h_to_h"]
    return {"attention": outcome(["attn_q"], True), "experts": [outcome(experts, False)[0], outcome(experts, True)[0]]}


def alltoall() -> dict[str, Any]:
    """Attention-DP behind an all-to-all: what is said after the load, and what each call sends."""
    import torch

    import trtllm_b12x
    from tests import layers
    from tests.checkpoints import random_experts

    host, tensors = layers.host, random_experts(4, 128, 192)
    sent: list[str] = []

    class Exchange:
        """Every token is this rank's own."""

        def supports_post_quant_dispatch(self) -> bool:
            return True

        def dispatch(self, *given: Any, **named: Any) -> tuple[Any, ...]:
            order = ("hidden_states", "hidden_states_sf", "token_selected_slots", "token_final_scales")
            values = given[:4] or tuple(named[name] for name in order)
            sent.append(str(values[0].dtype))
            return values

        def combine(self, hidden_states: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
            return hidden_states

    communication = importlib.import_module(f"{host.create_moe.__package__}.communication")
    communication.CommunicationFactory.create_strategy = staticmethod(lambda *given, **named: Exchange())
    trtllm_b12x.install()
    mapping = {"world_size": 2, "tp_size": 2, "moe_ep_size": 2, "enable_attention_dp": True}
    layer = layers.create(4, 128, 192, mapping=mapping)
    layers.load(layer, tensors)
    loaded = trtllm_b12x.status().promoted
    for _ in range(2):
        layer(*layers.inputs(layer, 3, tensors), all_rank_num_tokens=[3, 3])
    status = trtllm_b12x.status()
    return {"loaded": loaded, "promoted": status.promoted, "reasons": status.reasons, "sent": sent}


def uneven() -> dict[str, Any]:
    """Attention-DP over one rank of two: padded to the fullest rank, and in more chunks than this rank has tokens."""
    import torch

    import trtllm_b12x
    from tests import layers
    from tests.checkpoints import random_experts
    from trtllm_b12x.verification import kernel_calls

    host, tensors = layers.host, random_experts(4, 128, 256)
    communication = importlib.import_module(f"{host.create_moe.__package__}.communication")
    sent: list[list[int]] = []

    class Alone(communication.AllGatherReduceScatter):  # type: ignore[name-defined]
        """The other rank's tokens are left out."""

        def __init__(self) -> None:
            pass

        def dispatch(self, *given: Any, **named: Any) -> tuple[Any, ...]:
            sent.append(list(named["all_rank_num_tokens"]))
            assert len(named["hidden_states"]) == sent[-1][0]
            return tuple(
                named[name] for name in ("hidden_states", "hidden_states_sf", "token_selected_slots", "token_final_scales")
            )

        def combine(self, hidden_states: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
            return hidden_states

    communication.CommunicationFactory.create_strategy = staticmethod(lambda *given, **named: Alone())
    trtllm_b12x.install()
    mapping = {"world_size": 2, "tp_size": 2, "moe_ep_size": 2, "enable_attention_dp": True}
    layer = layers.load(layers.create(4, 128, 256, mapping=mapping, max_num_tokens=200, moe_max_num_tokens=32), tensors)
    x, logits = layers.inputs(layer, 9, tensors)
    zeros = torch.cat([x[:5], torch.zeros(4, 128, dtype=x.dtype)])
    calls: dict[str, tuple[Any, ...]] = {
        "even": (x, logits, [9, 9], False),
        "padded": (zeros, logits, [5, 9], True),
        "empty": (x[:3], logits[:3], [3, 100], False),
    }
    whole, result = None, {}
    for name, (rows, scores, counts, padding) in calls.items():
        sent.clear()
        with kernel_calls(layer.backend) as reached:
            output = layer(rows, scores, all_rank_num_tokens=counts, use_dp_padding=padding)
        whole = output if whole is None else whole
        result[name] = [list(output.shape), bool(torch.equal(output, whole[: counts[0]])), len(reached), sent[0], sent[-1]]
    return result


def naive() -> dict[str, Any]:
    """What happens here to a plain subclass, and that ours is none; each order of asking in a process of its own."""
    import torch

    from tests import layers
    from tests.checkpoints import random_experts
    from trtllm_b12x.fused_moe import FlashInferNvfp4Sm12xFusedMoE

    host = layers.host

    class Naive(host.CutlassFusedMoE):  # type: ignore[name-defined]
        pass

    result: dict[str, Any] = {}
    arguments = {"dtype": torch.bfloat16, "model_config": model_config(skip_create_weights_in_init=True)}
    more = {} if host.has_get_moe_cls else {"init_load_balancer": False}
    try:
        host.create_moe.create_moe_backend(Naive, host.RenormalizeMoeRoutingMethod(2), 4, 128, 192, **arguments, **more)
        result["naive"] = "built"
    except ValueError as error:
        result["naive"] = str(error).split(":")[0]
    plain = layers.create(4, 128, 192, promote=False).backend
    ours = layers.create(4, 128, 192).backend
    questions = [
        (ours, host.CutlassFusedMoE, True),
        (plain, FlashInferNvfp4Sm12xFusedMoE, False),
        (ours, FlashInferNvfp4Sm12xFusedMoE, True),
        (plain, host.CutlassFusedMoE, True),
    ]
    if sys.argv[-1] == "reversed":
        questions.reverse()
    result["isinstance"] = all(isinstance(instance, cls) is answer for instance, cls, answer in questions * 2)
    result["classes"] = [type(plain) is host.CutlassFusedMoE, type(ours) is FlashInferNvfp4Sm12xFusedMoE]

    tensors = random_experts(4, 128, 192)
    module = layers.load(layers.create(4, 128, 192, promote=False), tensors)
    x, logits = layers.inputs(module, 70, tensors)
    module.backend.__class__ = Naive  # as if it had been built and wrapped
    try:
        result["naive call"] = str(module(x, logits).dtype)
    except RuntimeError as error:
        result["naive call"] = str(error)
    module = layers.load(layers.create(4, 128, 192), tensors)
    run_moe = module.backend.run_moe

    def spy(*args: Any, **kwargs: Any) -> Any:
        result["arrived"] = sorted(kwargs) + [type(argument).__name__ for argument in args]
        return run_moe(*args, **kwargs)

    module.backend.run_moe = spy
    module(x, logits)
    return result


def table() -> dict[str, Any]:
    """Backend x quantization x SM: the host alone, and with us."""
    import torch

    import trtllm_b12x
    from tests import layers
    from trtllm_b12x import environment

    host = layers.host
    activation = layers.activation(True)

    def answer(backend: str, algo: str | None) -> str:
        try:
            layer = host.create_moe.create_moe(
                host.RenormalizeMoeRoutingMethod(2),
                4,
                128,
                192,
                dtype=torch.bfloat16,
                model_config=model_config(backend, algo, skip_create_weights_in_init=True),
                **activation,
            )
            if hasattr(layer, "create_weights") and not hasattr(layer, "backend"):
                layer.create_weights()  # later hosts bind here
        except (ValueError, AssertionError) as error:
            return type(error).__name__
        return type(getattr(layer, "backend", layer)).__name__

    rows = []
    for payload in ("13", "12"):
        for sm in (90, 100, 120, 121):
            os.environ["FAKE_COMPUTE_CAP"] = f"{sm // 10}.{sm % 10}"
            os.environ["DOUBLE_SM"] = str(sm)
            environment.forget()
            if payload == "12":  # found for real in tests/integration/test_payload.py
                environment.inspect_payload = lambda: environment.Payload("4.8.1", (12, 9))
            for backend in ("CUTLASS", "TRTLLM", "CUTEDSL", "VANILLA", "DEEPGEMM"):
                for algo in ("NVFP4", "FP8", None):
                    trtllm_b12x.uninstall()
                    alone = answer(backend, algo)
                    trtllm_b12x.install()
                    rows.append((payload, sm, backend, algo, alone, answer(backend, algo)))
    return {"rows": rows, "has_get_moe_cls": host.has_get_moe_cls}


def decoders() -> dict[str, Any]:
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


def unusual() -> dict[str, Any]:
    """What goes wrong, or on at the same time, between the host's two questions."""
    import threading
    import types

    import torch

    import trtllm_b12x
    from tests import layers
    from trtllm_b12x import registry
    from trtllm_b12x.core import process
    from trtllm_b12x.host import questions

    host = layers.host
    create_moe = host.create_moe.create_moe
    trtllm_b12x.uninstall()
    # As modeling_qwen3_moe does for its gate.
    early = types.ModuleType("tensorrt_llm._torch.models.early")
    vars(early).update({name: f for name, f in vars(host.create_moe).items() if name == "get_moe_cls"})
    sys.modules[early.__name__] = early
    trtllm_b12x.install()
    gate = [m.get_moe_cls(model_config()).__name__ for m in (early, host.create_moe)] if host.has_get_moe_cls else []

    def build(dtype: torch.dtype = torch.bfloat16) -> Any:
        config = model_config(skip_create_weights_in_init=True)
        routing = host.RenormalizeMoeRoutingMethod(2)
        layer = create_moe(routing, 4, 128, 192, dtype=dtype, model_config=config, **layers.activation(True))
        if not getattr(layer, "backend", layer)._weights_created:
            layer.create_weights()  # C2 has no backend before
        return getattr(layer, "backend", layer)

    built: list[str] = []

    def several(dtype: torch.dtype) -> None:
        for _ in range(60):
            built.append(f"{dtype} {type(build(dtype)).__name__}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=several, args=(dtype,)) for dtype in (torch.bfloat16, torch.float16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)

    # Another pipeline rank's layer: built with all others, then without weights.
    other = build()
    other._parameters.clear()
    other._buffers.clear()
    other._weights_removed = True
    process.forget()
    registry.record(other, other.verdict, ready=False)
    left = trtllm_b12x.status().layers

    explained = layers.explained()
    questions.of_call = None  # type: ignore[assignment]
    failed = type(build()).__name__
    return {
        "gate": gate,
        "threads": {name: built.count(name) for name in built},
        "left": left,
        "failed": failed,
        "explained": explained,
    }


def numbers(expected: str) -> dict[str, Any]:
    """Sequences of calls, compared bit by bit with what the embedded host made of them."""
    import torch

    from tests import sequences

    wrong = []
    for name, tensor in torch.load(expected).items():
        result = sequences.SEQUENCES[name]()
        if not torch.equal(result, tensor):
            wrong.append(f"{name}: {float((result.float() - tensor.float()).norm() / tensor.float().norm()):.2g}")
    return {"wrong": wrong}


def mxfp8(backend: str) -> dict[str, Any]:
    """A layer that the host has no implementation for on this card: with ours off, then loaded, measured at its first call, and
    called and captured at counts on both sides of decode; loaded again in parts, and with gate and up of all experts fused."""
    import tempfile
    from unittest import mock

    import torch

    import trtllm_b12x
    from tests import layers
    from tests import mxfp8 as experts
    from tests.clock import Clock, capturing, standing_in
    from trtllm_b12x.dispatch.policy import HOST
    from trtllm_b12x.host import building, questions
    from trtllm_b12x.kernels.reference import ReferenceKernel
    from trtllm_b12x.strict_reference import Arithmetic, MoECall, outputs

    os.environ.update({"TRTLLM_B12X_CROSSOVER": "auto", "XDG_CACHE_HOME": tempfile.mkdtemp()})
    host, tensors = layers.host, experts.random_experts(4, 256, 128)
    config = host.QuantConfig(quant_algo=host.QuantAlgo.MXFP8, group_size=32)

    def create(**arguments: Any) -> Any:
        return layers.build(4, 256, 128, quant_config=config, moe_backend=backend, **arguments)

    found: dict[str, Any] = {}
    trtllm_b12x.uninstall()
    try:
        create()
    except ValueError as refused:
        found["host"] = str(refused)
    trtllm_b12x.install()
    module = layers.load(create(), tensors)
    found["class"], found["families"] = type(module.backend).__name__, list(module.backend.schedule.families)

    def error(tokens: int, module: Any = module, swiglu: tuple[float, float, float] | None = None) -> float:
        x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)
        logits = torch.randn(tokens, 4, generator=torch.Generator().manual_seed(1 + tokens)).to(torch.bfloat16)
        result = module(x, logits)
        call = MoECall(x, *module.routing_method.apply(logits))
        arithmetic = Arithmetic[module.backend.schedule.at(tokens).features.arithmetic]
        [[expected]] = outputs(tensors, 4, True, [call], [arithmetic], quant_algo="MXFP8", swiglu=swiglu)
        return float((result.float() - expected).norm() / expected.norm())

    with standing_in(Clock(lambda name, tokens: 40.0 if name == HOST else tokens)) as clock:
        with capturing():
            error(1)
        asked = [len(clock.asked)]
        found["errors"] = [error(tokens) for tokens in (1, 30, 63, 4096)]
        with capturing():
            found["captured"] = [error(tokens) for tokens in (4096, 63, 30, 1)]
        found["measured"] = [*asked, len(clock.asked)]
        found["crossover"] = module.backend.schedule.summary
    # As MiniMax-M3's model file builds its layers, but for the limit, which such weights meet.
    swiglu = (1.702, 1.0, 0.15)
    constants = {name: torch.full((4,), value) for name, value in zip(("alpha", "beta", "limit"), swiglu, strict=True)}
    given = layers.swiglu_constants(**constants)
    if "activation" not in given:
        given["activation_type"] = host.ActivationType.SwigluBias
    minimax = layers.load(create(**given), tensors)
    found["constants"] = [error(tokens, minimax, swiglu) for tokens in (1, 30, 100)]
    if backend == "CUTLASS":  # what trtllm-b12x tune builds
        made = building.create(4, 256, 128, 2, "SwigluBias", quant_algo="MXFP8", group_size=32)
        found["built"] = [type(made.backend).__name__, sorted(questions.activation_tensors(made.backend))]
    with mock.patch.object(ReferenceKernel, "bind", side_effect=ValueError("taken away")):
        try:
            layers.load(create(), tensors)
        except RuntimeError as refused:
            found["nobody"] = str(refused)
    names = ("w3_w1_weight", "w2_weight", "w3_w1_weight_scale", "w2_weight_scale")

    def bits(one: Any) -> list[torch.Tensor]:
        return [getattr(one.backend, name).data.view(torch.uint8).clone() for name in names]

    before = bits(module)
    stacked = {
        f"{name}{suffix}": torch.stack([torch.cat([tensors[f"{e}.{half}.{kind}"] for half in halves]).T for e in range(4)])
        for name, halves in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",)))
        for suffix, kind in (("", "weight"), ("_weight_scale", "weight_scale"))
    }
    other = layers.load(create(weight_loading_mode=host.MoEWeightLoadingMode.FUSED_GATE_UP_PROJ), stacked)
    found["stacked"] = all(map(torch.equal, before, bits(other)))
    along_rows = {name: tensor.mT if name.endswith("scale") else tensor for name, tensor in stacked.items()}
    try:
        layers.load(create(weight_loading_mode=host.MoEWeightLoadingMode.FUSED_GATE_UP_PROJ), along_rows)
    except ValueError as refused:
        found["along rows"] = str(refused)
    module.load_weights([experts.random_experts(4, 256, 128, seed=7)])
    changed = bits(module)
    for half in ("w2", "w3", "w1"):
        part = {name: tensor for name, tensor in tensors.items() if f".{half}." in name}
        module.load_weights([part], allow_partial_loading=True)
    module.post_load_weights()
    again = bits(module)
    found["parts"] = [any(map(torch.equal, before, changed)), all(map(torch.equal, before, again))]
    return found


def compiled() -> dict[str, Any]:
    """A layer under ``torch.compile``, where a graph break is an error."""
    import torch
    from tensorrt_llm._torch import utils

    from tests import layers
    from tests.checkpoints import random_experts

    tensors = random_experts(4, 128, 192)
    module = layers.load(layers.create(4, 128, 192, layer_idx=0), tensors)
    x, logits = layers.inputs(module, 5, tensors)
    eager = module(x, logits)
    utils.set_torch_compiling(True)
    result = torch.compile(lambda a, b: module(a, b) * 1, fullgraph=True, backend="eager")(x, logits)
    return {"equal": bool(torch.equal(result, eager)), "kernel": module.backend.kernel is not None}


def tuning() -> dict[str, Any]:
    """The autotuner's spec without an input, and what a tuned call reaches."""
    import torch
    from tensorrt_llm._torch import autotuner

    import trtllm_b12x
    from tests import layers
    from tests.checkpoints import random_experts
    from trtllm_b12x.verification import kernel_calls

    def profile() -> str:
        specs = (autotuner.DynamicTensorSpec(0, 0, (), lambda n: n // 2), autotuner.DynamicTensorSpec(3, 0))
        constraints = (autotuner.ConstraintSpec(1, 0, lambda shapes: 1), autotuner.ConstraintSpec(2, 5, lambda shapes: 1))
        try:
            shapes = (torch.Size([8, 2]), torch.Size([4]), torch.Size([3]))
            return str(autotuner.AutoTuner._find_nearest_profile(shapes, specs, constraints))
        except IndexError:
            return "IndexError"

    trtllm_b12x.uninstall()
    alone = profile()
    trtllm_b12x.install()
    guarded = profile()
    cleared = not hasattr(vars(autotuner.AutoTuner)["_find_nearest_profile"].__func__.__wrapped__, "cache_clear")
    cleared = cleared or autotuner.AutoTuner._find_nearest_profile.cache_clear() is None
    tensors = random_experts(4, 128, 192)
    module = layers.load(layers.create(4, 128, 192), tensors)
    x, logits = layers.inputs(module, 5, tensors)
    counts = []
    for tune in (True, False):
        with autotuner.autotune(tune), kernel_calls(module.backend) as reached:
            module(x, logits)
        counts.append(len(reached))
    tuner, missed = autotuner.AutoTuner.get(), []
    module.backend.retire_kernels()
    for tokens in (3, 5, 40):
        module(*layers.inputs(module, tokens, tensors))
        missed.append(len(tuner.missed))
    return {"alone": alone, "guarded": guarded, "cleared": cleared, "kernel_calls": counts, "missed": missed}


def warming_up() -> dict[str, Any]:
    """The order of ``PyTorchModelEngine.warmup`` (id 54626282323): attention alone, the autotuner, then each batch size twice and
    captured, the largest first; then requests.  When the crossover is measured, and what captures and calls run on: with and
    without the autotuner and graphs, each time as in a new process."""
    import gc

    from trtllm_b12x.core import process

    found = {}
    for autotuner in ("on", "off"):
        for graphs in ("on", "off"):
            process.forget()
            gc.collect()
            found[f"{autotuner} {graphs}"] = _warmed_up(autotuner, graphs)
    return found


def _warmed_up(autotuner: str, graphs: str) -> dict[str, Any]:
    import tempfile

    import torch
    from tensorrt_llm._torch import autotuner as host_tuner

    from tests import layers
    from tests.checkpoints import random_experts
    from tests.clock import Clock, capturing, standing_in
    from trtllm_b12x.dispatch.policy import HOST
    from trtllm_b12x.verification import kernel_calls

    os.environ.update({"TRTLLM_B12X_CROSSOVER": "auto", "XDG_CACHE_HOME": tempfile.mkdtemp()})
    tensors = random_experts(4, 128, 192)
    modules = [layers.load(layers.create(4, 128, 192, layer_idx=index), tensors) for index in range(2)]
    backends = [getattr(module, "backend", module) for module in modules]
    events: list[Any] = []
    tuner = host_tuner.AutoTuner.get()

    def measured() -> None:
        events.append(["measured", now[0], tuner.is_tuning_mode, torch.cuda.is_current_stream_capturing()])

    def forward(what: str, tokens: int) -> None:
        now[0] = what
        for module, backend in zip(modules, backends, strict=True):
            with kernel_calls(backend) as reached:
                asked = len(clock.asked)
                module(*layers.inputs(module, tokens, tensors))
            if len(clock.asked) == asked:  # else it counted the measurement's, too
                events.append([what, tokens, len(reached)])

    now = [""]
    with standing_in(Clock(lambda name, tokens: 10.0 if name == HOST or tokens > 8 else 5.0, measured)) as clock:
        if autotuner == "on":
            forward("attention", 1)
            with host_tuner.autotune():
                forward("tuning", 200)
        if graphs == "on":
            for tokens in (64, 32, 8, 1):
                forward("warm", tokens)
                forward("warm", tokens)
                with capturing():
                    forward("captured", tokens)
        for tokens in (40, 8, 3):
            forward("request", tokens)
        return {"events": events, "gap": clock.largest_gap, "layers": clock.layers}


def hooks() -> dict[str, Any]:
    """Hooks of ours that this host's own method does not have, and would never call."""
    from trtllm_b12x import host as hosts

    host = hosts.load()
    ours = {name for cls in host.Weights.__mro__[:-1] for name in vars(cls) if callable(getattr(cls, name))}
    parent = host.NVFP4CutlassFusedMoEMethod
    return {"orphans": sorted(name for name in ours if not name.startswith("__") and not hasattr(parent, name))}


def _equal(module: Any, tensors: dict[str, Any]) -> bool:
    """Compare with a layer that loaded all at once, to the bit, and decode with the checkpoint's own numbers."""
    import torch

    from tests import layers
    from trtllm_b12x.strict_reference import Arithmetic

    kernel = getattr(module, "backend", module).kernel
    reference = layers.load(layers.create(4, 128, 192, gated=module.is_gated_activation), tensors)
    if kernel is None:
        return False
    points = Arithmetic[kernel.features.arithmetic]
    for tokens in (5, 100):
        x, logits = layers.inputs(reference, tokens, tensors)
        result = module(x, logits)
        if not torch.equal(reference(x, logits), result):
            return False
        if tokens == 5 and layers.errors(module, x, logits, result, tensors, points)[1] > 0.005:
            return False
    return True


def _model() -> Any:
    from tensorrt_llm._torch.models.modeling_double import Model

    import trtllm_b12x

    trtllm_b12x.install()
    return Model(model_config(skip_create_weights_in_init=True), 1)


def from_a_peer(form: str) -> dict[str, Any]:
    """``checkpoint_format: MX``: parameters by name, as loaded or with what the source derived from them; nothing is loaded.

    What arrives is the host's: one scale for gate and up, the larger one.
    """
    import torch
    from tensorrt_llm._torch.pyexecutor import model_loader

    from tests.checkpoints import random_experts

    equal = {}
    for ratio in (1.0, 0.4, 3.0):
        tensors, peer = random_experts(4, 128, 192, up_to_gate=ratio), model_loader.Peer(transformed=form == "transformed")
        source = model_loader.load(_model, {"layer0": tensors}, peer)
        target = model_loader.load(_model, {}, peer)
        assert target.built_once
        shared = dict(tensors)
        for expert in range(4):
            names = [f"{expert}.{half}.weight_scale_2" for half in ("w1", "w3")]
            shared |= dict.fromkeys(names, torch.maximum(*(tensors[name] for name in names)))
        equal[str(ratio)] = [_equal(source.layer0, tensors), _equal(target.layer0, shared)]
    return {"equal": equal}


def in_groups() -> dict[str, Any]:
    """A stream of groups, an expert each, after which the loader processes neither the wrapper nor its backend."""
    from tensorrt_llm._torch.pyexecutor import model_loader

    from tests.checkpoints import random_experts

    tensors = random_experts(4, 128, 192, up_to_gate=1.7)
    groups = [{name: tensor for name, tensor in tensors.items() if name.startswith(f"{expert}.")} for expert in (2, 0, 3, 1)]
    model = model_loader.load(_model, [{"layer0": group} for group in groups])
    return {"equal": _equal(model.layer0, tensors)}


def in_buckets(promote: str) -> dict[str, Any]:
    """RLHF: updates one after the other, each in buckets of any order, whose memory the trainer then uses again."""
    import random

    import torch
    from tensorrt_llm._torch.pyexecutor.model_loader import update_weights

    from tests import layers
    from tests.checkpoints import random_experts

    equal = []
    for gated in (True, False):
        layer = layers.create(4, 128, 192, gated=gated, promote=promote == "yes")
        model = torch.nn.ModuleDict({"layer": layers.load(layer, random_experts(4, 128, 192, gated))})
        for seed, ratio in ((1, 2.0), (2, 1.0), (3, 0.5)):
            tensors = random_experts(4, 128, 192, gated, seed=seed, up_to_gate=ratio)
            names = random.Random(seed).sample(list(given := layers.mapped(layer, tensors)), len(given))
            for start in range(0, len(names), 7):
                bucket = {name: given[name].clone() for name in names[start : start + 7]}
                try:
                    update_weights(model, {"layer": bucket})
                except Exception as error:
                    return {"error": type(error).__name__}
                for tensor in bucket.values():
                    if tensor.dim() == 2:
                        tensor.view(torch.uint8).fill_(0xA5)
            update_weights(model, None)
            equal.append(_equal(layer, tensors))
    return {"equal": equal}


def fused_gate_up() -> dict[str, Any]:
    """The same experts, one by one and as models bring them that fuse gate and up of all experts into one tensor."""
    import torch

    from tests import layers
    from tests.checkpoints import random_experts

    tensors = random_experts(4, 128, 192)
    for name, value in {"weight_scale_2": 0.01, "input_scale": 0.02}.items():  # of all experts
        tensors.update({key: torch.tensor(value) for key in tensors if key.endswith(name)})
    fused: dict[str, torch.Tensor] = {}
    for kind in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        suffix = "" if kind == "weight" else f"_{kind}"
        w1, w3, w2 = (torch.stack([tensors[f"{e}.{half}.{kind}"] for e in range(4)]) for half in ("w1", "w3", "w2"))
        several = w1.dim() == 3
        fused[f"gate_up_proj{suffix}"] = torch.cat([w1, w3], 1).transpose(1, 2).contiguous() if several else w1[0]
        fused[f"down_proj{suffix}"] = w2.transpose(1, 2).contiguous() if several else w2[0]
    mode = layers.host.MoEWeightLoadingMode.FUSED_GATE_UP_PROJ
    return {"equal": _equal(layers.load(layers.create(4, 128, 192, weight_loading_mode=mode), fused), tensors)}


def renamed(generation: str, folder: str) -> dict[str, Any]:
    """One name of the host changed after the other, a process each: what comes of a load and a call, with us and without."""
    import re

    import torch

    from tests.checkpoints import random_experts
    from tests.hosts import build
    from trtllm_b12x.host import contract

    # Before the processes part; nothing of it looks at the host.
    for slow in ("torch.fx.experimental.symbolic_shapes", "trtllm_b12x.host.adapters", "trtllm_b12x.kernels.reference"):
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
        for file in (path / build.PACKAGES.get(generation, build.OLD_PACKAGE)).rglob("*.py"):
            text = re.sub(pattern.format(name), lambda found: f"{found[0]}_", file.read_text(), flags=re.MULTILINE)
            file.write_text(text)
        with_us = outcome(path, "1")
        outcomes[name] = [with_us, outcome(path, "0") if with_us.startswith(("raised", "not")) else ""]
    return {"outcomes": outcomes}


def serve() -> None:
    """Scenarios as they come in, a line of JSON each, in children of this process, which has imported what takes long.

    Nothing of ours or the host's is imported here: the import hook that the interpreter started with is all there is.
    """
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm(300)
            for stream, path in zip((1, 2), request["files"], strict=True):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            os.environ.clear()
            os.environ.update(request["environment"])
            sys.argv = [sys.argv[0], *request["arguments"]]
            code = 1
            try:
                main()
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def main() -> None:
    if sys.argv[1] == "serve":
        serve()
        return
    scenario: Callable[..., dict[str, Any]] = globals()[sys.argv[1]]
    arguments = [argument for argument in sys.argv[2:] if argument != "reversed"]
    print("\n" + json.dumps(scenario(*arguments)))


if __name__ == "__main__":
    main()
