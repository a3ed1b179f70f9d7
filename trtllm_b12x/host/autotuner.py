"""A guard of the host's autotuner, which is rebound where it needs one.

Why: ``AutoTuner._find_nearest_profile`` indexes shapes by specs of inputs that are not there and dies with IndexError
at warm-up on SM121 (issue 12230).  How: only where a call with such a spec raises, specs out of range are left out.  It can
go with the last supported host from before PR 12310 (18 March 2026).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import patches


def patch(module: Any, active: Callable[[], bool]) -> None:
    """Rebind it in the host's module, for as long as ``active`` says."""
    tuner = module.AutoTuner
    found = vars(tuner).get("_find_nearest_profile")
    if isinstance(found, classmethod) and not patches.rebound(found) and _index_error(module):
        patches.rebind(tuner, "_find_nearest_profile", functools.partial(_guarding, active))


def _index_error(module: Any) -> bool:
    """A spec of an input that is not there raises."""
    spec = module.DynamicTensorSpec(input_idx=1, dim_idx=0)
    try:
        module.AutoTuner._find_nearest_profile(((1,),), (spec,), ())
    except IndexError:
        return True
    except Exception:  # another signature: not the code that the guard is for
        return False
    return False


def _guarding(active: Callable[[], bool], original: Any) -> Any:
    """``_find_nearest_profile`` without the specs that have no input."""
    find = original.__func__

    @functools.wraps(find)
    def guarded(cls: Any, shapes: Any, dynamic_tensor_specs: Any, constraint_specs: Any, *args: Any, **kwargs: Any) -> Any:
        def there(spec: Any) -> bool:
            return bool(spec.input_idx < len(shapes) and spec.dim_idx < len(shapes[spec.input_idx]))

        if active():
            dynamic_tensor_specs = tuple(filter(there, dynamic_tensor_specs))
            constraint_specs = tuple(filter(there, constraint_specs))
        return find(cls, shapes, dynamic_tensor_specs, constraint_specs, *args, **kwargs)

    for name in ("cache_clear", "cache_info", "cache_parameters"):
        if hasattr(find, name):
            setattr(guarded, name, getattr(find, name))
    return classmethod(guarded)
