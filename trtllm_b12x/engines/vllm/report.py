"""Lines of ``doctor`` about vLLM: if this version is recognized, and the backends its oracles would choose on this card."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

from trtllm_b12x import formats
from trtllm_b12x.core import disk, settings
from trtllm_b12x.decision import Environment, families, resolve
from trtllm_b12x.environment import packages
from trtllm_b12x.formats.geometry import LayerShape

from . import facts


def _difference() -> str:
    """Return how the installed vLLM differs from what the package relies on. To find out takes an import of half a minute.

    So the answer that nothing differs is kept on disk for this vLLM and this ``facts.py``.
    """

    def ask() -> str:
        print("importing vLLM once, which takes a while ...", file=sys.stderr)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                facts.check()
            except facts.UnknownVLLMError as error:
                return str(error)
        return ""

    files = [packages.origin("vllm"), facts.__file__]
    stamps = [(str(file), os.stat(file).st_mtime_ns) for file in files if file is not None]
    return str(disk.once(f"vllm {facts.version()} {stamps}", ask, keep=lambda answer: answer == "")[0])


def vllm_lines(e: Environment) -> Iterator[str]:
    """Yield lines on the installed vLLM: none without one, one with the reason if it loads none of our kernels."""
    if not facts.version():
        return
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "trtllm_b12x" not in plugins.split(","):  # vLLM strips no spaces
        yield f"{facts.version()}, loads only VLLM_PLUGINS={plugins}: add trtllm_b12x to it, or unset it"
        return
    if difference := _difference():
        yield f"{facts.version()}, left alone: {difference}"
        return
    yield f"{facts.version()}, recognized"
    e = replace(e, sm=facts.counted(e.sm))
    names = [name for name in settings.KERNELS() if name in facts.FAMILIES]
    for form in formats.FORMATS:
        slots = [slot for slot in facts.SLOTS if slot.format == form.name]
        features = {row.name: row.features(e) for row in families.rows(names, form.name) if row.format == form.name}
        pair = slots[0].pair
        if not pair:
            features = {name: facts.for_every_call(known) for name, known in features.items()}
        shape = LayerShape(quant_algo=form.quant_algo, dtype="bfloat16", activation="Swiglu")
        verdict = resolve(shape, None, e, features, hosts_path=pair)
        theirs = " or ".join(dict.fromkeys(slot.instead[0] for slot in slots))
        if not verdict.served:
            yield f"{form.name} experts stay on {theirs}: {verdict.findings}"
        else:
            place = "before" if pair else "in place of"
            yield f"{form.name} experts run on {' and '.join(verdict.families)}, {place} {theirs}"
