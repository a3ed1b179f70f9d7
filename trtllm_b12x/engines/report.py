# SPDX-License-Identifier: Apache-2.0
"""Shared by ``doctor``'s lines on vLLM and SGLang: whether the version is recognized, and which kernels serve a format."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from trtllm_b12x import formats
from trtllm_b12x.core import disk, settings
from trtllm_b12x.decision import Environment, KernelFeatures, Resolution, families, resolve
from trtllm_b12x.environment import packages
from trtllm_b12x.formats.geometry import LayerShape

from . import rebinding


def left_out(variable: str, listed: Sequence[str]) -> str:
    """Return why an engine does not load our plugin; empty if it does. ``listed`` has the plugins that its variable names."""
    if "trtllm_b12x" in listed or variable not in os.environ:
        return ""
    return f"loads only {variable}={os.environ[variable]}: add trtllm_b12x to it, or unset it"


def difference(engine: str, version: str, facts_file: str, check: Callable[[], None]) -> str:
    """Return the difference between the installed engine and the known facts; empty if they agree. ``check`` imports the engine.

    The import takes half a minute, so an empty result is stored on disk for this engine and this ``facts.py``.
    """

    def ask() -> str:
        print(f"importing {engine} once, which takes a while ...", file=sys.stderr)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                check()
            except rebinding.UnknownEngineError as error:
                return str(error)
        return ""

    stamps = [(str(file), os.stat(file).st_mtime_ns) for file in (packages.origin(engine), facts_file) if file is not None]
    return str(disk.once(f"{engine} {version} {stamps}", ask, keep=lambda answer: answer == "")[0])


def verdict(
    form: formats.Format,
    among: Sequence[str],
    e: Environment,
    own_path: bool,
    serving: Callable[[KernelFeatures], KernelFeatures] = lambda known: known,
) -> Resolution:
    """Return which families of ``among`` would serve a format on this machine. ``serving`` adjusts their capabilities."""
    named = [name for name in settings.KERNELS() if name in among]
    features = {row.name: serving(row.features(e)) for row in families.rows(named, form.name) if row.format == form.name}
    shape = LayerShape(quant_algo=form.quant_algo, dtype="bfloat16", activation="Swiglu")
    return resolve(shape, None, e, features, hosts_path=own_path)
