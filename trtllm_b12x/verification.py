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
from .crossover import crossover
from .decision import Deployment, Problem, Verdict, decide
from .kernels import environment, kernel_class
from .kernels.layout import plain_scales
from .strict_reference import Arithmetic, Call

MIN_TOKENS = 64
"""A case makes as many calls as it takes to reach every expert and this many tokens.  Over fewer tokens one code that
rounds the other way shows: 0.07 was seen for 5 tokens where 64 give 0.03."""

OUTLIER_CHANNELS = 128
"""One channel in so many carries the large activations, eight times the others', as in real models."""


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
    """Token count of a call, and its outlier channels in multiples of what the layer was calibrated for."""

    tokens: int
    outliers: float = 0.97


@dataclass
class CaseReport:
    tokens: int
    outliers: float
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
    rounding: float = 0.0
    """What of it the kernel explains (:meth:`trtllm_b12x.kernels.Kernel.rounding`): the bound where that is more."""
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


@dataclass(frozen=True)
class Ranks:
    """Tensor- and expert-parallel ranks, simulated one after the other; their outputs are summed in float32."""

    tp: int = 1
    ep: int = 1

    def mappings(self) -> Iterator[Any]:
        for rank in range(self.tp * self.ep):
            size = self.tp * self.ep
            yield _host.load().Mapping(world_size=size, rank=rank, tp_size=size, moe_tp_size=self.tp, moe_ep_size=self.ep)


def verify_layer(
    checkpoint: Checkpoint,
    layer: MoELayer,
    cases: Sequence[Case],
    *,
    ranks: Ranks | None = None,
    seed: int = 0,
    device: str = "cpu",
    require_b12x: bool = False,
    original: Checkpoint | None = None,
    tolerances: Tolerances | None = None,
    on_expert: Callable[[], None] = lambda: None,
) -> LayerReport:
    """Measure one layer.  Peak host memory is under two layers' bytes, padded to the kernel's tile.

    A layer that the decision refuses is reported with its reasons and not run: the host's own class serves it.

    Raises:
        CheckpointError: a tensor is unusable, or the ranks do not divide the layer.
    """
    ranks = ranks or Ranks()
    for size, parts, what in ((layer.intermediate_size, ranks.tp, "tp"), (layer.num_experts, ranks.ep, "ep")):
        if size % parts:
            raise CheckpointError(f"--{what} {parts}: {layer.name} has {size} to divide; choose a divisor")
    verdict = judge(layer, ranks, device)
    report = LayerReport(
        name=layer.name,
        index=layer.index,
        activation=layer.activation,
        quant_algo=layer.quant_algo,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        served_by="b12x" if verdict.served else "cutlass",
        reasons=list(map(str, verdict.rejections)),
    )
    if not verdict.served:
        if require_b12x:
            report.failures.append("served by CUTLASS: " + "; ".join(report.reasons))
        return report
    weights = checkpoint.weights(layer)
    routing, batches = _draw(checkpoint, layer, cases, seed, device)
    outputs: list[Any] = [0.0] * len(batches)
    paths: list[set[str]] = [set() for _ in batches]
    rounding: dict[int, float] = {}
    unplanned: set[int] = set()  # a FlashInfer that compiles for fixed sizes
    report.bytes = BytesReport(weights.nbytes, -weights.nbytes, 0, 0, 0)
    report.bits_exact = True
    for mapping in ranks.mappings():
        module = _build(layer, routing, mapping, device)
        module.load_weights([weights])
        module.post_load_weights()
        if module.backend.kernel is None:
            report.served_by = "cutlass"
            report.failures.append(f"rank {mapping.rank} left b12x: {module.backend.verdict}")
        else:
            _count_bytes(module.backend, report.bytes)
            report.bits_exact &= _bits_exact(module.backend, weights, layer)
            wrong = _wrong_scalars(module.backend, weights, layer)
            if wrong:
                report.failures.append(f"rank {mapping.rank}: {', '.join(wrong)} differ from the checkpoint's scales")
        for index, batch in enumerate(batches):
            with _kernel_calls(module.backend) as count:
                outputs[index] = outputs[index] + module(batch.call.x, batch.logits).float()
            paths[index].add("b12x" if count() else "cutlass")
            kernel, tokens = module.backend.kernel, cases[batch.case].tokens
            if kernel is not None and kernel.serves(tokens):
                rounding[batch.case] = max(rounding.get(batch.case, 0.0), kernel.rounding(tokens))
            elif kernel is not None and tokens <= kernel.capacity:
                unplanned.add(batch.case)
        del module
    if not report.bits_exact:
        report.failures.append("the kernel's FP4 codes or block scales differ from the checkpoint's")
    if report.bytes.extra_payload or report.bytes.extra_scales:
        report.failures.append("payload or block scales exist twice")
    projections = tuple(layer.projections)
    report.baked_weight_error = strict_reference.baked_weight_error(weights, layer.num_experts, projections, device)
    _measure(weights, layer, cases, batches, outputs, paths, device, original, report, on_expert)
    bounds = tolerances or Tolerances()
    for position, case in enumerate(report.cases):
        case.rounding = rounding.get(position, 0.0)
        case.failures.extend(_failures(case, bounds))
        expected = "b12x" if case.tokens < crossover(report.top_k) and position not in unplanned else "cutlass"
        if case.path != expected:
            case.failures.append(f"served by {case.path}, not by {expected}")
    _judge_coverage(report, batches, require_b12x)
    return report


def _judge_coverage(report: LayerReport, batches: Sequence[_Batch], require_b12x: bool) -> None:
    """A pass means that b12x ran where it should, and that every expert was reached."""
    if require_b12x and not any(case.path == "b12x" for case in report.cases):
        limit = crossover(report.top_k)
        report.failures.append(f"no call of fewer than {limit} tokens, b12x was not run: add a smaller count to --tokens")
    reached = set().union(*(batch.call.token_selected_experts.unique().tolist() for batch in batches))
    if len(reached) < report.num_experts:
        report.failures.append(f"only {len(reached)} of {report.num_experts} experts were reached")


def judge(layer: MoELayer, ranks: Ranks, device: str = "cpu") -> Verdict:
    """The verdict that the layer will get on every rank, from what the checkpoint alone tells."""
    return decide(problem_of(layer, ranks), Deployment(ranks.tp, ranks.ep), environment(kernel_class(device)))


def problem_of(layer: MoELayer, ranks: Ranks) -> Problem:
    """What one rank has to compute of the layer."""
    return Problem(
        quant_algo=layer.quant_algo,
        group_size=layer.group_size,
        activation_dtype="bfloat16",
        activation=layer.activation,
        activation_constants=layer.activation_constants,
        pre_quant_scale=layer.pre_quant_scale,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size // ranks.tp,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        bias=layer.bias,
        apply_router_weight_on_input=layer.apply_router_weight_on_input,
    )


def _build(layer: MoELayer, routing: Any, mapping: Any, device: str) -> Any:
    """The layer as the host builds it with ``moe_backend: CUTLASS``, without weights."""
    host = _host.load()
    selection.install()
    quant_config = host.QuantConfig(quant_algo=host.QuantAlgo.NVFP4, group_size=layer.group_size)
    with torch.device(device):
        return host.create_moe.create_moe(
            routing,
            layer.num_experts,
            layer.hidden_size,
            layer.intermediate_size,
            dtype=torch.bfloat16,
            model_config=host.ModelConfig(quant_config=quant_config, mapping=mapping, moe_backend="CUTLASS"),
            layer_idx=layer.index,
            activation_type=host.ActivationType[layer.activation],
        )


@dataclass(frozen=True)
class _Batch:
    """One call: the case it belongs to, router logits ``(T, E)``, and what the router makes of them."""

    case: int
    logits: torch.Tensor
    call: Call


def _draw(checkpoint: Checkpoint, layer: MoELayer, cases: Sequence[Case], seed: int, device: str) -> tuple[Any, list[_Batch]]:
    """A routing method and every call of every case.  The model's own router is not under test, its experts are."""
    routing = _host.load().RenormalizeMoeRoutingMethod(layer.top_k)
    weights = checkpoint.weights(layer)
    fc1 = [name for name in layer.projections if name != "w2"]
    scales = torch.tensor([[float(weights[f"{e}.{w}.input_scale"]) for w in fc1] for e in range(layer.num_experts)])
    if not torch.allclose(scales, scales[:, :1]):
        raise CheckpointError(
            f"{checkpoint.directory}: {layer.name} has experts whose gate and up differ in input_scale, which TensorRT-LLM "
            "refuses to load; export the model again"
        )
    input_scale = float(scales.max())
    if not input_scale:
        raise CheckpointError(
            f"{checkpoint.directory}: every input_scale of {layer.name} is 0; calibrate and export the model again"
        )
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer.index)
    batches = []
    for position, case in enumerate(cases):
        reached = case.tokens * _experts_in_turn(layer.top_k)
        for index in range(max(-(-layer.num_experts // reached), -(-MIN_TOKENS // case.tokens))):
            x = draw_activations(case.tokens, layer.hidden_size, input_scale, case.outliers, generator).to(device)
            logits = draw_router_logits(case.tokens, layer.num_experts, layer.top_k, index * reached, generator).to(device)
            batches.append(_Batch(position, logits, Call(x, *routing.apply(logits))))
    return routing, batches


def draw_activations(
    tokens: int, hidden_size: int, input_scale: float, outliers: float, generator: torch.Generator
) -> torch.Tensor:
    """bf16 activations ``(tokens, hidden_size)`` with a few outlier channels, as the layers of real models see them.

    ``input_scale`` is amax / (6 * 448) of the calibration: the largest value is 0.97 of that amax, and ``outliers`` times it
    where that is more, which moves the outlier channels alone.  No value sits on a rounding tie.
    """
    x = torch.randn(tokens, hidden_size, generator=generator)
    channels = torch.randperm(hidden_size, generator=generator)[: -(-hidden_size // OUTLIER_CHANNELS)]
    x[:, channels] *= 8
    x *= 0.97 * input_scale * 6 * 448 / x.abs().max()
    if outliers > 1:
        x[:, channels] *= outliers / 0.97
    return strict_reference.move_off_ties(x.to(torch.bfloat16), input_scale)


def draw_router_logits(tokens: int, num_experts: int, top_k: int, first: int, generator: torch.Generator) -> torch.Tensor:
    """Router logits ``(tokens, num_experts)``: half of each token's experts in turn from expert ``first``, half at random."""
    logits = torch.randn(tokens, num_experts, generator=generator)
    turns = _experts_in_turn(top_k)
    chosen = (first + torch.arange(tokens * turns)).view(tokens, turns) % num_experts
    return logits.scatter_add_(1, chosen, torch.full(chosen.shape, 8.0))


def _experts_in_turn(top_k: int) -> int:
    return max(1, top_k // 2)


def _measure(
    weights: Any,
    layer: MoELayer,
    cases: Sequence[Case],
    batches: Sequence[_Batch],
    outputs: Sequence[torch.Tensor],
    paths: Sequence[set[str]],
    device: str,
    original: Checkpoint | None,
    report: LayerReport,
    on_expert: Callable[[], None],
) -> None:
    sizes = (layer.num_experts, layer.gated, [batch.call for batch in batches])
    arithmetics = (Arithmetic.NONE, Arithmetic.KERNEL, Arithmetic.UNQUANTIZED)
    strict = strict_reference.outputs(weights, *sizes, arithmetics, device, on_expert)
    plain = None
    if original is not None:
        match = next((other for other in original.layers if _same_layer(other, layer)), None)
        if match is None:
            raise CheckpointError(
                f"{original.directory}: has no unquantized layer {layer.name} of the same sizes; "
                "give the unquantized model of this checkpoint"
            )
        plain_weights = original.weights(match)
        plain = strict_reference.outputs(plain_weights, *sizes, (Arithmetic.UNQUANTIZED,), device)
        projections = tuple(layer.projections)
        report.weight_error = strict_reference.weight_error(weights, plain_weights, layer.num_experts, projections, device)
        if not math.isfinite(report.weight_error):
            raise CheckpointError(f"{original.directory}: {layer.name} holds weights that are not finite; give a sound model")
    for position, case in enumerate(cases):
        mine = [index for index, batch in enumerate(batches) if batch.case == position]
        result = torch.cat([outputs[i] for i in mine])
        none, kernel, unquantized = (torch.cat([strict[i][a] for i in mine]) for a in range(3))
        path = "+".join(sorted(set().union(*(paths[i] for i in mine))))
        report.cases.append(
            CaseReport(
                tokens=case.tokens,
                outliers=case.outliers,
                calls=len(mine),
                experts=len(set().union(*(batches[i].call.token_selected_experts.unique().tolist() for i in mine))),
                path=path,
                rel_l2_none=relative_l2(result, none),
                error=relative_l2(result, unquantized),
                reference_error=relative_l2(none, unquantized),
                rel_l2_kernel=relative_l2(result, kernel) if path == "b12x" else None,
                original_error=None if plain is None else relative_l2(result, torch.cat([plain[i][0] for i in mine])),
            )
        )


def _same_layer(other: MoELayer, layer: MoELayer) -> bool:
    """Unquantized, of the same sizes, under the same name but for the nesting of a multimodal model."""

    def identity(one: MoELayer) -> tuple[object, ...]:
        sizes = (one.num_experts, one.hidden_size, one.intermediate_size, one.gated)
        return one.name.replace("language_model.", ""), sizes

    return other.quant_algo == "none" and identity(other) == identity(layer)


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
        checks.append(("rel_l2_kernel", case.rel_l2_kernel, max(bounds.kernel, case.rounding)))
    for name, value, bound in checks:
        if not value <= bound:
            yield f"{name} {value:.4g} > {bound:g}"


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


def _count_bytes(backend: Any, total: BytesReport) -> None:
    """Add one rank's bytes."""
    own = {p.untyped_storage().data_ptr() for p in backend.parameters()}
    weights = backend.kernel.weights.tensors()

    def extra(*names: str) -> int:
        return sum(weights[n].nbytes for n in names if weights[n].untyped_storage().data_ptr() not in own)

    parameters = ("w3_w1_weight", "w2_weight", "w3_w1_weight_scale", "w2_weight_scale")
    total.padding += sum(getattr(backend, name).nbytes for name in parameters)
    total.extra_payload += extra("w1_weight", "w2_weight")
    total.extra_scales += extra("w1_weight_sf", "w2_weight_sf")
    named = (*backend.named_parameters(), *backend.named_buffers())
    total.scalars += sum(tensor.nbytes for name, tensor in named if name.startswith("b12x_"))


def _bits_exact(backend: Any, weights: Any, layer: MoELayer) -> bool:
    """Compare what the kernel reads, byte by byte, with the checkpoint."""
    tensors = backend.kernel.weights
    scales1, scales2 = (plain_scales(sf).view(torch.uint8) for sf in (tensors.w1_weight_sf, tensors.w2_weight_sf))
    halves = ("w3", "w1") if layer.gated else ("w1",)
    size = layer.intermediate_size // backend.tp_size
    first = size * backend.tp_rank
    for slot, expert in enumerate(backend.initial_local_expert_ids):
        for fc1, fc2, kind, per_column in (
            (tensors.w1_weight[slot], tensors.w2_weight[slot], "weight", 2),
            (scales1[slot], scales2[slot], "weight_scale", 16),
        ):
            for half, rows in zip(halves, fc1.chunk(len(halves)), strict=True):
                if not _holds(rows, weights[f"{expert}.{half}.{kind}"][first : first + size]):
                    return False
            columns = slice(first // per_column, (first + size) // per_column)
            if not _holds(fc2, weights[f"{expert}.w2.{kind}"][:, columns]):
                return False
    return True


def _wrong_scalars(backend: Any, weights: Any, layer: MoELayer) -> list[str]:
    """Names of the kernel's per-expert scales that are not the checkpoint's, for any expert: a global error hides small ones."""

    def scales(name: str, kind: str, experts: Sequence[int]) -> torch.Tensor:
        return torch.tensor([float(weights[f"{e}.{name}.{kind}"]) for e in experts], dtype=torch.float64)

    everyone, local = range(layer.num_experts), backend.initial_local_expert_ids
    fc1 = scales("w1", "input_scale", everyone).max()
    fc2 = scales("w2", "input_scale", everyone).max()
    gate = scales("w1", "weight_scale_2", local)
    up = scales("w3", "weight_scale_2", local) if layer.gated else gate
    product = (gate != 0) & (up != 0)
    ratio = torch.where(product, up / gate.where(product, torch.ones_like(gate)), torch.ones_like(gate))
    expected = {
        "input_global_scale": fc1.expand(len(local)),
        "folded_w1_alpha": torch.where(product, gate, torch.zeros_like(gate)) * fc1,
        "fc2_input_scale": fc2 / ratio,
        "w2_alpha": scales("w2", "weight_scale_2", local) * fc2,
    }
    found = backend.kernel.weights.tensors()
    return [n for n, value in expected.items() if not torch.allclose(found[n].double().cpu(), value, rtol=2e-6, atol=1e-45)]


def _holds(padded: torch.Tensor, plain: torch.Tensor) -> bool:
    """``plain`` is the upper left corner of ``padded`` (uint8), and the rest is zero."""
    rows, columns = plain.shape
    corner = padded[:rows, :columns]
    return (
        bool(torch.equal(corner, plain.contiguous().view(torch.uint8).to(padded.device)))
        and not bool(padded[rows:].any())
        and not bool(padded[:, columns:].any())
    )
