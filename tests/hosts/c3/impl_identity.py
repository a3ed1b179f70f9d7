"""Identities of leaves, ``provider.technique.kernel_name.quant``, and their registry; queries are not doubled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from .impl_contract import MoEInputRequirement, MoEStaticCapability
from .interface import MoESchedulerKind

T = TypeVar("T")


@dataclass(frozen=True)
class MoEImplId:
    provider: str
    technique: str
    kernel_name: str
    quant: str


@dataclass(frozen=True)
class MoEImplDescriptor:
    identity: MoEImplId
    scheduler_kind: MoESchedulerKind
    capabilities: MoEStaticCapability
    input_requirement: MoEInputRequirement
    doc: str = ""


class MoEImplRegistry:
    def __init__(self) -> None:
        self._store: dict[MoEImplId, Any] = {}

    def register(self, cls: type[T]) -> type[T]:
        descriptor: Any = cls.descriptor  # type: ignore[attr-defined]
        if descriptor.identity in self._store:
            raise ValueError(f"duplicate MoEImplId {descriptor.identity}: {cls.__name__}")
        self._store[descriptor.identity] = cls
        return cls

    def lookup(self, identity: MoEImplId) -> Any:
        return self._store.get(identity)


MOE_IMPL_REGISTRY = MoEImplRegistry()


def register_moe_impl(cls: type[T]) -> type[T]:
    return MOE_IMPL_REGISTRY.register(cls)
