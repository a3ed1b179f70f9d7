"""One layer: load it the way the host does, run it, measure it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trtllm_b12x import selection, strict_reference
from trtllm_b12x.checkpoint import Checkpoint, CheckpointError, LayerWeights, MoELayer
from trtllm_b12x.decision import RejectReason, Resolution, refused_by_hosts
from trtllm_b12x.dispatch import crossover, timing
from trtllm_b12x.dispatch.schedule import EVERY, HOSTS, default_crossover
from trtllm_b12x.eligibility import considered, resolve
from trtllm_b12x.host import embedded, questions
from trtllm_b12x.strict_reference import Arithmetic

from .bits import bits_exact, count_bytes, examine_codes, wrong_scalars
from .bounds import Tolerances, exceeds, misses, relative_l2, squares
from .draw import EXPERTS, Batch, Case, draw
from .report import BytesReport, CaseReport, LayerReport, Ranks

_SEVERAL = 8
"""Tokens of a call that tell what quantization costs the layer: 0.13 to 0.2 for sound ones; of single ones 0.6 was seen."""

_LOADED, _RUN, _JUDGED = 0.2, 0.6, 0.9
"""Shares of a layer's time that are over by then, roughly."""


@crossover.unmeasured()
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
    progress: Callable[[float], None] = lambda share: None,
) -> LayerReport:
    """Measure one layer.  Peak host memory is the layer's bytes, padded to the kernel's tile, and 200 MB.

    Every expert's codes, block scales and scales are compared; a case's tokens go to :data:`draw.EXPERTS` of the experts.
    A layer that the decision refuses is reported with its reasons and not run: the host's own class serves it.

    Args:
        progress: called with the share of the work that is done, from 0 to 1.

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
        activation=layer.activation.name,
        quant_algo=layer.quant_algo,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        served_by=next(iter(verdict.families), "cutlass"),
        reasons=[f"not {name}: {r}" if verdict.served else str(r) for name, r in verdict.refused],
        warnings=refused_by_hosts(questions.of_checkpoint(layer, ranks.tp, ranks.ep)[0]),
    )
    if not verdict.served:
        if require_b12x:
            report.failures.append("served by CUTLASS: " + "; ".join(report.reasons))
        return report
    weights = checkpoint.weights(layer)
    routing, batches = draw(checkpoint, layer, cases, seed, device)
    examine_codes(checkpoint, layer, report)
    outputs: list[Any] = [0.0] * len(batches)
    paths: list[set[str]] = [set() for _ in batches]
    rounding: dict[int, float] = {}
    features = {name: kernel.features for name, kernel in considered(device, layer.quant_algo).items()}
    eligible = [features[name] for name in verdict.families]
    limit = EVERY if any(found.every_count for found in eligible) else default_crossover(layer.top_k, eligible)
    if any(found.measured_from for found in eligible):
        limit = max(limit, timing.LARGEST + 1)
    points = {"cutlass": Arithmetic.CUTLASS}
    points |= {name: Arithmetic[found.arithmetic] for name, found in features.items()}
    kernels: set[str] = set()
    unplanned: set[int] = set()  # a FlashInfer that compiles for fixed sizes
    report.bytes = BytesReport(weights.nbytes, -weights.nbytes, 0, 0, 0)
    report.bits_exact = True
    steps, step = ranks.tp * ranks.ep * (len(batches) + 1), 0
    for mapping in ranks.mappings():
        module = _build(layer, routing, mapping, device)
        module.load_weights([weights])
        module.post_load_weights()
        schedule = module.backend.schedule
        if not schedule.kernels:
            report.failures.append(f"rank {mapping.rank} left {verdict.families[0]}: {module.backend.verdict}")
            report.served_by = "cutlass"
        else:
            kernels |= schedule.families.keys()
            report.scale_ratio = max(report.scale_ratio, module.backend.scale_ratio)
            if schedule.limited and schedule.below < limit:
                limit = schedule.below
                report.notes.append(f"{'+'.join(schedule.families)} serves fewer than {limit} tokens: {schedule.limited}")
            count_bytes(module.backend, report.bytes)
            report.bits_exact &= bits_exact(module.backend, weights, layer)
            wrong = wrong_scalars(module.backend, weights, layer)
            if wrong:
                report.failures.append(f"rank {mapping.rank}: {', '.join(wrong)} differ from the checkpoint's scales")
        step += 1
        progress(_LOADED + (_RUN - _LOADED) * step / steps)
        for index, batch in enumerate(batches):
            with kernel_calls(module.backend) as calls:
                outputs[index] = outputs[index] + module(batch.call.x, batch.logits).float()
            paths[index] |= set(calls) or {"cutlass"}
            tokens = cases[batch.case].tokens
            kernel = schedule.at(tokens)
            if kernel is not None:
                rounding[batch.case] = max(rounding.get(batch.case, 0.0), kernel.rounding(tokens))
            elif tokens < schedule.below:
                unplanned.add(batch.case)
            step += 1
            progress(_LOADED + (_RUN - _LOADED) * step / steps)
        del module
    if not report.bits_exact:
        report.failures.append("the kernel's codes or block scales differ from the checkpoint's")
    if report.bytes.extra_payload or report.bytes.extra_scales:
        report.failures.append("payload or block scales exist twice")
    if report.scale_ratio > 1:
        report.notes.append(
            f"gate and up have different weight_scale_2 (up to {report.scale_ratio:.3g} times): our kernels apply each, CUTLASS "
            "the larger one, so its calls are not compared"
        )
    run = sorted(_experts(batches, range(len(batches))))
    report.experts_run = len(run)
    form = strict_reference.judge(weights, layer.num_experts, layer.gated, layer.quant_algo)
    report.baked_weight_error = form.baked_weight_error(run[:EXPERTS], device)
    bounds = tolerances or Tolerances()
    if kernels and report.served_by != "cutlass":
        report.served_by = "+".join(name for name in verdict.families if name in kernels)
    _measure(weights, layer, cases, batches, outputs, paths, points, rounding, device, original, report, bounds, progress)
    for position, case in enumerate(report.cases):
        ours = case.tokens < limit and position not in unplanned
        expected = verdict.families if ours else ("cutlass",)
        if case.path not in expected:
            case.failures.append(f"served by {case.path}, not by {' or '.join(expected)}")
    if require_b12x and not any(case.path in verdict.families for case in report.cases):
        named = " or ".join(verdict.families)
        report.failures.append(f"no call of fewer than {limit} tokens, {named} was not run: add a smaller count to --tokens")
    progress(1.0)
    return report


def judge(layer: MoELayer, ranks: Ranks, device: str = "cpu") -> Resolution:
    """What the layer will get on every rank, from what the checkpoint alone tells, or why there is no judge of it."""
    found = resolve(questions.of_checkpoint(layer, ranks.tp, ranks.ep), considered(device, layer.quant_algo))
    unjudged = {
        RejectReason.ACTIVATION_CONSTANTS: layer.activation.constants and layer.activation.swiglu is None,
        RejectReason.ROUTER_WEIGHT_ON_INPUT: layer.apply_router_weight_on_input,
    }
    for reason in (reason for reason, there in unjudged.items() if there and found.served):
        named = " and ".join(found.families)
        return Resolution.left_to_the_host(reason, f"{named} serves it in TensorRT-LLM, and nothing here computes it to compare")
    return found


def _build(layer: MoELayer, routing: Any, mapping: Any, device: str) -> Any:
    """The layer as the host builds it with ``moe_backend: CUTLASS``, without weights."""
    selection.install()
    quant_config = embedded.QuantConfig(quant_algo=embedded.QuantAlgo(layer.quant_algo), group_size=layer.group_size)
    experts = layer.num_experts // mapping.moe_ep_size
    with torch.device(device):
        constants: dict[str, Any] = {
            name: torch.full((experts,), value, dtype=torch.float32)
            for name, value in zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), layer.activation.swiglu or (), strict=False)
        }
        return embedded.create_moe.create_moe(
            routing,
            layer.num_experts,
            layer.hidden_size,
            layer.intermediate_size,
            dtype=torch.bfloat16,
            model_config=embedded.ModelConfig(quant_config=quant_config, mapping=mapping, moe_backend="CUTLASS"),
            layer_idx=layer.index,
            activation_type=embedded.ActivationType[layer.activation.name],
            **constants,
        )


def _measure(
    weights: LayerWeights,
    layer: MoELayer,
    cases: Sequence[Case],
    batches: Sequence[Batch],
    outputs: Sequence[torch.Tensor],
    paths: Sequence[set[str]],
    points: Mapping[str, Arithmetic],
    rounding: dict[int, float],
    device: str,
    original: Checkpoint | None,
    report: LayerReport,
    bounds: Tolerances,
    progress: Callable[[float], None],
) -> None:
    """Every case's numbers, and what is beyond its bound."""
    served = ["+".join(sorted(found)) for found in paths]
    experts = sum(len(_experts(batches, [i for i, p in enumerate(served) if p == path])) for path in set(served))
    judged = 0

    def on_expert() -> None:
        nonlocal judged
        judged += 1
        progress(_RUN + (_JUDGED - _RUN) * judged / experts)

    strict: dict[int, list[torch.Tensor]] = {}
    for path in sorted(set(served)):
        mine = [index for index, p in enumerate(served) if p == path]
        arithmetics = [Arithmetic.NONE, Arithmetic.UNQUANTIZED, *([points[path]] if path in points else [])]
        calls = [batches[index].call for index in mine]
        found = strict_reference.outputs(
            weights, layer.num_experts, layer.gated, calls, arithmetics, device, on_expert, layer.quant_algo, *_computed(layer)
        )
        strict.update(zip(mine, found, strict=True))
    calls = [batch.call for batch in batches]
    plain = None if original is None else _against_original(original, weights, layer, calls, device, report, bounds)
    calibrated: list[tuple[int, tuple[torch.Tensor, ...]]] = []
    for position, case in enumerate(cases):
        mine = [index for index, batch in enumerate(batches) if batch.case == position]
        result = torch.cat([outputs[i] for i in mine])
        none, unquantized = (torch.cat([strict[i][a] for i in mine]) for a in (0, 1))
        path = "+".join(sorted(set().union(*(paths[i] for i in mine))))
        exact = torch.cat([strict[i][2] for i in mine]) if path in points else None
        wanted = None if plain is None else torch.cat([plain[i][0] for i in mine])
        case_report = CaseReport(
            tokens=case.tokens,
            outliers=case.outliers,
            calls=len(mine),
            experts=len(_experts(batches, mine)),
            path=path,
            rel_l2_none=relative_l2(result, none),
            error=relative_l2(result, unquantized),
            reference_error=relative_l2(none, unquantized),
            rel_l2_kernel=None if exact is None else relative_l2(result, exact),
            rounding=rounding.get(position, 0.0),
            original_error=None if wanted is None else relative_l2(result, wanted),
        )
        report.cases.append(case_report)
        if path == "cutlass" and report.scale_ratio > 1:
            continue
        quantizes = points.get(path) is not Arithmetic.UNQUANTIZED
        case_report.failures.extend(_failures(case_report, bounds, result, none, unquantized, exact, quantizes))
        if case.outliers <= 1:
            calibrated.append((case.tokens, (none, unquantized, result, *(() if wanted is None else (wanted,)))))
    if calibrated:
        # The largest activation of a call is the calibrated one: a single token is a large one, and saturates FC2's input.
        several = [parts for tokens, parts in calibrated if tokens >= _SEVERAL] or [parts for _, parts in calibrated]
        none, unquantized, result, *rest = (torch.cat(parts) for parts in zip(*several, strict=True))
        report.reference_error = relative_l2(none, unquantized)
        if not report.reference_error <= bounds.reference:
            report.failures.append(
                f"quantizing activations costs {100 * report.reference_error:.0f} % of the output (16 % is usual, "
                f"{100 * bounds.reference:.0f} % allowed): the input scales are not those of these weights"
            )
        for wanted in rest:
            error = relative_l2(result, wanted)
            if not error <= bounds.original:
                report.failures.append(
                    f"outputs differ from the original's by {100 * error:.0f} % (bound {100 * bounds.original:.0f} %)"
                )


def _experts(batches: Sequence[Batch], indices: Iterable[int]) -> set[int]:
    return set().union(*(batches[i].call.token_selected_experts.unique().tolist() for i in indices))


def _failures(
    case: CaseReport,
    bounds: Tolerances,
    result: torch.Tensor,
    none: torch.Tensor,
    unquantized: torch.Tensor,
    exact: torch.Tensor | None,
    quantizes: bool,
) -> Iterator[str]:
    """``quantizes``: what ran quantizes activations, as the float32 reference ``none`` does."""
    if exact is not None:
        bound = max(bounds.kernel, case.rounding)
        if misses(squares(result - exact), squares(exact), bound):
            yield f"rel_l2_kernel {case.rel_l2_kernel:.4g} > {bound:g}"
    if quantizes and exceeds(squares(result - none), bounds.none**2 * squares(none)):
        yield f"rel_l2_none {case.rel_l2_none:.4g} > {bounds.none:g}"
    ratio = bounds.ratio if quantizes else 1.0
    if exceeds(squares(result - unquantized), ratio**2 * squares(none - unquantized)):
        yield f"ratio {case.ratio:.4g} > {ratio:g}"


def _against_original(
    original: Checkpoint,
    weights: LayerWeights,
    layer: MoELayer,
    calls: Sequence[Any],
    device: str,
    report: LayerReport,
    bounds: Tolerances,
) -> list[list[torch.Tensor]]:
    """Compare every matrix; the original's outputs."""
    match = next((other for other in original.layers if _same_layer(other, layer)), None)
    if match is None:
        raise CheckpointError(
            f"{original.directory}: has no unquantized layer {layer.name} of the same sizes; "
            "give the unquantized model of this checkpoint"
        )
    plain, form = original.weights(match), strict_reference.judge(weights, layer.num_experts, layer.gated, layer.quant_algo)
    distance = norm = 0.0
    wrong = []
    for expert in range(layer.num_experts):
        for name, own in layer.projections.items():
            difference, size = strict_reference.weight_error(form, plain, expert, name, device)
            if not size < float("inf"):
                raise CheckpointError(f"{original.directory}: {layer.name} holds weights that are not finite; give a sound model")
            if not difference <= bounds.weight * size:
                share = f"by {100 * difference / size:.0f} %" if size else "from zeros"
                wrong.append(f"expert {expert} {own} {share}")
            distance, norm = distance + difference**2, norm + size**2
    report.weight_error = (distance / norm) ** 0.5 if norm else 0.0
    if wrong:
        listed = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        report.failures.append(f"weights differ from the original's (bound {100 * bounds.weight:.0f} %): {listed}")
    arithmetics = (Arithmetic.UNQUANTIZED,)
    name, swiglu = _computed(layer)
    return strict_reference.outputs(
        plain, layer.num_experts, layer.gated, calls, arithmetics, device, activation=name, swiglu=swiglu
    )


def _computed(layer: MoELayer) -> tuple[str, tuple[float, float, float] | None]:
    """Between the products, for the judge."""
    return layer.activation.name, layer.activation.swiglu


def _same_layer(other: MoELayer, layer: MoELayer) -> bool:
    """Unquantized, of the same sizes, under the same name but for the nesting of a multimodal model."""

    def identity(one: MoELayer) -> tuple[object, ...]:
        sizes = (one.num_experts, one.hidden_size, one.intermediate_size, one.gated)
        return one.name.replace("language_model.", ""), sizes

    return other.quant_algo == "none" and identity(other) == identity(layer)


@contextmanager
def kernel_calls(backend: Any) -> Iterator[list[str]]:
    """Families whose kernels were called, in order."""
    calls: list[str] = []
    schedule = getattr(backend, "schedule", HOSTS)

    def counting(name: str, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: (calls.append(name), run(*args, **kwargs))[1]  # type: ignore[func-returns-value]

    ways = ("run", "run_quantized")
    for name, kernel in schedule.families.items():
        for way in ways:
            setattr(kernel, way, counting(name, getattr(kernel, way)))
    try:
        yield calls
    finally:
        for kernel in schedule.kernels:
            for way in ways:
                delattr(kernel, way)
