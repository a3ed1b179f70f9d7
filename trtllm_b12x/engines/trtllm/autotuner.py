"""Guard the autotuner of TensorRT-LLM against a crash.

Why: ``AutoTuner._find_nearest_profile`` indexes shapes by specs of missing inputs and dies with IndexError at warm-up on SM121
(issue 12230). How: drop specs that are out of range, only on hosts where such a spec raises. It can go with the last supported
host from before PR 12310 (18 March 2026).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import patches


def patch(module: Any, active: Callable[[], bool]) -> None:
    """Rebind ``_find_nearest_profile`` in the module. The guard works while ``active()`` is true."""
    tuner = module.AutoTuner
    original = vars(tuner).get("_find_nearest_profile")
    if isinstance(original, classmethod) and not patches.rebound(original) and _index_error(module):
        patches.rebind(tuner, "_find_nearest_profile", functools.partial(_guarding, active))


def _index_error(module: Any) -> bool:
    """Return True if a spec of a missing input raises IndexError."""
    spec = module.DynamicTensorSpec(input_idx=1, dim_idx=0)
    try:
        module.AutoTuner._find_nearest_profile(((1,),), (spec,), ())
    except IndexError:
        return True
    except Exception:  # another signature: not the code to guard
        return False
    return False


def _guarding(active: Callable[[], bool], original: Any) -> Any:
    """Wrap ``_find_nearest_profile`` so that it ignores specs of missing inputs."""
    find = original.__func__

    @functools.wraps(find)
    def guarded(cls: Any, shapes: Any, dynamic_tensor_specs: Any, constraint_specs: Any, *args: Any, **kwargs: Any) -> Any:
        def exists(spec: Any) -> bool:
            return bool(spec.input_idx < len(shapes) and spec.dim_idx < len(shapes[spec.input_idx]))

        if active():
            dynamic_tensor_specs = tuple(filter(exists, dynamic_tensor_specs))
            constraint_specs = tuple(filter(exists, constraint_specs))
        return find(cls, shapes, dynamic_tensor_specs, constraint_specs, *args, **kwargs)

    for name in ("cache_clear", "cache_info", "cache_parameters"):
        if hasattr(find, name):
            setattr(guarded, name, getattr(find, name))
    return classmethod(guarded)
