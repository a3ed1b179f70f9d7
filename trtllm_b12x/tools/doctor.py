# SPDX-License-Identifier: Apache-2.0
"""``trtllm-b12x doctor``: say whether our kernels are active here, and if not, which command fixes it."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib.util
import itertools
import json
import os
import platform
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from trtllm_b12x import environment as machine
from trtllm_b12x import formats
from trtllm_b12x.core import disk, hook, settings
from trtllm_b12x.core.version import __version__
from trtllm_b12x.decision import Environment, Rejection, Resolution, families
from trtllm_b12x.decision.families import Family
from trtllm_b12x.dispatch import store
from trtllm_b12x.dispatch.policy import MeasuredPolicy
from trtllm_b12x.engines.sglang import facts as sglang
from trtllm_b12x.engines.sglang.report import sglang_lines
from trtllm_b12x.engines.trtllm import host
from trtllm_b12x.engines.vllm import facts as vllm
from trtllm_b12x.engines.vllm.report import vllm_lines
from trtllm_b12x.environment import packages, prove
from trtllm_b12x.environment.flashinfer import cache_folder
from trtllm_b12x.formats.geometry import LayerShape

from .options import CHECKPOINT, TARGETS, as_json, opened, probe_machine, resolve_layer, shapes_in
from .progress import UnusableError

_OTHERS = {"vLLM": (vllm, vllm_lines), "SGLang": (sglang, sglang_lines)}
"""Engines besides TensorRT-LLM: module of facts, and function that yields the report's lines."""


@dataclass
class _Layer:
    """A layer, or a usual kind of layer, with its resolution."""

    shape: LayerShape
    verdict: Resolution
    engine: str

    @property
    def name(self) -> str:
        s = self.shape
        sizes = f" {s.num_experts} experts, top {s.top_k}, {s.hidden_size} x {s.intermediate_size}"
        row = formats.find(s.quant_algo)
        return f"{row.name if row else s.quant_algo or ''} {s.activation or ''}" + ("" if s.num_experts is None else sizes)

    @property
    def rows(self) -> list[Family]:
        """Rows of the families that would serve the layer."""
        return list(families.rows(self.verdict.families, self.shape.quant_algo))

    @property
    def decoding(self) -> list[str]:
        """Families that serve the layer without a measurement."""
        return [row.name for row in self.rows if not row.features(Environment()).measured_from]

    @property
    def class_name(self) -> str:
        if self.engine in _OTHERS:
            return f"class of {'trtllm-b12x' if self.verdict.served else self.engine}"
        if self.verdict.served:
            return "FlashInferNvfp4Sm12xFusedMoE"
        row = formats.find(self.shape.quant_algo or "")
        return "CutlassFusedMoE" if row is None or row.hosts_path else "no class of TensorRT-LLM's"

    def json(self) -> dict[str, Any]:
        rejections = [
            {"family": family, **dataclasses.asdict(rejection), "remedy": rejection.remedy}
            for family, rejection in self.verdict.refused
        ]
        served, names = self.verdict.served, self.verdict.families
        return {"layers": self.name, "served": served, "families": names, "class": self.class_name, "rejections": rejections}


@click.command(short_help="Show which kernels serve decode here, and why others do not.")
@as_json
@click.option("--compile", "compile_", is_flag=True, help="Prove it: compile a kernel of each family (a minute).")
@click.option("--target", type=click.Choice(sorted(TARGETS)), help="Check for this card instead of the one that is here.")
@click.option("--checkpoint", type=CHECKPOINT, help="Check the MoE layers of this checkpoint.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, compile_: bool, target: str | None, checkpoint: Path | None) -> None:
    """Show which kernels serve decode here, why others do not, and what fixes it.

    A report of a problem starts with this output. There is no address for reports yet: send them to whoever gave you the package.

    Exit status: 0 some kernel serves, 1 none does, 2 wrong usage, a wrong setting or an unusable checkpoint.
    """
    complaints = settings.complaints()
    for complaint in complaints:
        click.echo(f"error: {complaint}", err=True)
    variables = [("variable", f"{name}={value}") for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)]
    alone = [] if host.installed() else [name for name, (facts, _) in _OTHERS.items() if facts.version()]
    engine = alone[0] if alone else "TensorRT-LLM"
    theirs = [name for name in settings.KERNELS() if name in _OTHERS[engine][0].FAMILIES] if alone else []
    with settings.KERNELS.set(",".join(theirs)) if theirs else contextlib.nullcontext():
        status = _doctor(as_json, compile_, target, checkpoint, engine, variables)
    ctx.exit(2 if complaints else status)


def _doctor(
    as_json: bool, compile_: bool, target: str | None, checkpoint: Path | None, engine: str, variables: list[tuple[str, str]]
) -> int:
    _load_host()
    environment = probe_machine(target)
    others = {name: list(lines(environment)) for name, (_, lines) in _OTHERS.items()}
    left_out = [f"{name} {lines[0]}" for name, lines in others.items() if len(lines) == 1]
    proofs = {}
    if compile_:
        if importlib.util.find_spec("torch") is None:
            raise UnusableError("--compile needs torch, which is not installed")
        card = target or ("sm_121a" if environment.sm == 121 else "sm_120a")
        proofs = {name: prove.prove(card, name) for name in settings.KERNELS()}
    source = None if checkpoint is None else opened(checkpoint)
    shapes = _usual_shapes(engine) if source is None else shapes_in(source).values()
    layers = [_Layer(shape, resolve_layer(shape, environment), engine) for shape in shapes]
    failed = {name for name, proof in proofs.items() if not proof.compiled}
    serving = [next((family for family in layer.decoding if family not in failed), "") for layer in layers]
    if len(others.get(engine, ())) == 1:
        serving = []
    driver = machine.driver_cuda()
    caveats = dict.fromkeys(row.features(environment).caveat for layer in layers for row in layer.rows)
    rows = [*_facts(environment, target, driver, others), *variables, *(("note", caveat) for caveat in caveats if caveat)]
    rows += [("setting", complaint) for complaint in settings.complaints()]
    rows += [("checkpoint", remark) for remark in (source.remarks if source else ())]
    if as_json:
        report = {
            "trtllm_b12x": __version__,
            "active": any(serving),
            "facts": rows,
            "environment": dataclasses.asdict(environment),
            "driver_cuda": driver,
            "proofs": {name: dataclasses.asdict(proof) for name, proof in proofs.items()},
            "verdicts": [layer.json() for layer in layers],
        }
        click.echo(json.dumps(report, indent=2, default=lambda member: member.name))  # an Enum member by its name
    else:
        for family, proof in proofs.items():
            result = f"compiled in {proof.seconds} s" if proof.compiled else proof.error
            rows.append(("compile", f"{family} for {proof.target}: {result}"))
        _print_screen(environment, rows, target, layers, serving, engine, left_out)
    return 0 if any(serving) else 1


def _usual_shapes(engine: str) -> list[LayerShape]:
    """Return layers of usual checkpoints, in the formats that some listed family has kernels for and the engine lets us serve."""
    return [
        LayerShape(quant_algo=row.quant_algo, dtype="bfloat16", activation=activation)
        for row in formats.FORMATS
        if any(families.rows(settings.KERNELS(), row.name)) and (engine != "SGLang" or row.name in sglang.FORMATS)
        for activation in row.activations
    ]


def _load_host() -> None:
    """Import TensorRT-LLM, if installed, to recognize its version. Its output goes to standard error."""
    if host.installed():
        click.echo("importing TensorRT-LLM, which takes a while ...", err=True)
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(host.UnsupportedHostError):
            host.load()


def _print(text: str, first: str = "", indent: str = "") -> None:
    """Print text wrapped at 80 columns without color, to be pasted into issues."""
    click.echo(textwrap.fill(text, 80, initial_indent=first, subsequent_indent=indent))


def _print_rows(rows: list[tuple[str, str]]) -> None:
    for name, value in rows:
        _print(value, f"{name:<14}", " " * 14)


def _print_screen(
    e: Environment,
    rows: list[tuple[str, str]],
    target: str | None,
    layers: list[_Layer],
    serving: list[str],
    engine: str,
    left_out: list[str],
) -> None:
    _print_rows(rows)
    click.echo()
    # Without an engine, or with --target, the screen says what would happen.
    hypothetical = (e.host == "none" and engine not in _OTHERS) or target is not None
    several = any(len(layer.verdict.verdicts) > 1 for layer in layers)
    for layer in layers:
        on = f" on {', else '.join(layer.decoding)}" if (several or engine in _OTHERS) and layer.verdict.served else ""
        fate = f"{'would be' if hypothetical else 'is'} {layer.class_name}{on}"
        if engine in _OTHERS:
            fate = f"{'would run' if hypothetical else 'runs'}{on}" if on else f"stays on {engine}'s own kernels"
        _print(f"{layer.name} {fate}", indent="  ")
    considered = list(dict.fromkeys(family for layer in layers for family, _ in layer.verdict.verdicts))
    if several:
        _print_rows([(family, _eligibility(family, layers)) for family in considered])
    _print_rejections(layers, several)
    click.echo()
    for problem in filter(None, (_hook_problem(e), *left_out)):
        _print(problem)
        click.echo()
    names = " and ".join(dict.fromkeys(filter(None, serving)))
    if not names:
        verb = "WOULD NOT" if hypothetical else "will NOT"
        instead = f"{engine}'s own kernels run" if engine in _OTHERS else "TensorRT-LLM's CUTLASS class runs"
        click.echo(f"{' and '.join(considered)} {verb} serve decode here: {instead}")
    elif hypothetical:
        click.echo(f"{names} WOULD serve decode {f'here, inside {engine}' if target is None else f'on {target}'}")
    else:
        click.echo(f"{names} WILL serve decode here")


def _eligibility(family: str, layers: list[_Layer]) -> str:
    """List the layers that a family is eligible for, or the reasons why it is refused."""
    verdicts = [(layer.name, verdict) for layer in layers for name, verdict in layer.verdict.verdicts if name == family]
    eligible = [name for name, verdict in verdicts if verdict.served]
    reasons = dict.fromkeys(reason.name for _, verdict in verdicts for reason in verdict.reasons)
    return f"eligible for {', '.join(eligible)}" if eligible else f"refused: {', '.join(reasons)}"


def _print_rejections(layers: list[_Layer], several: bool) -> None:
    """Print each rejection once with its remedy, then the one command that repairs packages."""
    families_of: dict[Rejection, str] = {}
    for family, rejection in (pair for layer in layers for pair in layer.verdict.refused):
        families_of.setdefault(rejection, family)
    for number, (rejection, family) in enumerate(families_of.items(), 1):
        click.echo()
        _print(f"{f'not {family}: ' if several else ''}{rejection.finding}", f"{number}. ", "   ")
        _print("the command below" if rejection.commands else rejection.remedy, "   -> ", "      ")
    fixable = next((rejection for rejection in families_of if rejection.commands), None)
    if fixable is not None:
        click.echo("\nFixes what the packages of FlashInfer and the CuTe DSL cause, in this Python:")
        click.echo(f"   $ {' && '.join(fixable.commands)}")  # never wrapped, so that it can be copied
        if fixable.moves:
            _print(f"It moves {', '.join(fixable.moves)}.")


def _hook_problem(e: Environment) -> str:
    """Return why worker processes run without our kernels, or an empty string."""
    if e.host == "none" or hook.watching():
        return ""
    return (
        "trtllm_b12x.pth was not run by this interpreter (python -S, or an installation with pip --target), so worker processes "
        "run without our kernels. Install the package into site-packages, or start trtllm-serve or trtllm-bench with "
        '--custom_module_dirs "$(trtllm-b12x switch)"'
    )


# ---- facts, without importing torch, FlashInfer or the CuTe DSL ---------------------------------------------------------------

_NO_HOST = "not installed (the embedded host stands in)"
_VARIABLES = re.compile("TRTLLM_B12X|SGLANG_PLUGINS|VLLM_(PLUGINS|USE_|.*(LOGGING|MOE|FP4|FP8|FLASHINFER|MARLIN|COMPILE))")
"""Names of environment variables that belong in a bug report. vLLM's keys and tokens are left out."""
_HOSTS = {"none": _NO_HOST, "unsupported": "an unknown version", "installed": "not looked at"}


def _cuda(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else f"CUDA {version[0]}.{version[1]}" if version[0] else "none"


def _facts(
    e: Environment, target: str | None, driver: tuple[int, int] | None, others: dict[str, list[str]]
) -> list[tuple[str, str]]:
    ranks = "" if e.expert_parallel else "no "
    gpu = "unknown" if e.sm is None else f"SM{e.sm}" if e.sm else "none"
    host_version = _versions("tensorrt_llm").partition(" ")[2]
    recognized = _HOSTS.get(e.host or "", f"recognized as generation {e.host}")
    if any(others.values()) and e.host == "none":
        recognized = "not installed"
    return [
        ("trtllm-b12x", __version__ + _commit()),
        ("Python", f"{platform.python_version()} ({sys.executable}), {platform.platform()}"),
        ("torch", _versions("torch", "triton", "apache-tvm-ffi") or "not installed"),
        ("TensorRT-LLM", f"{host_version}, {recognized}" if host_version else recognized),
        *(("" if number else name, line) for name, lines in others.items() for number, line in enumerate(lines)),
        ("GPU", f"{gpu} (assumed: --target {target})" if target else gpu),
        *(("", card) for card in machine.cards()),
        ("driver", _cuda(driver)),
        ("toolkit", f"{_cuda(e.toolkit_cuda)} (nvcc or torch, as FlashInfer sees it)"),
        ("FlashInfer", "not installed" if e.flashinfer == "none" else f"{e.flashinfer} ({ranks}expert parallelism)"),
        *(("", line) for line in [_versions("flashinfer-cubin", "flashinfer-jit-cache")] if line),
        ("CuTe DSL", "not installed" if e.dsl == "none" else _payload(e)),
        *(("", line) for line in [_versions(*e.dsl_wheels)] if line),
        *(("Triton", line) for line in [_triton(e)] if line),
        *(("libcuda", line) for line in [machine.triton.libcuda()] if e.sm and target is None),
        *(("cache", line) for line in _caches()),
        *((name, line) for name, line in zip(itertools.chain(["paths"], itertools.repeat("")), _paths(), strict=False)),
    ]


def _commit() -> str:
    """Return the commit that pip installed the package from (PEP 610), or an empty string."""
    for distribution in packages.installed(["trtllm-b12x"]).values():
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return f", commit {json.loads(distribution.read_text('direct_url.json') or '')['vcs_info']['commit_id']}"
    return ""


def _versions(*names: str) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.versions(names).items())


def _payload(e: Environment) -> str:
    kept = ", read by an earlier process (trtllm-b12x cache clear)" if e.payload_kept else ""
    where = f", from {e.payload_file}" if e.payload_file else ""
    return str(e.dsl) + ("" if e.payload_cuda is None else f", payload that loads: {_cuda(e.payload_cuda)}{where}{kept}")


def _triton(e: Environment) -> str:
    if e.triton_lacks is None:
        return ""
    if e.triton_lacks:
        return "; ".join(item.what for item in e.triton_lacks)
    if tools := machine.triton.tools_lacking():
        why = "; ".join(item.what for item in tools)
        return f"loads kernels from {machine.triton.cache_folder()}, and compiles none: {why}"
    return "has a C compiler, a ptxas that knows the card, and a cache"


def _paths() -> list[str]:
    """List the setting, or the tables measured on cards and stored here, that choose the kernel by token count."""
    word = os.environ.get(settings.CROSSOVER.name) or "auto"
    if word.lower() != "auto":
        return [f"{settings.CROSSOVER.name}={word}"]
    folder = disk.directory()
    files = [] if folder is None else sorted(glob.glob(f"{glob.escape(str(folder))}/{disk.TABLES}"))
    stored = [_stored(Path(file)) for file in files]
    lines = [line for line in stored if line] or [
        "not measured yet: a server measures at its first call, and so does trtllm-b12x tune"
    ]
    return lines + ([f"{stored.count('')} more of other versions, or damaged: no server reads them"] if "" in stored else [])


def _stored(file: Path) -> str:
    """Return a line about a stored table; empty if no server of this Python reads it."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        table = disk.read_owned(file)
        key = store.Key(**{field.name: table[field.name] for field in dataclasses.fields(store.Key)})
        current = (table["form"], key.conditions, key.file) == (store.FORM, store.versions(), file.name)
        if timings := store.load(key) if current else None:
            host = key.paths["host"]
            summary = MeasuredPolicy(timings, "stored", base=host if host in settings.FAMILIES else "").summary()
            sizes = "{num_experts} experts, top {top_k}, {hidden_size} x {intermediate_size}, {format}".format(**key.geometry)
            return f"{key.card['name']}, {sizes}: {summary}"
    return ""


def _caches() -> list[str]:
    folders = [disk.directory()]
    lines = [] if folders[0] else ["none: neither XDG_CACHE_HOME nor HOME is an absolute path"]
    with contextlib.suppress(RuntimeError):  # no home
        folders.append(cache_folder())
    for folder in folders:
        if folder is not None and os.path.isdir(folder):
            size = sum(os.lstat(os.path.join(path, name)).st_size for path, _, names in os.walk(folder) for name in names)
            readable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
            lines.append(
                f"{folder}: {size / 1e6:.1f} MB" + ("" if readable else ", and you have no permission to read or write it")
            )
    return lines
