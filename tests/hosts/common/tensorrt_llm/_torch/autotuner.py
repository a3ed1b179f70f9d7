# SPDX-License-Identifier: Apache-2.0
"""The part of the autotuner that a call reaches: a tactic for the shapes of an operator.

Source: id 3648310208.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(unsafe_hash=True)
class DynamicTensorSpec:
    input_idx: int
    dim_idx: int
    gen_tuning_buckets: Any = ()
    map_to_tuning_buckets: Callable[[int], int] = lambda x: x


@dataclass(frozen=True)
class TuningConfig:
    dynamic_tensor_specs: tuple[DynamicTensorSpec, ...] = ()
    tune_max_num_tokens: int | None = None


class AutoTuner:
    _instance = None

    def __init__(self):
        self.is_tuning_mode = False
        self.cache = {}
        self.missed = []
        """What was asked for outside of tuning and not tuned before: the host warns, and takes the fallback."""

    def choose_one(self, custom_op, runners, tuning_config, inputs, **kwargs):
        """Runner and tactic.  While it tunes, every bucket up to the given size is profiled."""
        shapes = [tuple(tensor.size()) if isinstance(tensor, torch.Tensor) else (0,) for tensor in inputs]
        specs = tuning_config.dynamic_tensor_specs
        wanted = self._key(custom_op, shapes, specs, tuning_config.tune_max_num_tokens)
        if wanted not in self.cache and self.is_tuning_mode:
            for spec in specs:
                for size in spec.gen_tuning_buckets(shapes[spec.input_idx][spec.dim_idx]):
                    shape = list(shapes[spec.input_idx])
                    shape[spec.dim_idx] = size
                    profile = [*shapes[: spec.input_idx], tuple(shape), *shapes[spec.input_idx + 1 :]]
                    self.cache[self._key(custom_op, profile, specs, None, False)] = 0
        elif wanted not in self.cache:
            self.missed.append(wanted)
        return runners[0], self.cache.get(wanted, -1)

    def _key(self, custom_op, shapes, *given):
        return custom_op, self._find_nearest_profile(tuple(shapes), *given)

    @classmethod
    def get(cls):
        if cls._instance is None:
            cls._instance = AutoTuner()
        return cls._instance

    @classmethod
    @cache
    def _find_nearest_profile(cls, shapes, dynamic_tensor_specs, tune_max_num_tokens=None, apply_map_to_tuning_buckets=True):
        profile = [list(shape) for shape in shapes]
        for spec in dynamic_tensor_specs:
            if apply_map_to_tuning_buckets:
                profile[spec.input_idx][spec.dim_idx] = spec.map_to_tuning_buckets(profile[spec.input_idx][spec.dim_idx])
            if tune_max_num_tokens is not None:
                profile[spec.input_idx][spec.dim_idx] = min(profile[spec.input_idx][spec.dim_idx], tune_max_num_tokens)
        return tuple(tuple(shape) for shape in profile)


@contextlib.contextmanager
def autotune(tune_mode=True):
    tuner = AutoTuner.get()
    tuner.is_tuning_mode = tune_mode
    try:
        yield
    finally:
        tuner.is_tuning_mode = False
