# SPDX-License-Identifier: Apache-2.0
"""Verify one layer: load it as TensorRT-LLM does, run it, compare its numbers and its bytes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from trtllm_b12x.decision import RejectReason, Resolution, refused_by_hosts
from trtllm_b12x.dispatch import crossover, timing
from trtllm_b12x.dispatch.layer import LIKE
from trtllm_b12x.dispatch.schedule import EMPTY_SCHEDULE, EVERY, default_crossover
from trtllm_b12x.engines.trtllm import build_layer, promote
from trtllm_b12x.engines.trtllm.machine import candidate_kernels, resolve
from trtllm_b12x.kernels import Kernel
from trtllm_b12x.tools.checkpoint import Checkpoint, CheckpointError, LayerWeights, MoELayer
from trtllm_b12x.tools.options import Ranks

from . import reference
from .bounds import Tolerances, exceeds, relative_l2
from .draw import Batch, Case, draw
from .reference import Arithmetic, ReferenceDequantizer
from .report import BytesReport, CaseReport, LayerReport

_SEVERAL = 8
"""Fewest tokens of a call from which the cost of quantization is measured: 0.13 to 0.2. A single token has cost 0.6."""

_ARITHMETICS = (Arithmetic.NONE, Arithmetic.UNQUANTIZED, Arithmetic.KERNEL)
"""Rounding points that every call is computed with."""


@crossover.unmeasured()
def verify_layer(
    checkpoint: Checkpoint,
    layer: MoELayer,
    cases: Sequence[Case],
    *,
    ranks: Ranks = Ranks(),  # noqa: B008 - frozen; simulated one after the other, their outputs summed in float32
    seed: int = 0,
    device: str = "cpu",
    require_b12x: bool = False,
    original: Checkpoint | None = None,
) -> LayerReport:
    """Verify one layer. Peak host memory is the layer's bytes, padded to the kernel's tile, and 200 MB.

    Every expert's codes, block scales and scales are compared; the tokens of a case go to 16 experts. Cases that no kernel
    serves are left out. A layer that CUTLASS serves is reported with its reasons and not run; with ``require_b12x`` it fails.
    ``original`` is the unquantized model. Raise UnusableError if a tensor is unusable, or the ranks do not divide the layer.
    """
    ranks.expect_to_divide(layer.shape)
    verdict = resolve_on_ranks(checkpoint, layer, ranks, device)
    report = LayerReport(
        layer,
        served_by=next(iter(verdict.families), "cutlass"),
        reasons=[f"not {name}: {r}" if verdict.served else str(r) for name, r in verdict.refused],
        warnings=refused_by_hosts(layer.shape, ranks.deployment, verdict.served),
    )
    if not verdict.served:
        if require_b12x:
            report.failures.append("served by CUTLASS: " + "; ".join(report.reasons))
        return report
    run = _Run(checkpoint, layer, cases, verdict.families, report, seed, device)
    run.on_ranks(ranks)
    if run.batches:
        run.compare(original)
    else:
        named = " or ".join(verdict.families)
        message = f"{named} serves no count of --tokens, so it was not run: add a count from {run.first} to {run.limit - 1}"
        (report.failures if require_b12x else report.notes).append(message)
    return report


def resolve_on_ranks(checkpoint: Checkpoint, layer: MoELayer, ranks: Ranks, device: str = "cpu") -> Resolution:
    """Return which families serve the layer on every rank, judged from the checkpoint, and why others do not.

    Refuse a layer that the reference cannot compute.
    """
    shape = replace(layer.shape, unequal_scales=checkpoint.unequal_scales(layer))
    verdict = resolve((shape, ranks.deployment), candidate_kernels(device, layer.quant_algo))
    if not verdict.served:
        return verdict
    if layer.activation_constants and layer.swiglu is None:
        reason = RejectReason.ACTIVATION_CONSTANTS
    elif layer.apply_router_weight_on_input:
        reason = RejectReason.ROUTER_WEIGHT_ON_INPUT
    else:
        return verdict
    detail = f"{' and '.join(verdict.families)} serves it in TensorRT-LLM, but verify has no reference for it"
    return Resolution.left_to_the_host(reason, detail)


class _Run:
    """Calls of one layer, run on one rank after the other and then compared."""

    bounds = Tolerances()

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: MoELayer,
        cases: Sequence[Case],
        families: tuple[str, ...],
        report: LayerReport,
        seed: int,
        device: str,
    ) -> None:
        self.layer, self.families, self.report, self.device = layer, families, report, device
        self.weights = checkpoint.weights(layer)
        self.batches = draw(checkpoint, layer, cases, seed, device)
        self.counts = {case.tokens for case in cases}
        self.quantized = True  # the format quantizes activations
        features = {name: kernel.features for name, kernel in candidate_kernels(device, layer.quant_algo).items()}
        self.arithmetics = {name: Arithmetic[feature.arithmetic] for name, feature in features.items()}
        eligible = [features[name] for name in families]
        # Kernels should serve the token counts from first to limit - 1.
        self.first = min(f.measured_from or 1 for f in eligible)
        self.limit = EVERY if any(f.every_count for f in eligible) else default_crossover(layer.top_k, eligible)
        if any(f.measured_from for f in eligible):
            self.limit = max(self.limit, timing.LARGEST + 1)

    def on_ranks(self, ranks: Ranks) -> None:
        """Load the layer on each rank, compare its bits, and run the calls that kernels should serve."""
        layer, report = self.layer, self.report
        if zeros := zero_matrices(self.weights, layer):
            report.failures.append(f"{_listed(zeros)}: all zero, whatever the input")
        total = report.bytes = BytesReport(self.weights.nbytes, -self.weights.nbytes, 0, 0)
        report.bits_exact = True
        kernels: set[str] = set()
        for rank in range(ranks.tp * ranks.ep):
            module = self._load(ranks, rank)
            backend, schedule = module.backend, getattr(module.backend, "schedule", EMPTY_SCHEDULE)
            kernels |= schedule.families.keys() or {"cutlass"}
            if schedule.kernels:
                report.scale_ratio = max(report.scale_ratio, backend.scale_ratio)
                count_bytes(backend, total)
                report.bits_exact &= bits_exact(backend, self.weights, layer)
                if wrong := wrong_scalars(backend, self.weights, layer):
                    report.failures.append(f"rank {rank}: {', '.join(wrong)} differ from the checkpoint's scales")
            else:
                report.failures.append(f"rank {rank} left {self.families[0]}: {getattr(backend, 'verdict', 'CUTLASS was built')}")
            if schedule.limited and schedule.below < self.limit:
                self.limit = schedule.below
                report.notes.append(f"{'+'.join(kernels)} serves fewer than {self.limit} tokens: {schedule.limited}")
            # CUTLASS is meant to serve a count below the schedule's end that has no kernel.
            served = {tokens: schedule.at(tokens) is not None or tokens >= schedule.below for tokens in self.counts}
            self.batches = [batch for batch in self.batches if batch.case.tokens < self.limit and served[batch.case.tokens]]
            for batch in self.batches:
                with kernel_calls(backend) as calls:
                    batch.output = batch.output + module(batch.call.x, batch.logits).float()
                batch.families |= set(calls) or {"cutlass"}
                if isinstance(kernel := schedule.at(batch.case.tokens), Kernel):
                    batch.rounding = max(batch.rounding, kernel.rounding(batch.case.tokens))
            del module, backend, schedule
        if kernels == {"cutlass"}:
            report.bytes = None
        report.served_by = "cutlass" if "cutlass" in kernels else "+".join(name for name in self.families if name in kernels)
        if not report.bits_exact:
            report.failures.append("the kernel's codes or block scales differ from the checkpoint's")
        if total.extra:
            report.failures.append("payload or block scales exist twice")

    def _load(self, ranks: Ranks, rank: int) -> Any:
        """Build the layer as TensorRT-LLM does with ``moe_backend: CUTLASS``, and load it."""
        layer = self.layer
        promote.install()
        # TensorRT-LLM's models leave out alpha 1 and beta 0, too.
        swiglu = zip(("alpha", "beta", "limit"), layer.swiglu or (), (1.0, 0.0, None), strict=False)
        constants = {name: value for name, value, usual in swiglu if value != usual}
        with torch.device(self.device):
            module = build_layer.create(layer.shape, ranks.tp, ranks.ep, rank, constants, layer_idx=layer.index)
        module.load_weights([self.weights])
        module.post_load_weights()
        return module

    def compare(self, original: Checkpoint | None) -> None:
        """Report the error of every case, and every error beyond its bound."""
        layer, report, bounds = self.layer, self.report, self.bounds
        experts = sorted(_experts(self.batches))
        dequantizer = reference.reference_for(self.weights, layer.num_experts, layer.gated, layer.quant_algo)
        report.experts_run, self.quantized = len(experts), dequantizer.quantized
        self._add_references(self.weights, _ARITHMETICS)
        if report.scale_ratio > LIKE:
            self._measure_cutlass()
        if original is not None:
            self._add_references(self._original_weights(dequantizer, original), [Arithmetic.UNQUANTIZED])
        for case in dict.fromkeys(batch.case for batch in self.batches):
            report.cases.append(self._compare_case(case, [batch for batch in self.batches if batch.case == case]))
        calibrated = [batch for batch in self.batches if batch.case.outliers <= 1]
        # The largest activation of a call is the calibrated maximum, so a single token is large and saturates FC2's input.
        several = [batch for batch in calibrated if batch.case.tokens >= _SEVERAL] or calibrated
        if not several:
            return
        output, none, unquantized, *_, last = _joined(several)
        cost = relative_l2(none, unquantized)
        report.reference_error = cost if self.quantized else None
        if not cost <= bounds.reference:
            report.failures.append(
                f"quantizing activations costs {100 * cost:.0f} % of the output (16 % is usual, "
                f"{100 * bounds.reference:.0f} % allowed): the input scales are not those of these weights"
            )
        error = relative_l2(output, last) if original is not None else 0.0
        if not error <= bounds.original:
            report.failures.append(
                f"outputs differ from the original's by {100 * error:.0f} % (bound {100 * bounds.original:.0f} %)"
            )

    def _outputs(self, weights: Mapping[str, torch.Tensor], arithmetics: Sequence[Arithmetic]) -> list[list[torch.Tensor]]:
        layer, calls = self.layer, [batch.call for batch in self.batches]
        form = layer.quant_algo, layer.activation, layer.swiglu
        return reference.outputs(weights, layer.num_experts, layer.gated, calls, arithmetics, self.device, *form)

    def _add_references(self, weights: Mapping[str, torch.Tensor], arithmetics: Sequence[Arithmetic]) -> None:
        for batch, references in zip(self.batches, self._outputs(weights, arithmetics), strict=True):
            batch.references += references

    def _measure_cutlass(self) -> None:
        """Report CUTLASS's error against float32 if gate and up have different scales: CUTLASS uses the larger for both."""
        report, larger = self.report, dict[str, torch.Tensor]()
        for expert in range(self.layer.num_experts):
            names = [f"{expert}.{half}.weight_scale_2" for half in ("w1", "w3")]
            larger |= dict.fromkeys(names, torch.maximum(*(self.weights[name] for name in names)))
        theirs = torch.cat([output for (output,) in self._outputs({**self.weights, **larger}, [Arithmetic.CUTLASS])])
        report.cutlass_error = relative_l2(theirs, torch.cat([batch.references[0] for batch in self.batches]))
        report.notes.append(
            f"gate and up have different weight_scale_2 (up to {report.scale_ratio:.3g} times): our kernels apply each, CUTLASS "
            f"the larger one, which is off by {100 * report.cutlass_error:.0f} %"
        )

    def _compare_case(self, case: Case, batches: Sequence[Batch]) -> CaseReport:
        output, *references = _joined(batches)
        none, unquantized, *_ = references
        path = "+".join(sorted(set().union(*(batch.families for batch in batches))))
        arithmetic = self.arithmetics.get(path)
        exact = None if arithmetic is None else references[_ARITHMETICS.index(arithmetic)]
        report = CaseReport(
            tokens=case.tokens,
            outliers=case.outliers,
            calls=len(batches),
            experts=len(_experts(batches)),
            path=path,
            rel_l2_none=relative_l2(output, none),
            error=relative_l2(output, unquantized),
            reference_error=relative_l2(none, unquantized) if self.quantized else None,
            rel_l2_kernel=None if exact is None else relative_l2(output, exact),
            rounding=max(batch.rounding for batch in batches),
            original_error=relative_l2(output, references[-1]) if len(references) > len(_ARITHMETICS) else None,
        )
        quantizes = arithmetic is not Arithmetic.UNQUANTIZED  # if not, the quantizing reference sets no bound
        report.bound = max(self.bounds.kernel if quantizes else self.bounds.unquantized, report.rounding)
        if exact is not None and exceeds(output, exact, report.bound):
            report.failures.append(f"rel_l2_kernel {report.rel_l2_kernel:.4g} > {report.bound:g}")
        none_bound, ratio_bound = self.bounds.of(len(output)) if quantizes else (math.inf, 1.0)
        for name, value, bound in (("rel_l2_none", report.rel_l2_none, none_bound), ("ratio", report.ratio, ratio_bound)):
            if value is not None and not value <= bound:
                report.failures.append(f"{name} {value:.4g} > {bound:.4g}")
        if path not in self.families:
            report.failures.append(f"served by {path}, not by {' or '.join(self.families)}")
        return report

    def _original_weights(self, dequantizer: ReferenceDequantizer, original: Checkpoint) -> LayerWeights:
        """Return the original model's weights. Report every matrix that differs from its original."""
        layer, report, bound = self.layer, self.report, self.bounds.weight
        match = next((other for other in original.layers if _same_layer(other, layer)), None)
        if match is None:
            problem = f"has no unquantized layer {layer.name} of the same sizes"
            raise CheckpointError(original.directory, problem, "give the unquantized model of this checkpoint")
        plain = original.weights(match)
        distance = norm = 0.0
        wrong = []
        for expert, (projection, name) in itertools.product(range(layer.num_experts), layer.projections.items()):
            exact = plain[f"{expert}.{projection}.weight"].to(self.device).float()
            difference = float((dequantizer.matrix(expert, projection).to(self.device) - exact).norm())
            size = float(exact.norm())
            if not difference <= bound * size < math.inf:
                wrong.append(f"expert {expert} {name} {f'by {100 * difference / size:.0f} %' if size else 'from zeros'}")
            distance, norm = distance + difference**2, norm + size**2
        report.weight_error = (distance / norm) ** 0.5 if norm else 0.0
        if wrong:
            report.failures.append(f"weights differ from the original's (bound {100 * bound:.0f} %): {_listed(wrong)}")
        return plain


def _joined(batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Concatenate the outputs of calls, and each of their references."""
    return [torch.cat(parts) for parts in zip(*((batch.output, *batch.references) for batch in batches), strict=True)]


def _experts(batches: Iterable[Batch]) -> set[int]:
    return set().union(*(batch.call.token_selected_experts.unique().tolist() for batch in batches))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _same_layer(other: MoELayer, layer: MoELayer) -> bool:
    """Return whether ``other`` is unquantized and has the same sizes and name, except for the nesting of multimodal models."""
    identities = {
        (each.name.replace("language_model.", ""), each.num_experts, each.hidden_size, each.intermediate_size, each.gated)
        for each in (other, layer)
    }
    return other.quant_algo == "none" and len(identities) == 1


@contextmanager
def kernel_calls(backend: Any) -> Iterator[list[str]]:
    """Record the families whose kernels are called, in order."""
    calls: list[str] = []
    schedule = getattr(backend, "schedule", EMPTY_SCHEDULE)

    def counted(name: str, run: Callable[[Any], torch.Tensor], call: Any) -> torch.Tensor:
        calls.append(name)
        return run(call)

    for name, kernel in schedule.families.items():
        kernel.run = functools.partial(counted, name, kernel.run)  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        for kernel in schedule.kernels:
            del kernel.run


# ---- the weights that a kernel reads, byte by byte ---------------------------------------------------------------------------


def zero_matrices(weights: LayerWeights, layer: MoELayer) -> list[str]:
    """Return the names of expert matrices whose codes or scales are all zero: no input reaches their output."""
    kinds = set(layer.kinds) - {"input_scale", "bias"}
    return [
        f"expert {expert} {name}"
        for expert in range(layer.num_experts)
        for projection, name in layer.projections.items()
        if not all(bool(weights[f"{expert}.{projection}.{kind}"].reshape(-1).view(torch.uint8).any()) for kind in kinds)
    ]


def count_bytes(backend: Any, total: BytesReport) -> None:
    parameters = {p.untyped_storage().data_ptr() for p in backend.parameters()}
    weights, tensors = backend.kernel.weights, backend.kernel.weights.tensors()
    read = [tensors[name] for name in weights.stored_fields]
    total.padding += sum(getattr(backend, name).nbytes for name in backend.quant_method.stored)
    total.extra += sum(tensor.nbytes for tensor in read if tensor.untyped_storage().data_ptr() not in parameters)
    total.scalars += backend.quant_method.scalar_bytes(backend)


def bits_exact(backend: Any, weights: LayerWeights, layer: MoELayer) -> bool:
    """Return whether the kernel reads the checkpoint's codes and block scales, and zeros in the padding."""
    tensors = backend.kernel.weights
    halves = ("w3", "w1") if layer.gated else ("w1",)
    first, last = _part(backend, layer)
    for slot, expert in enumerate(backend.initial_local_expert_ids):
        for kind, (fc1, fc2) in tensors.stored(slot).items():
            for half, rows in zip(halves, fc1.chunk(len(halves)), strict=True):
                if not _holds(rows, weights[f"{expert}.{half}.{kind}"][first:last]):
                    return False
            down = weights[f"{expert}.w2.{kind}"]
            per_column = layer.intermediate_size // down.shape[1]
            if not _holds(fc2, down[:, first // per_column : last // per_column]):
                return False
    return True


def _part(backend: Any, layer: MoELayer) -> tuple[int, int]:
    """Return first and end of the layer's intermediate columns that this rank holds.

    Most methods split the size over tensor-parallel ranks and pad each part. MXFP4's method pads the whole, then splits.
    """
    from trtllm_b12x.engines.trtllm.quantization import PaddedMethod

    size = layer.intermediate_size // backend.tp_size
    if not isinstance(backend.quant_method, PaddedMethod):
        size = backend.quant_method.intermediate_size(backend)
    first = min(size * backend.tp_rank, layer.intermediate_size)
    return first, min(first + size, layer.intermediate_size)


def wrong_scalars(backend: Any, weights: LayerWeights, layer: MoELayer) -> list[str]:
    """Return the names of the kernel's per-expert scales that differ from the checkpoint's for at least one expert."""
    dequantizer = reference.reference_for(weights, layer.num_experts, layer.gated, layer.quant_algo)
    expected = dequantizer.scalars(backend.initial_local_expert_ids)
    actual = {name: tensor.double().cpu() for name, tensor in backend.kernel.weights.tensors().items() if name in expected}
    return [name for name, value in expected.items() if not torch.allclose(actual[name], value, rtol=3e-5, atol=1e-45)]


def _holds(padded: torch.Tensor, plain: torch.Tensor) -> bool:
    """Return whether ``padded`` (uint8) has ``plain`` in its upper left corner and zeros elsewhere."""
    expected = torch.zeros_like(padded)
    expected[: plain.shape[0], : plain.shape[1]] = plain.contiguous().view(torch.uint8)
    return torch.equal(padded, expected)
