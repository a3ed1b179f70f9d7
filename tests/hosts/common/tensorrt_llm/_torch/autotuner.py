"""The part of the autotuner that a call reaches: profiles for shapes.  Before PR 12310, hence unguarded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(unsafe_hash=True)
class DynamicTensorSpec:
    input_idx: int
    dim_idx: int
    gen_tuning_buckets: Any = ()
    map_to_tuning_buckets: Callable[[int], int] = lambda x: x


@dataclass(unsafe_hash=True)
class ConstraintSpec:
    input_idx: int
    dim_idx: int
    infer_shape: Callable[[Any], int]


class AutoTuner:
    _instance: AutoTuner | None = None

    def __init__(self) -> None:
        self.is_tuning_mode = False

    @classmethod
    def get(cls) -> AutoTuner:
        if cls._instance is None:
            cls._instance = AutoTuner()
        return cls._instance

    @classmethod
    @cache
    def _find_nearest_profile(
        cls,
        shapes: tuple[Any, ...],
        dynamic_tensor_specs: tuple[DynamicTensorSpec, ...],
        constraint_specs: tuple[ConstraintSpec, ...],
        tune_max_num_tokens: int | None = None,
        apply_map_to_tuning_buckets: bool = True,
    ) -> tuple[Any, ...]:
        profile = [list(shape) for shape in shapes]
        for spec in dynamic_tensor_specs:
            if apply_map_to_tuning_buckets:
                profile[spec.input_idx][spec.dim_idx] = spec.map_to_tuning_buckets(profile[spec.input_idx][spec.dim_idx])
            if tune_max_num_tokens is not None:
                profile[spec.input_idx][spec.dim_idx] = min(profile[spec.input_idx][spec.dim_idx], tune_max_num_tokens)
        for constraint in constraint_specs:
            if profile[constraint.input_idx] != [0]:
                profile[constraint.input_idx][constraint.dim_idx] = -1
        return tuple(tuple(shape) for shape in profile)


@contextlib.contextmanager
def autotune(tune_mode: bool = True) -> Iterator[None]:
    tuner = AutoTuner.get()
    tuner.is_tuning_mode = tune_mode
    try:
        yield
    finally:
        tuner.is_tuning_mode = False
