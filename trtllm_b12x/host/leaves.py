"""Generation C3: CUTLASS is a class per quantization, and hosts choose among candidates that tables name.

``moe_resolution`` reads its tables at every call: ``IMPL_PRIORITY`` (who is asked first), ``BACKEND_FAMILY`` (what a backend's
name means) and ``FALLBACK_IMPLS`` (where other names end).  Our class stands in each right before the leaf it inherits, and
answers ``can_implement`` as the leaf does, then for itself.  So the host's report and fallback hold, and a layer may be bound
again.  Layers of a format that no leaf has a path for on this card (MXFP8) are its too, at every call.  A pinned ``impl_id``
reaches registered identities only: the leaf itself.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

from trtllm_b12x import formats

if TYPE_CHECKING:

    class _Leaf:
        @classmethod
        def can_implement(cls, p: Any, d: Any) -> Any: ...

        def _get_quant_method(self) -> Any: ...

else:
    _Leaf = object


class Candidate(_Leaf):
    """What the class says when the host asks whom to build."""

    @classmethod
    def can_implement(cls, p: Any, d: Any) -> Any:
        """``p`` (``MoEProblem``) and ``d`` (``MoEDeployment``) to the host's ``MoEEligibility``."""
        from trtllm_b12x import selection

        eligibility = super().can_implement(p, d)
        served = eligibility
        try:
            if not eligibility.eligible:
                if not _alone(p):
                    return eligibility
                served = type(eligibility).ok()
            refusal = selection.refusal(p, d)
        except Exception as error:
            selection.refuse(error)
            refusal = "promotion is off"
        if refusal is None:
            return served
        reason = importlib.import_module(type(eligibility).__module__).MoERejectReason.PATH_NOT_ENABLED
        return dataclasses.replace(eligibility, eligible=False, reject_reason=reason, detail=refusal)

    def _check_quant_config_is_my_format(self) -> None:
        """The leaf's check before it creates weights: it holds where the method is the leaf's."""

    def _get_quant_method(self) -> Any:
        getattr(super(), "_check_quant_config_is_my_format", lambda: None)()
        return super()._get_quant_method()


def _alone(p: Any) -> bool:
    """Of a format that hosts have no path for on our cards."""
    row = formats.find(p.quant or "")
    return row is not None and not row.hosts_path


def tables(package: str, leaf: type, ours: type) -> tuple[Any, dict[str, Any]]:
    """The module that holds them, and with ``ours`` those that are without it."""
    resolution = importlib.import_module(f"{package}.moe_resolution")
    joined: dict[str, Any] = {}
    for name in ("IMPL_PRIORITY", "FALLBACK_IMPLS"):
        classes = getattr(resolution, name)
        if ours not in classes:
            place = classes.index(leaf)
            joined[name] = (*classes[:place], ours, *classes[place:])
    family = resolution.BACKEND_FAMILY
    if ours not in family["CUTLASS"]:
        joined["BACKEND_FAMILY"] = {**family, "CUTLASS": family["CUTLASS"] | {ours}}
    return resolution, joined
