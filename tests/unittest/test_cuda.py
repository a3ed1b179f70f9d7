# SPDX-License-Identifier: Apache-2.0
"""The one launch: compiled by NVRTC for the cards that it serves and for Hopper, and what the driver gets of calls."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import chain
from tests.allocations import Allocations, weights_left
from tests.nvfp4_layer import elsewhere, random_call, random_layer
from trtllm_b12x.formats import BY_TURNS, FORMATS, GATE_UP, ROWS, WeightLayout
from trtllm_b12x.kernels import Geometry, MoECall, PlanError, driver, prove_child, warmup
from trtllm_b12x.kernels.cards import Card, models
from trtllm_b12x.kernels.catalog import KERNELS
from trtllm_b12x.kernels.cuda import decode, nvrtc, records, variant
from trtllm_b12x.kernels.cuda.decode import CudaKernel, CudaMXFP4Kernel, CudaMXFP8Kernel, CudaW4A16Kernel, LaunchPlan
from trtllm_b12x.kernels.cuda.probe import PROBE, takes_subnormals
from trtllm_b12x.kernels.warmup import CompileTask

QWEN3_30B = Geometry(128, 8, 2048, 768, "Swiglu")
FEW_VARIANTS = Geometry(8, 2, 4224, 64, "Relu2")
"""Wide: calls of 2 tokens or more gather."""
LAYERS: dict[str, tuple[type[CudaKernel], Geometry, int]] = {
    "Qwen3-30B-A3B NVFP4": (CudaKernel, QWEN3_30B, 8),
    "Nemotron-3-Super NVFP4": (CudaKernel, Geometry(512, 22, 1024, 2688, "Relu2"), 4),
    "gpt-oss-like NVFP4 float16": (
        CudaKernel,
        Geometry(128, 4, 2880, 2880, "SwigluBias", torch.float16, bias=torch.float16),
        4,
    ),
    "Qwen3.6-35B-A3B W4A16": (
        CudaW4A16Kernel,
        Geometry(256, 8, 2048, 512, "Swiglu", format="W4A16_NVFP4", layout=WeightLayout(ROWS, GATE_UP)),
        8,
    ),
    "gpt-oss-120b MXFP4": (
        CudaMXFP4Kernel,
        Geometry(
            *(128, 4, 2880, 2944, "SwigluBias"), bias=torch.bfloat16, format="MXFP4", layout=WeightLayout(hidden_multiple=128)
        ),
        4,
    ),
    "gpt-oss-120b MXFP4, as vLLM has it": (
        CudaMXFP4Kernel,
        Geometry(128, 4, 2880, 2880, "SwigluBias", bias=torch.bfloat16, format="MXFP4", layout=WeightLayout(ROWS, BY_TURNS)),
        4,
    ),
    "gemma-4-26B-A4B MXFP8": (CudaMXFP8Kernel, Geometry(128, 8, 2816, 704, "Geglu", format="MXFP8"), 4),
}
RTX_5090 = models("sm_120a", ["RTX 5090"])[0]
MOST_SPILLED = {"sm_90a": 40, "sm_120a": 16, "sm_121a": 16}
"""Bytes of a thread, in calls that gather: lane constants and counters, which a task reads once."""


@pytest.mark.parametrize(
    ("target", "every"),
    [("sm_120a", False), *(pytest.param(name, True, marks=pytest.mark.all) for name in MOST_SPILLED)],
)
@pytest.mark.parametrize("name", LAYERS)
def test_compiles(name: str, target: str, every: bool) -> None:
    """``every``: all variants; else the one that gathers, and another one for each layer."""
    kind, geometry, apart = LAYERS[name]
    kernel = kind(RTX_5090)
    kernel.describe(geometry, 64, torch.device("cuda"))
    variants = kernel.variants()
    assert [each.tokens for each in variants] == [count for count in variant.TOKENS if count <= apart or count == 64]
    for each in variants if every else (variants[-1], variants[list(LAYERS).index(name) % (len(variants) - 1)]):
        content, log = each.compile(target)
        assert content.startswith(b"\x7fELF")
        registers, threads = int(re.findall(r"Used (\d+) registers", log)[-1]), 32 * (dict(each.sizes)["WARPS"] + 4)
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", log)]
        assert registers * threads <= 65536, (each.tokens, registers)
        assert max(spilled) <= MOST_SPILLED[target], (each.tokens, spilled)


@pytest.mark.parametrize("target", MOST_SPILLED)
def test_the_probe_and_the_kernels_around_a_layer_compile(target: str) -> None:
    assert PROBE.compile(target)[0].startswith(b"\x7fELF")
    assert PROBE.assembled(target).count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") == 1
    content, log = nvrtc.compiled("chain.cu", chain.files(), target)
    assert content.startswith(b"\x7fELF")
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0"] * 3


def test_what_the_probe_changes() -> None:
    """The variants whose FC2 goes by slices. No key depends on the source of the probe, nor the probe's on theirs."""
    taken, flushed = (variant.variants(QWEN3_30B, FORMATS[0], subnormals) for subnormals in (True, False))
    assert [each.tokens for each, other in zip(taken, flushed, strict=True) if each != other] == [1, 8]
    assert [dict(each.sizes)["SUBNORMALS"] for each in (*flushed, *taken)] == [0, 1, 1, 0, 1, 1, 1, 1, 1, 1]
    assert set(taken[0].files()) & set(PROBE.files()) == {"ptx.cuh"}


@pytest.mark.parametrize(
    ("kind", "geometry"),
    [
        (CudaKernel, replace(QWEN3_30B, intermediate_size=720)),
        (CudaKernel, replace(QWEN3_30B, hidden_size=2064)),
        (CudaKernel, replace(QWEN3_30B, top_k=33)),
        (CudaKernel, replace(QWEN3_30B, layout=WeightLayout(fc1=BY_TURNS))),
        (CudaW4A16Kernel, replace(QWEN3_30B, intermediate_size=336, format="W4A16_NVFP4", layout=WeightLayout(ROWS))),
        (CudaMXFP4Kernel, replace(QWEN3_30B, format="MXFP4", dtype=torch.float16)),
        (CudaMXFP8Kernel, replace(QWEN3_30B, format="MXFP8", dtype=torch.float16)),
    ],
)
def test_what_it_does_not_take(kind: type[CudaKernel], geometry: Geometry) -> None:
    kernel = kind(RTX_5090)
    kernel.describe(replace(geometry, top_k=32) if geometry.top_k > 32 else QWEN3_30B, 8, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"one launch|cuda (takes|does not)"):
        kernel.describe(geometry, 8, torch.device("cuda"))


def test_a_variant_that_does_not_fit() -> None:
    """Calls of two tokens take the variant of four."""
    kernel = CudaMXFP8Kernel(RTX_5090)
    kernel.describe(Geometry(64, 6, 2560, 64, "Swiglu", format="MXFP8"), 64, torch.device("cuda"))
    assert [each.tokens for each in kernel.variants()] == [1, 4, 64]


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cubin is compiled once, and not at all with TRTLLM_B12X_FREEZE; a file that others may write is none of ours."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    needed = (PROBE,)
    monkeypatch.setenv("TRTLLM_B12X_FREEZE", "1")
    with pytest.raises(PlanError, match=r"TRTLLM_B12X_FREEZE=1 \(the command\)"):
        variant.load(needed, "sm_120a", "the command")
    monkeypatch.delenv("TRTLLM_B12X_FREEZE")
    (compiled,) = variant.load(needed, "sm_120a", "the command")
    monkeypatch.setattr(nvrtc, "compiled", lambda *arguments: pytest.fail("compiled again"))
    assert list(variant.load(needed, "sm_120a", "the command")) == [compiled]
    file = needed[0].file("sm_120a")
    assert list(tmp_path.rglob("*.cubin")) == [file]
    file.chmod(0o666)
    assert needed[0].cached("sm_120a") is None


def test_warmup_and_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's task fills the package's own cache, where a server finds it, and says what was there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    task, results = CompileTask(CudaKernel, FEW_VARIANTS, 8), []
    for _ in range(2):
        warmup.run([task], [RTX_5090], lambda result, total: results.append((result, total)))
    done = [(result.family, result.cached, result.error, total) for result, total in results if result is not None]
    kernels = 1 + 2  # the probe, and calls of one token and of 64
    assert done == [("cuda", cached, "", kernels) for cached in (False, True) for _ in range(kernels)]
    found = prove_child.proof("sm_120a", "cuda")
    assert found.compiled, found
    assert found.products >= 4 * 8


def test_an_error_of_the_compiler() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"does not compile a\.cu for sm_120a(.|\n)*\"y\" is undefined"):
        nvrtc.compiled("a.cu", {"a.cu": "int f() { return y; }"}, "sm_120a")


# ---- calls, on a driver that keeps what it is given: forms, threads, graphs, errors ----------------------------------------


GEOMETRY = Geometry(3, 2, 128, 128, "Swiglu")
FIELDS = [name for name, _ in records.Call._fields_]
CONSTANTS = {b"threads": 96, b"shared_bytes": 5000, b"workspace_bytes": 4096, b"filled_bytes": 2048}
FILLED = bytes(1024) + b"\xff" * 1024
"""A workspace's first bytes."""


class Driver:
    """Stands in for libcuda.

    ``launched`` gets the threads of a block, the stream, and a dict of each launch: the fields of ``Layer`` and ``Call``, the
    number of blocks and the calling thread. ``filled`` gets the first bytes of its workspace.
    """

    code = 0
    capture = 0
    shared_bytes = 0
    """Dynamic shared memory that a function may use."""
    unloaded = 0

    def __init__(self) -> None:
        self.launched: list[tuple[int, int, dict[str, int]]] = []
        self.filled: list[bytes] = []
        self.contexts = [1]
        """Those of every thread, the current one last: 1, or none, or another card's."""
        self.while_launching: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 0

    def cuModuleGetGlobal_v2(self, at: Any, size: Any, module: Any, name: bytes) -> int:  # noqa: N802
        at._obj.value = CONSTANTS[name]
        return 0

    def cuMemcpyDtoH_v2(self, value: Any, at: Any, size: Any) -> int:  # noqa: N802
        value._obj.value = at.value
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        self.shared_bytes = value
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.contexts[-1]
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.contexts.pop()
        return 0

    def cuModuleUnload(self, module: Any) -> int:  # noqa: N802
        self.unloaded += self.contexts[-1] == 1
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: None) -> int:  # noqa: N802
        self.while_launching()
        if self.contexts[-1] != 1:
            return 400 if self.contexts[-1] else 201
        layer, config = records.Layer.from_address(pointers._obj[0]), config._obj
        record = {name: getattr(layer, name) for name, _ in records.Layer._fields_}
        record |= zip(FIELDS, records.CALL.unpack(ctypes.string_at(pointers._obj[1], records.CALL.size)), strict=True)
        self.filled.append(ctypes.string_at(record["workspace"], len(FILLED)))
        assert (config.shared_bytes, self.shared_bytes) == (5000, 5000)
        assert (config.count, config.attributes[0].value) == (1, 1)  # launches overlap
        self.launched.append((config.block_x, config.stream, record | {"blocks": config.grid_x, "thread": threading.get_ident()}))
        return self.code

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, number: Any, *rest: None) -> int:  # noqa: N802
        status._obj.value, number._obj.value = int(self.capture > 0), self.capture
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stand_in = Driver()
    monkeypatch.setattr(driver, "_library", lambda: stand_in)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: threading.get_ident(), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stand_in.capture > 0)
    return stand_in


@pytest.fixture
def kernel(cuda: Driver) -> CudaKernel:
    return bound()


def bound(
    geometry: Geometry = GEOMETRY, capacity: int = variant.TOKENS[-1], first: int = 0, blocks: int = 132, one_for_all: bool = True
) -> CudaKernel:
    """Return a kernel on the stand-in, with variants that have as many threads as tokens."""
    kind: Any = KERNELS["cuda", geometry.format][0]
    kernel: CudaKernel = kind(Card(blocks, 228 << 10, 90))
    kernel.describe(geometry, capacity, torch.device("cuda"))
    kernel.device = torch.device("cpu")
    functions = {tokens: driver.Function(driver.Module(b""), "layer") for tokens in variant.TOKENS}
    for tokens, function in functions.items():
        function.threads = tokens
    kernel._plan = LaunchPlan(functions, dict.fromkeys(variant.TOKENS, (4096, 2048)), tested=True)
    kernel.bind(random_layer(geometry, ratio=True).kernel_weights(one_for_all), first)
    return kernel


@pytest.mark.parametrize(
    ("tokens", "ids_type", "weight_type"),
    [
        (1, torch.int32, torch.float32),
        (2, torch.int64, torch.bfloat16),
        (3, torch.uint8, torch.float16),
        (variant.TOKENS[-1], torch.int64, torch.float32),
    ],
)
def test_records(cuda: Driver, kernel: CudaKernel, tokens: int, ids_type: torch.dtype, weight_type: torch.dtype) -> None:
    x, ids, router_weights = random_call(GEOMETRY, tokens)
    call = MoECall(x, ids.to(ids_type), router_weights.to(weight_type))
    out = torch.empty_like(x)
    assert kernel.run(call).shape == kernel.run(call._replace(out=out)).shape == x.shape
    codes, scales = torch.zeros(tokens, 64, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    kernel.run(call._replace(x=codes, x_sf=scales, swizzled=True))
    for threads, stream, record in cuda.launched:
        assert (threads, stream) == (min(size for size in variant.TOKENS if size >= tokens), threading.get_ident())
        assert record["workspace"] == kernel._plan.workspaces[threads, 0, stream][0]
        assert record["tokens"] == tokens
        assert record["wide_ids"] == (ids_type != torch.int32)
        assert record["weight_type"] == (weight_type == torch.bfloat16)
    first, second, third = (record for _, _, record in cuda.launched)
    assert second["out"] == out.data_ptr() != first["out"]
    assert [record["x"] for record in (first, second, third)] == [x.data_ptr(), x.data_ptr(), codes.data_ptr()]
    assert [(record["x_sf"], record["swizzled"]) for record in (first, third)] == [(0, 0), (scales.data_ptr(), 1)]
    assert cuda.filled == [FILLED] * 3


@pytest.mark.parametrize("one_for_all", [True, False])
@pytest.mark.parametrize(
    "geometry",
    [
        GEOMETRY,
        Geometry(3, 2, 128, 128, "Relu2", torch.float16, bias=torch.float32),
        *(
            Geometry(3, 2, 128, 128, "SwigluBias", bias=torch.bfloat16, layout=WeightLayout(ROWS, BY_TURNS), format=name)
            for name in ("W4A16_NVFP4", "MXFP4")
        ),
    ],
    ids=str,
)
def test_records_of_layers(cuda: Driver, geometry: Geometry, one_for_all: bool) -> None:
    """Each pointer is that of the weights, or of a one. A call with quantized input has its own FC1 input scale, one."""
    kernel = bound(geometry, first=5, one_for_all=one_for_all)
    call = MoECall(*random_call(geometry, 2, dtype=geometry.dtype))
    kernel.run(call)
    if kernel.features.quantized_input:
        kernel.run(call._replace(x=torch.zeros(2, 64).byte(), x_sf=torch.zeros(16).byte()))
    weights, extra = kernel.weights, kernel.weights.epilogue
    inputs = getattr(weights, "input_scales", None)
    expected = {name: getattr(extra, name) for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit")}
    expected |= {"w1": weights.fc1_weight, "s1": weights.fc1_weight_sf, "w2": weights.fc2_weight, "s2": weights.fc2_weight_sf}
    expected |= {"bias1": extra.fc1_bias, "bias2": extra.fc2_bias, "stuck": kernel._plan.stuck}
    if inputs is not None:
        expected |= {"alpha1": weights.fc1_alpha, "alpha2": weights.fc2_alpha, "input2": inputs.fc2_input_scale}
        expected |= {"halves1": weights.fc1_half_alphas}
    for quantized, (_, _, record) in enumerate(cuda.launched):
        input1 = None if quantized or inputs is None else inputs.fc31_input_scale
        for name, tensor in (expected | {"input1": input1}).items():
            if tensor is not None:
                assert record[name] == tensor.data_ptr(), name
            else:  # no alpha equals a zero
                assert ctypes.c_float.from_address(record[name]).value == (name != "halves1"), name
        steps = int(input1 is not None and not one_for_all), int(inputs is not None)
        assert (record["step1"], record["step2"], record["first"], record["blocks"]) == (*steps, 5, 132)


@pytest.mark.parametrize("capacity", [1, 3, 100])
def test_which_launch_serves(cuda: Driver, capacity: int) -> None:
    """Both forms, at every count. A block has room for ``MOST_BLOCKS``."""
    kernel, most = bound(capacity=capacity, blocks=300), min(capacity, 64)
    forms = kernel.forms()
    served = {name: [tokens for tokens in range(70) if form.serves(tokens)] for name, form in forms.items()}
    gathering = {"gathering": list(range(2, min(capacity, 8) + 1))} if capacity > 1 else {}
    assert served == {"": list(range(1, most + 1))} | gathering
    for name, counts in served.items():
        for tokens in counts:
            forms[name].run(MoECall(*random_call(GEOMETRY, tokens)))
            size = 64 if name else min(size for size in variant.TOKENS if size >= tokens)
            assert (cuda.launched[-1][0], cuda.launched[-1][2]["blocks"]) == (size, variant.MOST_BLOCKS)
    with pytest.raises(ValueError, match=f"no kernel is planned for {most + 1} tokens, only for 1 to {most}$"):
        kernel.run(MoECall(*random_call(GEOMETRY, most + 1)))


def test_threads(cuda: Driver, kernel: CudaKernel) -> None:
    """Another thread begins a launch before the driver has read this one's."""
    cuda.while_launching = lambda: time.sleep(1e-6)
    calls, begun = {}, threading.Barrier(4)

    def run() -> None:
        call = calls[threading.get_ident()] = MoECall(*random_call(GEOMETRY, 2))
        begun.wait()
        for _ in range(500):
            kernel.run(call)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cuda.launched) == 2000
    for _, stream, record in cuda.launched:
        x, ids, router_weights, *_ = calls[record["thread"]]
        assert stream == record["thread"]
        assert [record[name] for name in FIELDS[:4]] == [x.data_ptr(), 0, ids.data_ptr(), router_weights.data_ptr()]


@pytest.mark.parametrize("context", [0, 2], ids=["none", "another card's"])
def test_a_thread_without_the_cards_context(cuda: Driver, kernel: CudaKernel, context: int) -> None:
    """The first CUDA call of a thread; a call after ``torch.cuda.set_device``."""
    cuda.contexts = [context]
    kernel.run(MoECall(*random_call(GEOMETRY, 2)))
    assert len(cuda.launched) == 1
    assert cuda.contexts == [context]
    cuda.contexts, cuda.code = [1], 719
    with pytest.raises(driver.DriverError, match="cuLaunchKernelEx: 719"):
        kernel.run(MoECall(*random_call(GEOMETRY, 2)))
    assert len(cuda.launched) == 2


@pytest.mark.parametrize("capture", [0, 7])
def test_modules_go_with_the_plan(cuda: Driver, capture: int) -> None:
    """But those that a captured graph launches, which may outlive it. From any thread."""
    kernel, cuda.capture = bound(), capture
    kernel.run(MoECall(*random_call(GEOMETRY, 2)))
    other = copy.copy(kernel)
    del kernel
    gc.collect()
    assert cuda.unloaded == 0
    cuda.contexts = [0]
    del other
    gc.collect()
    assert cuda.unloaded == len(variant.TOKENS) - (capture > 0)
    assert cuda.contexts == [0]


def test_a_graph_has_a_workspace_of_its_own(cuda: Driver, kernel: CudaKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    call = MoECall(*random_call(GEOMETRY, 1))
    for capture in (0, 7, 7, 8, 0):
        cuda.capture = capture
        kernel.run(call)
    outside, first, again, second, last = (record["workspace"] for _, _, record in cuda.launched)
    assert outside == last != first == again
    assert second != outside
    assert [capture for _, capture, _ in kernel._plan.workspaces] == [0, 8]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1)
    cuda.capture = 9
    kernel.run(call)
    assert [capture for _, capture, _ in kernel._plan.workspaces] == [0, 8, 9]  # those of another stream stay
    assert set(cuda.filled) == {FILLED}


def test_other_workspaces_lie_outside_the_pool_of_a_load(cuda: Driver, kernel: CudaKernel) -> None:
    """vLLM's sleep level 2 discards what a load allocated, and only the first call of a stream fills a workspace."""
    call = MoECall(*random_call(GEOMETRY, 2))
    for capture, inside in ((0, False), (7, True)):
        cuda.capture = capture
        with Allocations() as pool:
            kernel.run(call)
        size = kernel._plan.workspace_bytes[2][0]
        assert (size in [tensor.nbytes for tensor in pool.tensors]) == inside
    pool.discard()
    cuda.capture = 0
    kernel.run(call)
    (memory,) = (memory for (_, capture, _), (_, memory) in kernel._plan.workspaces.items() if not capture)
    assert cuda.launched[-1][2]["workspace"] == cuda.launched[0][2]["workspace"] == memory.data_ptr()
    assert cuda.filled[-1] == FILLED


def test_a_plan_keeps_no_weights(cuda: Driver) -> None:
    """The other families' are in ``test_addresses.py``."""
    assert weights_left([bound()], MoECall(*random_call(GEOMETRY, 2))) == []


def test_errors_after_a_call_that_was_right(cuda: Driver, kernel: CudaKernel) -> None:
    call = MoECall(*random_call(GEOMETRY, 2))
    kernel.run(call)
    wrong = {
        "x is torch.float16, expected torch.bfloat16": call._replace(x=call.x.half()),
        r"x has shape \(2, 64\), expected \(2, 128\)": call._replace(x=call.x[:, :64]),
        r"ids has shape \(2, 1\), expected \(2, 2\)": call._replace(ids=call.ids[:, :1]),
        r"out has shape \(1, 128\), expected \(2, 128\)": call._replace(out=call.x[:1]),
        "ids is on cuda:1, expected cpu": call._replace(ids=elsewhere(call.ids)),
        "router_weights is on cuda:1": call._replace(router_weights=elsewhere(call.router_weights)),
        "out is on cuda:1": call._replace(out=elsewhere(call.x)),
        "no kernel is planned for 0 tokens": MoECall(call.x[:0], call.ids[:0], call.router_weights[:0]),
    }
    for message, other in wrong.items():
        with pytest.raises(ValueError, match=message):
            kernel.run(other)
    assert len(cuda.launched) == 1
    cuda.code = 1
    with pytest.raises(driver.DriverError, match="cuLaunchKernelEx: 1"):
        kernel.run(call)


def test_the_count_of_a_stopped_launch_is_in_host_memory() -> None:
    """Engines build a model under a default device."""
    with torch.device("meta"):
        plan = LaunchPlan({}, {})
    assert plan.stuck.device.type == "cpu"


def test_a_launch_that_the_kernel_stopped(cuda: Driver, kernel: CudaKernel, caplog: pytest.LogCaptureFixture) -> None:
    """The next launch fails. Its error, and a line when the process ends, name the launch that did not end."""
    cuda.code = 719
    with pytest.raises(driver.DriverError, match="cuLaunchKernelEx: 719"):
        kernel.run(MoECall(*random_call(GEOMETRY, 1)))
    kernel._plan.stuck[0] = 2
    message = "2 tokens of 3 experts, top 2, 128 x 128, .*TRTLLM_B12X_KERNELS=b12x,triton,gemm,grouped"
    with pytest.raises(driver.DriverError, match=message):
        kernel.run(MoECall(*random_call(GEOMETRY, 1)))
    decode._report_stuck_launch(GEOMETRY, kernel._plan.stuck)
    (line,) = caplog.messages
    assert re.search(message, line)


class ProbedDriver(Driver):
    """Runs the probe: its sums are right, or those of a GPU that takes subnormals as zero."""

    taken, probes = True, 0

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: None) -> int:  # noqa: N802
        self.probes += 1
        results = ctypes.c_void_p.from_address(pointers._obj[1]).value
        (ctypes.c_int * 32).from_address(results or 0)[:] = [4 if self.taken else 2] * 32
        return 0


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ProbedDriver]:
    stand_in, stream = ProbedDriver(), SimpleNamespace(device=torch.device("cpu"), cuda_stream=1)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_library", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    takes_subnormals.cache_clear()
    yield stand_in
    takes_subnormals.cache_clear()


def test_a_plan_asks_the_tensor_cores(
    probed: ProbedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a process. The variant of one token is compiled for what they take; with TRTLLM_B12X_FREEZE it must be there."""
    target = "sm_90a"
    caplog.set_level("INFO")

    def plan() -> set[Path]:
        kernel = CudaKernel(Card(132, 228 << 10, 90))
        kernel.plan(FEW_VARIANTS, variant.TOKENS[-1], torch.device("cpu"))
        plan: LaunchPlan = kernel._plan
        assert plan.workspace_bytes == dict.fromkeys((1, 64), (4096, 2048))
        assert {(function.threads, function.shared_bytes) for function in plan.functions.values()} == {(96, 5000)}
        return set(tmp_path.rglob("*.cubin"))

    def files(*subnormals: bool) -> set[Path]:
        needed = [each for taken in subnormals for each in variant.variants(FEW_VARIANTS, FORMATS[0], taken)]
        return {each.file(target) for each in (PROBE, *needed)}

    monkeypatch.setenv("TRTLLM_B12X_FREEZE", "1")
    with pytest.raises(PlanError, match=r"is not compiled: TRTLLM_B12X_FREEZE=1 \(trtllm-b12x warmup .* --target sm_90a"):
        plan()
    monkeypatch.delenv("TRTLLM_B12X_FREEZE")
    assert plan() == files(True)
    monkeypatch.setenv("TRTLLM_B12X_FREEZE", "1")
    assert plan() == files(True)
    assert probed.probes == 1
    assert "subnormals" not in caplog.text

    takes_subnormals.cache_clear()  # as a process on another GPU
    probed.taken = False
    with pytest.raises(PlanError, match=r"TRTLLM_B12X_FREEZE=1 \(start once without it\)"):
        plan()
    monkeypatch.delenv("TRTLLM_B12X_FREEZE")
    assert plan() == plan() == files(True, False)
    assert probed.probes == 2
    assert sum("take bfloat16 subnormals as zero" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("name", ["x", "ids", "router_weights", "out"])
@pytest.mark.parametrize("form", ["strided", "unaligned", "wider"])
def test_a_tensor_of_another_form_is_copied(cuda: Driver, kernel: CudaKernel, name: str, form: str) -> None:
    """As ``prepared`` does. An ``x`` of another dtype is an error, and unaligned routes are read as they are."""
    call = MoECall(*random_call(GEOMETRY, 2), out=torch.zeros(2, 128, dtype=torch.bfloat16))
    tensor: torch.Tensor = getattr(call, name)
    if form == "strided":
        other = torch.zeros(2, 2 * tensor.shape[1], dtype=tensor.dtype)[:, ::2].copy_(tensor)
    elif form == "unaligned":
        other = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)
    else:
        other = tensor.to(torch.float64 if tensor.is_floating_point() else torch.int16)
    changed = call._replace(**{name: other})  # type: ignore[arg-type]
    if (name, form) == ("x", "wider"):
        with pytest.raises(ValueError, match=r"^x is torch\.float64"):
            kernel.run(changed)
        return
    assert kernel.run(changed) is changed.out
    ((_, _, record),) = cuda.launched
    copied = not (form == "unaligned" and name in ("ids", "router_weights"))
    assert (record[name] != other.data_ptr()) == copied
    assert all(record[rest] == getattr(call, rest).data_ptr() for rest in ("x", "ids", "router_weights", "out") if rest != name)
    assert record["wide_ids"] == ((name, form) == ("ids", "wider"))
