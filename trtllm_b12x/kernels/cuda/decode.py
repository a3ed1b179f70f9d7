# SPDX-License-Identifier: Apache-2.0
"""Decode of 1 to 64 tokens in one launch (``layer.cu``), on the engine's own tensors: NVFP4, W4A16_NVFP4, MXFP4 and MXFP8.

Numerics are those of the Triton kernels. The docstring of ``triton/decode.py`` describes them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any, ClassVar

import torch

from trtllm_b12x.core import settings
from trtllm_b12x.core.log import logger
from trtllm_b12x.decision import Environment, families
from trtllm_b12x.formats import constants
from trtllm_b12x.kernels import Geometry, MoECall, driver
from trtllm_b12x.kernels import reference as in_torch
from trtllm_b12x.kernels.cards import warmup_command
from trtllm_b12x.kernels.plans import Plan
from trtllm_b12x.kernels.self_test import SelfTestResult, run_quick_self_test

from . import records
from .probe import PROBE, takes_subnormals
from .variant import MOST_BLOCKS, SPIN_SECONDS, TOKENS, NvrtcKernel, Variant, load, variants

_HEADER = 1024  # bytes of counters at a workspace's start, which begin as zeros; the filled rest begins as ones
_INT32, _FLOAT32 = torch.int32, torch.float32
_Form = tuple[tuple[int, int] | None, int, list[Callable[..., None]]]
"""Shape of the ids, None if calls have logits; tokens of the variant; its launches of unquantized and of quantized input."""
_Owner = tuple[int, int, int]  # tokens of the variant, capture (0 outside) and stream


@dataclass
class LaunchPlan(Plan):
    functions: dict[int, driver.Function]
    """Functions by the maximum number of tokens of a call."""
    workspace_bytes: dict[int, tuple[int, int]]
    """Total bytes, and bytes that begin as zeros or ones, by the same number."""
    workspaces: dict[_Owner, tuple[int, torch.Tensor]] = field(default_factory=dict)
    """Address and memory of each workspace. Launches that may overlap never share a workspace."""
    stuck: torch.Tensor = field(  # engines set a default device
        default_factory=lambda: torch.zeros(1, dtype=_INT32, device="cpu", pin_memory=torch.cuda.is_available())
    )
    """Number of tokens of a launch that did not end and stopped itself, else 0. The kernel writes it to this host memory."""


class CudaKernel(NvrtcKernel):
    """Decode of NVFP4 layers."""

    features = families.cuda(Environment())
    reference: ClassVar[type[in_torch.ReferenceKernel]] = in_torch.UnquantizedReferenceKernel
    takes_logits = True
    gathers = False
    """Whether calls of few tokens gather too."""
    _plan: LaunchPlan
    _launches: dict[tuple[int, ...], _Form]  # by the shape of the output
    _gathering: dict[tuple[int, ...], _Form]  # the same for the variant that gathers
    _at: int  # index of the weights' device

    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Compile the variants, or share what another layer compiled."""
        self.describe(geometry, capacity, device)
        self._share((type(self), geometry, str(device)), self._make_plan)

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        super().describe(geometry, min(capacity, TOKENS[-1]), device)
        self._variants = variants(geometry, self.number_format())

    def variants(self) -> tuple[Variant, ...]:
        """Return the variants for cards whose tensor cores take bfloat16 subnormals. ``_make_plan`` probes its card."""
        return self._variants

    def _make_plan(self) -> LaunchPlan:
        started, needed = time.monotonic(), self.variants()
        with torch.cuda.device(self.device):
            device = torch.cuda.current_stream().device  # makes the context that modules are loaded into
            remedy = warmup_command(self.geometry, self.card)
            (probe,) = load((PROBE,), self.target, remedy)
            if not takes_subnormals(device, probe):
                # The warmup command does not probe, since it compiles for cards that may be absent.
                needed, remedy = variants(self.geometry, self.number_format(), False), "start once without it"
            cubins = load(needed, self.target, remedy)
            modules = {variant.tokens: driver.Module(cubin) for variant, cubin in zip(needed, cubins, strict=True)}
        functions = {tokens: driver.Function(module, "layer") for tokens, module in modules.items()}
        sizes = {tokens: (m.constant("workspace_bytes"), m.constant("filled_bytes")) for tokens, m in modules.items()}
        logger.info("cuda kernels for %s: %d in %.1f s", self.geometry, len(functions), time.monotonic() - started)
        plan = LaunchPlan(functions, sizes)
        # ``Finalize`` also runs in processes that multiprocessing forked, which skip ``atexit``. It keeps the tensor for graphs
        # that outlive the plan.
        Finalize(None, _report_stuck_launch, (self.geometry, plan.stuck), exitpriority=0)
        return plan

    def bind(self, weights: Any, first_expert: int = 0) -> None:
        self._tensors, layers = records.layers_of(self.geometry, weights, self._plan.stuck, first_expert)
        self._at = weights.fc1_weight.get_device()
        launches: dict[tuple[int, ...], _Form] = {}
        for size, function in reversed(self._plan.functions.items()):
            both = [function.launcher(min(self.card.multiprocessors, MOST_BLOCKS), layer, records.CALL) for layer in layers]
            for tokens in range(1, min(size, self.capacity) + 1):
                # ``MoECall.prepared`` refuses a call without logits if the layer takes logits.
                routes = (tokens, self.geometry.top_k) if self.geometry.scoring is None else None
                launches[tokens, self.geometry.hidden_size] = routes, size, both
            if size == TOKENS[-1]:
                self._gathering = dict(launches)
        self._launches, self.weights, self.first_expert = launches, weights, first_expert

    def forms(self) -> Mapping[str, CudaKernel]:
        """Return this kernel, and a copy that gathers an expert's routes in calls of few tokens too."""
        gathering = copy.copy(self)
        gathering.gathers, gathering._launches = True, self._gathering
        return {"": self} | ({"gathering": gathering} if self._most_apart > 1 else {})

    @property
    def _most_apart(self) -> int:
        return min(self.capacity, max((tokens for tokens in self._plan.functions if tokens != TOKENS[-1]), default=0))

    def _test(self) -> list[SelfTestResult] | None:
        tested = {tokens: [self] for tokens in TOKENS if tokens <= self.capacity}
        for kernel in self.forms().values():
            if kernel.gathers:
                tested.setdefault(self._most_apart, [self]).append(kernel)
        return run_quick_self_test(self, self.reference(), self.first_expert, tested)

    def serves(self, tokens: int) -> bool:
        return self._plan.tested and super().serves(tokens) and (not self.gathers or 1 < tokens <= self._most_apart)

    def run(self, call: MoECall) -> torch.Tensor:
        x, ids, router_weights, x_sf, swizzled, given, _, logits, bias, padding = call
        geometry, device, at, out, wide, half = self.geometry, self._at, x.data_ptr(), given, False, False
        form, dtype = self._launches.get(x.shape), geometry.dtype
        # The usual tensors skip ``prepared`` after the same checks here: each access to a tensor takes 0.1 us.
        if (
            form is not None and logits is None and x_sf is None and x.dtype is dtype
            and ids.shape == form[0] == router_weights.shape and ids.dtype is _INT32 and router_weights.dtype is _FLOAT32
            and not at % 16 and x.is_contiguous() and ids.is_contiguous() and router_weights.is_contiguous()
            and device == x.get_device() == ids.get_device() == router_weights.get_device()
            and (
                out is None or (out.dtype is dtype and out.shape == x.shape and out.is_contiguous() and not out.data_ptr() % 16
                                and out.get_device() == device)
            )
        ):  # fmt: skip
            if out is None:
                out = x.new_empty(x.shape)
        else:
            prepared = call.prepared(geometry, self.features.quantized_input, device)
            x, ids, router_weights, x_sf, swizzled, out, _, logits, bias, padding = prepared
            assert out is not None
            at, wide, half = x.data_ptr(), ids.dtype is torch.int64, router_weights.dtype is torch.bfloat16
            if logits is not None:
                ids, router_weights = logits, logits if bias is None else bias
                wide, half = False, logits.dtype is torch.bfloat16
            form = self._launches.get(out.shape)
            if form is None:
                raise ValueError(f"no kernel is planned for {len(x)} tokens, only for 1 to {self.capacity}")
        _, size, launches = form
        plan, stream = self._plan, torch._C._cuda_getCurrentRawStream(device)
        # The legacy default stream, 0, cannot be captured.
        owner = size, driver.capture_of(stream) if stream and torch.cuda.is_current_stream_capturing() else 0, stream
        workspace, _ = plan.workspaces.get(owner) or self._workspace(owner)
        try:
            launches[x_sf is not None](
                stream, at, 0 if x_sf is None else x_sf.data_ptr(), ids.data_ptr(), router_weights.data_ptr(),
                0 if padding is None else padding.data_ptr(), out.data_ptr(), workspace, out.shape[0],
                wide, half, 1 if swizzled else 0,
            )  # fmt: skip
        except driver.DriverError as error:
            raise driver.DriverError(_stuck_launch(geometry, plan.stuck) or str(error)) from None
        return out if given is None or given is out else given.copy_(out)  # the kernel cannot write ``given``

    def _workspace(self, owner: _Owner) -> tuple[int, torch.Tensor]:
        """Allocate the workspace of a stream, or of a graph that is being captured.

        A graph owns its workspace, and fills it at each replay, since both fills are captured. So workspaces of the stream's
        earlier captures are left to their graphs. Other workspaces are filled only once, so no engine's pool may hold them.
        """
        plan, (tokens, capture, stream) = self._plan, owner
        for old in [other for other in plan.workspaces if other[2] == stream and other[1] not in (0, capture)]:
            del plan.workspaces[old]
        size, filled = plan.workspace_bytes[tokens]
        if capture:
            plan.functions[tokens].module.keep()

        def make() -> torch.Tensor:
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            memory[:_HEADER], memory[_HEADER:filled] = 0, 255
            return memory

        memory = make() if capture else constants.outside_pools(make, self.device)
        plan.workspaces[owner] = memory.data_ptr(), memory
        return plan.workspaces[owner]


def _stuck_launch(geometry: Geometry, stuck: torch.Tensor) -> str:
    """Describe the launch of this geometry that the kernel stopped; empty if no launch was stopped."""
    if not (tokens := int(stuck)):
        return ""
    others = ",".join(name for name in settings.FAMILIES if name != CudaKernel.features.name)
    return (
        f"the cuda kernel stopped a launch that did not end within {SPIN_SECONDS} s: {tokens} tokens of {geometry}. This "
        f"process can no longer use the GPU. Restart with {settings.KERNELS.name}={others} to leave the kernel out; "
        "please report this line"
    )


def _report_stuck_launch(geometry: Geometry, stuck: torch.Tensor) -> None:
    if message := _stuck_launch(geometry, stuck):
        logger.error(message)


class CudaW4A16Kernel(CudaKernel):
    features = families.cuda_w4a16(Environment())
    reference = in_torch.W4A16UnquantizedReferenceKernel


class CudaMXFP4Kernel(CudaKernel):
    features = families.cuda_mxfp4(Environment())
    reference = in_torch.MXFP4UnquantizedReferenceKernel


class CudaMXFP8Kernel(CudaKernel):
    features = families.cuda_mxfp8(Environment())
    reference = in_torch.MXFP8UnquantizedReferenceKernel
