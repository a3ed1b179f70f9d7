"""``trtllm-b12x doctor``: is it active here, and if not, which command makes it so?"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import textwrap
from enum import Enum
from pathlib import Path
from typing import Any

import click

from trtllm_b12x import families, formats
from trtllm_b12x.core import settings
from trtllm_b12x.core.version import __version__
from trtllm_b12x.decision import Environment, Problem, Rejection, Resolution

from . import facts
from .target import TARGETS, judged, machine


@click.command(short_help="Which kernels serve decode here, and why not the others?")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the screen.")
@click.option("--compile", "compile_", is_flag=True, help="Prove it: compile a kernel of each family (seconds).")
@click.option("--target", type=click.Choice(sorted(TARGETS)), help="Judge for this card instead of the one that is here.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Judge this checkpoint's own MoE layers.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, compile_: bool, target: str | None, checkpoint: Path | None) -> None:
    """Say which kernels will serve decode here, why not the others, and what fixes it.

    Exit status: 0 some will, 1 none will, 2 wrong usage, a wrong setting or an unusable checkpoint.
    """
    from trtllm_b12x.environment import driver_cuda, prove

    wrong = settings.complaints()
    for complaint in wrong:
        click.echo(f"error: {complaint}", err=True)
    _look_at_host()
    environment = machine(target)
    proofs = {}
    if compile_:
        if importlib.util.find_spec("torch") is None:
            click.echo("error: --compile needs torch: it is not installed", err=True)
            ctx.exit(2)
        card = target or ("sm_121a" if environment.sm == 121 else "sm_120a")
        proofs = {name: prove.prove(card, name) for name in settings.KERNELS.listed()}
    problems = _usual() if checkpoint is None else _problems(ctx, checkpoint)
    verdicts = [(_name(problem), judged(problem, environment)) for problem in problems]
    failed = {name for name, proof in proofs.items() if not proof.compiled}
    serving = [next((name for name in _decoding(*found) if name not in failed), "") for found in verdicts]
    active = any(serving)
    driver = driver_cuda()
    told = [*facts.rows(environment, target, driver), *(("note", text) for text in _caveats(verdicts, environment))]
    told += [("setting", complaint) for complaint in wrong]
    if as_json:
        report = {
            "trtllm_b12x": __version__,
            "active": active,
            "facts": told,
            "environment": dataclasses.asdict(environment),
            "driver_cuda": driver,
            "proofs": {name: dataclasses.asdict(proof) for name, proof in proofs.items()},
            "verdicts": [_verdict_json(name, verdict) for name, verdict in verdicts],
        }
        click.echo(json.dumps(report, indent=2, default=_plain))
    else:
        _screen(environment, told, target, proofs, verdicts, serving)
    ctx.exit(2 if wrong else 0 if active else 1)


def _usual() -> tuple[Problem, ...]:
    """Layers of usual checkpoints, of the formats that some family to be considered has kernels for."""
    return tuple(
        Problem(quant_algo=row.name, activation_dtype="bfloat16", activation=activation)
        for row in formats.FORMATS
        if any(families.rows(settings.KERNELS.listed(), row.name))
        for activation in row.activations
    )


def _look_at_host() -> None:
    """Import TensorRT-LLM, if it is there, for the comparison with what is known of it; what it prints is not our output."""
    import contextlib
    import sys

    from trtllm_b12x import host

    if host.installed():
        click.echo("importing TensorRT-LLM, which takes a while ...", err=True)
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(host.UnsupportedHostError):
            host.load()


def _problems(ctx: click.Context, checkpoint: Path) -> tuple[Problem, ...]:
    """The different problems that the checkpoint's layers pose, in the model's order."""
    try:
        from trtllm_b12x.checkpoint import Checkpoint, CheckpointError
        from trtllm_b12x.host import questions
    except ImportError as error:  # torch, which the rest of doctor can do without
        click.echo(f"error: --checkpoint needs torch: {error}", err=True)
        ctx.exit(2)
    try:
        return tuple(dict.fromkeys(questions.of_checkpoint(layer)[0] for layer in Checkpoint(checkpoint).layers))
    except CheckpointError as error:
        click.echo(f"error: {error}", err=True)
        ctx.exit(2)


def _name(problem: Problem) -> str:
    words = [problem.quant_algo or "", problem.activation or ""]
    if problem.num_experts is not None:
        words.append(f"{problem.num_experts} experts, top {problem.top_k}, {problem.hidden_size} x {problem.intermediate_size}")
    return " ".join(words)


def _decoding(name: str, verdict: Resolution) -> list[str]:
    """Families that serve without having been measured."""
    rows = families.rows(verdict.families, name.split()[0])
    return [row.name for row in rows if row.name in verdict.families and not row.features(Environment()).measured_from]


def _caveats(verdicts: list[tuple[str, Resolution]], e: Environment) -> list[str]:
    """Return what users should know of the families that would serve."""
    rows = (row for name, verdict in verdicts for row in families.rows(verdict.families, name.split()[0]))
    return list(dict.fromkeys(filter(None, (row.features(e).caveat for row in rows))))


def _class_name(name: str, verdict: Resolution) -> str:
    if verdict.served:
        return "FlashInferNvfp4Sm12xFusedMoE"
    row = formats.find(name.split()[0])
    return "CutlassFusedMoE" if row is None or row.hosts_path else "no class of TensorRT-LLM's"


def _verdict_json(name: str, verdict: Resolution) -> dict[str, Any]:
    rejections = [
        {
            "family": family,
            "reason": r.reason.name,
            "detail": r.detail,
            "remedy": r.remedy,
            "commands": list(r.commands),
            "moves": list(r.moves),
        }
        for family, r in verdict.refused
    ]
    return {
        "layers": name,
        "served": verdict.served,
        "families": verdict.families,
        "class": _class_name(name, verdict),
        "rejections": rejections,
    }


def _plain(value: object) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.name
    raise TypeError(type(value).__name__)


def _screen(
    e: Environment,
    told: list[tuple[str, str]],
    target: str | None,
    proofs: dict[str, Any],
    verdicts: list[tuple[str, Resolution]],
    serving: list[str],
) -> None:
    """At most 80 columns, no color: it is pasted into issues and found in logs."""
    for family, proof in proofs.items():
        words = f"{family} for {proof.target}: " + (f"compiled in {proof.seconds} s" if proof.compiled else proof.error)
        told = [*told, ("compile", words)]
    for name, value in told:
        click.echo(textwrap.fill(value, 80, initial_indent=f"{name:<14}", subsequent_indent=" " * 14))
    click.echo()
    # Without a host, or for a card that is not here, nothing is: it would be.
    would = e.host == "none" or target is not None
    several = any(len(verdict.verdicts) > 1 for _, verdict in verdicts)
    for name, verdict in verdicts:
        on = f" on {', else '.join(_decoding(name, verdict))}" if several and verdict.served else ""
        words = f"{name} {'would be' if would else 'is'} {_class_name(name, verdict)}{on}"
        click.echo(textwrap.fill(words, 80, subsequent_indent="  "))
    for family, words in _families(verdicts) if several else ():
        click.echo(textwrap.fill(words, 80, initial_indent=f"{family:<14}", subsequent_indent=" " * 14))
    about: dict[Rejection, str] = {}
    for _, verdict in verdicts:
        for family, rejection in verdict.refused:
            about.setdefault(rejection, family)
    problems = list(about)
    for number, rejection in enumerate(problems, 1):
        click.echo()
        words = f"{f'not {about[rejection]}: ' if several else ''}{rejection.reason.name}: {rejection.detail}"
        click.echo(textwrap.fill(words, 80, initial_indent=f"{number}. ", subsequent_indent="   "))
        remedy = "the command below" if rejection.commands else rejection.remedy
        click.echo(textwrap.fill(remedy, 80, initial_indent="   -> ", subsequent_indent="      "))
    mending = next((rejection for rejection in problems if rejection.commands), None)
    if mending is not None:
        click.echo("\nFixes what the packages of FlashInfer and the CuTe DSL cause, in this Python:")
        click.echo(f"   $ {' && '.join(mending.commands)}")  # never wrapped: it is to be copied
        if mending.moves:
            click.echo(textwrap.fill(f"It moves {', '.join(mending.moves)}.", 80))
    click.echo()
    hook = _hook(e)
    if hook:
        click.echo(textwrap.fill(hook, 80) + "\n")
    named = " and ".join(dict.fromkeys(filter(None, serving)))
    if not named:
        named = " and ".join(dict.fromkeys(family for _, verdict in verdicts for family, _ in verdict.verdicts))
        verb = "WOULD NOT" if would else "will NOT"
        click.echo(f"{named} {verb} serve decode here: the host's own CUTLASS class runs")
    elif would:
        click.echo(f"{named} WOULD serve decode {'here, inside TensorRT-LLM' if target is None else f'on {target}'}")
    else:
        click.echo(f"{named} WILL serve decode here")


def _families(verdicts: list[tuple[str, Resolution]]) -> list[tuple[str, str]]:
    """Family and, in a line, for which layers nothing stands against it, or what does."""
    found = []
    for family in dict.fromkeys(family for _, verdict in verdicts for family, _ in verdict.verdicts):
        mine = [(name, one) for name, verdict in verdicts for other, one in verdict.verdicts if other == family]
        eligible = [name for name, verdict in mine if verdict.served]
        against = dict.fromkeys(reason.name for _, verdict in mine for reason in verdict.reasons)
        found.append((family, f"eligible for {', '.join(eligible)}" if eligible else f"refused: {', '.join(against)}"))
    return found


def _hook(e: Environment) -> str:
    """Why the worker processes would not be reached, empty if they will be."""
    from trtllm_b12x.core import hook

    if e.host == "none" or hook.watching():
        return ""
    return (
        "trtllm_b12x.pth was not run by this interpreter (python -S, or an installation with pip --target): worker processes "
        "will not be promoted. Install the package into site-packages, or start trtllm-serve or trtllm-bench with "
        '--custom_module_dirs "$(trtllm-b12x switch)"'
    )
