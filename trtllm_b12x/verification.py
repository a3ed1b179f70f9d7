"""Load one MoE layer the way the host does, run it, and measure it against :mod:`trtllm_b12x.strict_reference`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from . import host as _host
from . import selection, strict_reference
from .checkpoint import Checkpoint, CheckpointError, MoELayer
from .decision import Problem, decide
from .kernels import environment, kernel_class
from .kernels.layout import plain_scales
from .strict_reference import Arithmetic, Call

MAX_CALLS = 16
"""Calls of one token count at most; as many as it takes to reach every expert, so that small counts are no single draw."""


@dataclass(frozen=True)
class Tolerances:
    """Relative L2 bounds.

    ``kernel``: a b12x call against the reference with the kernels' rounding points.  ``none``: any call against float32.
    ``ratio``: error against unquantized activations, over that of the float32 reference with quantized ones.
    """

    kernel: float = 0.005
    none: float = 0.05
    ratio: float = 1.03


@dataclass(frozen=True)
class Case:
    """Token count of a call and the largest activation, in multiples of what the layer was calibrated for."""

    tokens: int
    amplitude: float = 0.97


@dataclass
class CaseReport:
    tokens: int
    amplitude: float
    calls: int
    experts: int
    """Experts that received a token."""
    path: str
    """``b12x``, ``cutlass``, or both if calls differed."""
    rel_l2_none: float
    error: float
    """Against the same layer with unquantized activations."""
    reference_error: float
    """The float32 reference's own."""
    rel_l2_kernel: float | None = None
    """Only for b12x."""
    original_error: float | None = None
    """Against the unquantized model."""
    failures: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return self.error / self.reference_error if self.reference_error else math.inf if self.error else 1.0


@dataclass
class BytesReport:
    """Bytes of one layer."""

    checkpoint: int
    """FP4 payload and block scales as the checkpoint has them."""
    padding: int
    """What the module's payload and block scales hold beyond those."""
    extra_payload: int
    """Payload the kernel reads outside the module's parameters."""
    extra_scales: int
    scalars: int
    """Per-expert values beside the host's own."""


@dataclass
class LayerReport:
    name: str
    index: int
    activation: str
    quant_algo: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    served_by: str
    reasons: list[str]
    bytes: BytesReport | None = None
    bits_exact: bool | None = None
    """The kernel reads the checkpoint's FP4 codes and block scales, every one, and zeros beside them."""
    baked_weight_error: float | None = None
    weight_error: float | None = None
    """Of the NVFP4 weights against the unquantized model."""
    cases: list[CaseReport] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures and not any(case.failures for case in self.cases)


def verify_layer(
    checkpoint: Checkpoint,
    layer: MoELayer,
    cases: Sequence[Case],
    *,
    seed: int = 0,
    device: str = "cpu",
    require_b12x: bool = False,
    original: Checkpoint | None = None,
    tolerances: Tolerances | None = None,
    on_expert: Callable[[], None] = lambda: None,
) -> LayerReport:
    """Measure one layer.  Peak host memory is under two layers' bytes.

    Raises:
        CheckpointError: a tensor is unusable.
    """
    report = LayerReport(
        name=layer.name,
        index=layer.index,
        activation=layer.activation,
        quant_algo=layer.quant_algo,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        served_by="cutlass",
        reasons=[],
    )
    module = build_layer(checkpoint, layer, device, report)
    if module is not None:
        weights = checkpoint.weights(layer)
        if report.served_by == "b12x":
            report.bytes = _bytes(module.backend, weights.nbytes)
            report.bits_exact = _bits_exact(module.backend, weights, layer)
            if not report.bits_exact:
                report.failures.append("the kernel's FP4 codes or block scales differ from the checkpoint's")
            if report.bytes.extra_payload or report.bytes.extra_scales:
                report.failures.append("payload or block scales exist twice")
        projections = tuple(layer.projections)
        report.baked_weight_error = strict_reference.baked_weight_error(weights, layer.num_experts, projections, device)
        _measure(checkpoint, layer, module, cases, seed, device, original, report, on_expert)
        bounds = tolerances or Tolerances()
        for case in report.cases:
            case.failures.extend(_failures(case, bounds))
    if require_b12x and report.served_by != "b12x":
        report.failures.append("served by CUTLASS: " + "; ".join(report.reasons))
    return report


def build_layer(checkpoint: Checkpoint, layer: MoELayer, device: str, report: LayerReport) -> Any:
    """The layer as the host builds and loads it with ``moe_backend: CUTLASS``; None where the host has no such layer.

    Fills ``served_by`` and ``reasons`` of the report.
    """
    host = _host.load()
    if layer.quant_algo != "NVFP4" or layer.activation not in host.ActivationType.__members__:
        problem = Problem(quant_algo=layer.quant_algo, group_size=layer.group_size, activation=layer.activation)
        verdict = decide(problem, environment=environment(kernel_class().features))
        report.reasons = list(map(str, verdict.rejections))
        return None
    selection.install()
    quant_config = host.QuantConfig(quant_algo=host.QuantAlgo.NVFP4, group_size=layer.group_size)
    bias = checkpoint.router_bias(layer)
    routing = (
        host.RenormalizeMoeRoutingMethod(layer.top_k)
        if bias is None
        else host.DeepSeekV3MoeRoutingMethod(layer.top_k, bias.to(device))
    )
    with torch.device(device):
        module = host.create_moe.create_moe(
            routing,
            layer.num_experts,
            layer.hidden_size,
            layer.intermediate_size,
            dtype=torch.bfloat16,
            model_config=host.ModelConfig(quant_config=quant_config, moe_backend="CUTLASS"),
            layer_idx=layer.index,
            activation_type=host.ActivationType[layer.activation],
        )
    module.load_weights([checkpoint.weights(layer)])
    module.post_load_weights()
    kernel = getattr(module.backend, "kernel", None)
    report.served_by = "cutlass" if kernel is None else "b12x"
    judged = getattr(module.backend, "verdict", None)
    report.reasons = [] if judged is None else list(map(str, judged.rejections))
    return module


def draw_activations(
    tokens: int, hidden_size: int, input_scale: float, amplitude: float, generator: torch.Generator
) -> torch.Tensor:
    """Normal bf16 activations ``(tokens, hidden_size)`` whose largest value is ``amplitude`` times what was calibrated.

    ``input_scale`` is amax / (6 * 448) of the calibration.  No value sits on a rounding tie.
    """
    x = torch.randn(tokens, hidden_size, generator=generator)
    x = (x * (amplitude * input_scale * 6 * 448 / x.abs().max())).to(torch.bfloat16)
    return strict_reference.move_off_ties(x, input_scale)


def draw_router_logits(tokens: int, num_experts: int, top_k: int, first: int, generator: torch.Generator) -> torch.Tensor:
    """Router logits ``(tokens, num_experts)``: half of each token's experts in turn from expert ``first``, half at random."""
    logits = torch.randn(tokens, num_experts, generator=generator)
    turns = _experts_in_turn(top_k)
    chosen = (first + torch.arange(tokens * turns)).view(tokens, turns) % num_experts
    return logits.scatter_add_(1, chosen, torch.full(chosen.shape, 8.0))


def _experts_in_turn(top_k: int) -> int:
    return max(1, top_k // 2)


def _measure(
    checkpoint: Checkpoint,
    layer: MoELayer,
    module: Any,
    cases: Sequence[Case],
    seed: int,
    device: str,
    original: Checkpoint | None,
    report: LayerReport,
    on_expert: Callable[[], None],
) -> None:
    weights = checkpoint.weights(layer)
    fc1 = [name for name in layer.projections if name != "w2"]
    input_scale = max(float(weights[f"{e}.{w}.input_scale"]) for e in range(layer.num_experts) for w in fc1)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer.index)
    calls: list[Call] = []
    ours: list[torch.Tensor] = []
    owner: list[int] = []
    for position, case in enumerate(cases):
        reached = case.tokens * _experts_in_turn(layer.top_k)
        number = min(MAX_CALLS, -(-layer.num_experts // reached))
        paths = set()
        experts: set[int] = set()
        for index in range(number):
            x = draw_activations(case.tokens, layer.hidden_size, input_scale, case.amplitude, generator).to(device)
            logits = draw_router_logits(case.tokens, layer.num_experts, layer.top_k, index * reached, generator).to(device)
            with _kernel_calls(module.backend) as count:
                ours.append(module(x, logits).float())
            paths.add("b12x" if count() else "cutlass")
            ids, scales = module.routing_method.apply(logits)
            experts.update(ids.unique().tolist())
            calls.append(Call(x, ids, scales))
            owner.append(position)
        report.cases.append(CaseReport(case.tokens, case.amplitude, number, len(experts), "+".join(sorted(paths)), 0.0, 0.0, 0.0))
    sizes = (layer.num_experts, layer.gated, calls)
    arithmetics = (Arithmetic.NONE, Arithmetic.KERNEL, Arithmetic.UNQUANTIZED)
    strict = strict_reference.outputs(weights, *sizes, arithmetics, device, on_expert)
    plain = None
    if original is not None:
        match = next((other for other in original.layers if other.name == layer.name), None)
        if match is None or match.projections != layer.projections:
            raise CheckpointError(
                f"{original.directory}: has no layer like {layer.name}; give the unquantized model of this checkpoint"
            )
        plain_weights = original.weights(match)
        plain = strict_reference.outputs(plain_weights, *sizes, (Arithmetic.UNQUANTIZED,), device)
        report.weight_error = strict_reference.weight_error(
            weights, plain_weights, layer.num_experts, tuple(layer.projections), device
        )
    for position, case_report in enumerate(report.cases):
        mine = [i for i, own in enumerate(owner) if own == position]
        result = torch.cat([ours[i] for i in mine])
        none, kernel, unquantized = (torch.cat([strict[i][a] for i in mine]) for a in range(3))
        case_report.rel_l2_none = relative_l2(result, none)
        case_report.error = relative_l2(result, unquantized)
        case_report.reference_error = relative_l2(none, unquantized)
        if case_report.path == "b12x":
            case_report.rel_l2_kernel = relative_l2(result, kernel)
        if plain is not None:
            case_report.original_error = relative_l2(result, torch.cat([plain[i][0] for i in mine]))


def relative_l2(value: torch.Tensor, reference: torch.Tensor) -> float:
    """``|value - reference| / |reference|``; NaN or inf anywhere makes it infinite, so that no bound admits it."""
    if not bool(value.isfinite().all()):
        return math.inf
    norm = float(reference.double().norm())
    difference = float((value.double() - reference.double()).norm())
    return difference / norm if norm else (math.inf if difference else 0.0)


def _failures(case: CaseReport, bounds: Tolerances) -> Iterator[str]:
    checks = [("rel_l2_none", case.rel_l2_none, bounds.none), ("ratio", case.ratio, bounds.ratio)]
    if case.rel_l2_kernel is not None:
        checks.append(("rel_l2_kernel", case.rel_l2_kernel, bounds.kernel))
    for name, value, bound in checks:
        if not value <= bound:
            yield f"{name} {value:.4g} > {bound:g}"
    if "+" in case.path:
        yield "calls of one token count took different paths"


@contextmanager
def _kernel_calls(backend: Any) -> Iterator[Callable[[], int]]:
    """Counts the calls that reach the layer's kernel."""
    kernel = getattr(backend, "kernel", None)
    count = 0
    if kernel is None:
        yield lambda: 0
        return
    run = kernel.run

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return run(*args, **kwargs)

    kernel.run = counted
    try:
        yield lambda: count
    finally:
        del kernel.run


def _bytes(backend: Any, checkpoint_bytes: int) -> BytesReport:
    def nbytes(tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    own = {p.untyped_storage().data_ptr() for p in backend.parameters()}
    kernel_weights = backend.kernel.weights.tensors()
    stored = sum(nbytes(getattr(backend, n)) for n in ("w3_w1_weight", "w2_weight", "w3_w1_weight_scale", "w2_weight_scale"))

    def extra(*names: str) -> int:
        foreign = (kernel_weights[n] for n in names)
        return sum(nbytes(t) for t in foreign if t.untyped_storage().data_ptr() not in own)

    return BytesReport(
        checkpoint=checkpoint_bytes,
        padding=stored - checkpoint_bytes,
        extra_payload=extra("w1_weight", "w2_weight"),
        extra_scales=extra("w1_weight_sf", "w2_weight_sf"),
        scalars=sum(nbytes(b) for b in backend.buffers()),
    )


def _bits_exact(backend: Any, weights: Any, layer: MoELayer) -> bool:
    """Compare what the kernel reads, byte by byte, with the checkpoint."""
    tensors = backend.kernel.weights
    scales1, scales2 = (plain_scales(sf).view(torch.uint8) for sf in (tensors.w1_weight_sf, tensors.w2_weight_sf))
    halves = ("w3", "w1") if layer.gated else ("w1",)
    for slot, expert in enumerate(backend.initial_local_expert_ids):
        for fc1, fc2, kind in (
            (tensors.w1_weight[slot], tensors.w2_weight[slot], "weight"),
            (scales1[slot], scales2[slot], "weight_scale"),
        ):
            for half, rows in zip(halves, fc1.chunk(len(halves)), strict=True):
                if not _holds(rows, weights[f"{expert}.{half}.{kind}"]):
                    return False
            if not _holds(fc2, weights[f"{expert}.w2.{kind}"]):
                return False
    return True


def _holds(padded: torch.Tensor, plain: torch.Tensor) -> bool:
    """``plain`` is the upper left corner of ``padded`` (uint8), and the rest is zero."""
    rows, columns = plain.shape
    corner = padded[:rows, :columns]
    return (
        bool(torch.equal(corner, plain.view(torch.uint8).to(padded.device)))
        and not bool(padded[rows:].any())
        and not bool(padded[:, columns:].any())
    )
