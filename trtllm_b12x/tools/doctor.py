"""``trtllm-b12x doctor``: say whether our kernels are active here, and if not, which command fixes it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import sys
import textwrap
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import click

from trtllm_b12x import formats
from trtllm_b12x.core import settings
from trtllm_b12x.core.version import __version__
from trtllm_b12x.decision import Environment, Rejection, Resolution, families
from trtllm_b12x.formats.geometry import LayerShape

from .doctor_rows import doctor_rows
from .target import TARGETS, judged, machine

Row = tuple[str, str]
"""Name and value, as printed."""


@click.command(short_help="Show which kernels serve decode here, and why others do not.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the screen.")
@click.option("--compile", "compile_", is_flag=True, help="Prove it: compile a kernel of each family (seconds).")
@click.option("--target", type=click.Choice(sorted(TARGETS)), help="Check for this card instead of the one that is here.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Check the MoE layers of this checkpoint.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, compile_: bool, target: str | None, checkpoint: Path | None) -> None:
    """Show which kernels serve decode here, why others do not, and what fixes it.

    Exit status: 0 some kernel serves, 1 none does, 2 wrong usage, a wrong setting or an unusable checkpoint.
    """
    from trtllm_b12x.environment import driver_cuda, prove

    complaints = settings.complaints()
    for complaint in complaints:
        click.echo(f"error: {complaint}", err=True)
    _load_host()
    environment = machine(target)
    proofs = {}
    if compile_:
        if importlib.util.find_spec("torch") is None:
            _fail(ctx, "--compile needs torch, which is not installed")
        card = target or ("sm_121a" if environment.sm == 121 else "sm_120a")
        proofs = {name: prove.prove(card, name) for name in settings.KERNELS.listed()}
    shapes = _usual_layers() if checkpoint is None else _checkpoint_layers(ctx, checkpoint)
    verdicts = [(_name(shape), judged(shape, environment)) for shape in shapes]
    failed = {name for name, proof in proofs.items() if not proof.compiled}
    serving = [next((family for family in _decoding(*row) if family not in failed), "") for row in verdicts]
    driver = driver_cuda()
    rows = [*doctor_rows(environment, target, driver), *(("note", caveat) for caveat in _caveats(verdicts, environment))]
    rows += [("setting", complaint) for complaint in complaints]
    if as_json:
        report = {
            "trtllm_b12x": __version__,
            "active": any(serving),
            "facts": rows,
            "environment": dataclasses.asdict(environment),
            "driver_cuda": driver,
            "proofs": {name: dataclasses.asdict(proof) for name, proof in proofs.items()},
            "verdicts": [_verdict_json(name, verdict) for name, verdict in verdicts],
        }
        click.echo(json.dumps(report, indent=2, default=_jsonable))
    else:
        for family, proof in proofs.items():
            result = f"compiled in {proof.seconds} s" if proof.compiled else proof.error
            rows.append(("compile", f"{family} for {proof.target}: {result}"))
        _print_screen(environment, rows, target, verdicts, serving)
    ctx.exit(2 if complaints else 0 if any(serving) else 1)


def _fail(ctx: click.Context, message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    ctx.exit(2)


def _usual_layers() -> tuple[LayerShape, ...]:
    """Return layers of usual checkpoints, in the formats that some listed family has kernels for."""
    return tuple(
        LayerShape(quant_algo=row.name, dtype="bfloat16", activation=activation)
        for row in formats.FORMATS
        if any(families.rows(settings.KERNELS.listed(), row.name))
        for activation in row.activations
    )


def _load_host() -> None:
    """Import TensorRT-LLM, if installed, to recognize its version. Its output goes to standard error."""
    from trtllm_b12x.engines.trtllm import host

    if host.installed():
        click.echo("importing TensorRT-LLM, which takes a while ...", err=True)
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(host.UnsupportedHostError):
            host.load()


def _checkpoint_layers(ctx: click.Context, checkpoint: Path) -> tuple[LayerShape, ...]:
    """Return the distinct layers of a checkpoint, in the model's order."""
    try:
        from .checkpoint import Checkpoint, CheckpointError
    except ImportError as error:
        _fail(ctx, f"--checkpoint needs torch: {error}")
    try:
        return tuple(dict.fromkeys(layer.shape for layer in Checkpoint(checkpoint).layers))
    except CheckpointError as error:
        _fail(ctx, str(error))


def _name(shape: LayerShape) -> str:
    words = [shape.quant_algo or "", shape.activation or ""]
    if shape.num_experts is not None:
        words.append(f"{shape.num_experts} experts, top {shape.top_k}, {shape.hidden_size} x {shape.intermediate_size}")
    return " ".join(words)


def _decoding(name: str, verdict: Resolution) -> list[str]:
    """Return the families that serve the layer without a measurement."""
    rows = families.rows(verdict.families, name.split()[0])
    return [row.name for row in rows if row.name in verdict.families and not row.features(Environment()).measured_from]


def _caveats(verdicts: list[tuple[str, Resolution]], e: Environment) -> list[str]:
    """Return the caveats of the families that would serve."""
    rows = (row for name, verdict in verdicts for row in families.rows(verdict.families, name.split()[0]))
    return list(dict.fromkeys(filter(None, (row.features(e).caveat for row in rows))))


def _class_name(name: str, verdict: Resolution) -> str:
    if verdict.served:
        return "FlashInferNvfp4Sm12xFusedMoE"
    row = formats.find(name.split()[0])
    return "CutlassFusedMoE" if row is None or row.hosts_path else "no class of TensorRT-LLM's"


def _verdict_json(name: str, verdict: Resolution) -> dict[str, Any]:
    return {
        "layers": name,
        "served": verdict.served,
        "families": verdict.families,
        "class": _class_name(name, verdict),
        "rejections": [
            {
                "family": family,
                "reason": rejection.reason.name,
                "detail": rejection.detail,
                "remedy": rejection.remedy,
                "commands": list(rejection.commands),
                "moves": list(rejection.moves),
            }
            for family, rejection in verdict.refused
        ],
    }


def _jsonable(value: object) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.name
    raise TypeError(type(value).__name__)


def _print_screen(
    e: Environment, rows: list[Row], target: str | None, verdicts: list[tuple[str, Resolution]], serving: list[str]
) -> None:
    """Print at most 80 columns without color, to be pasted into issues."""
    _print_rows(rows)
    click.echo()
    # Without a host, or for a card that is not here, this is what would happen.
    hypothetical = e.host == "none" or target is not None
    several = any(len(verdict.verdicts) > 1 for _, verdict in verdicts)
    for name, verdict in verdicts:
        on = f" on {', else '.join(_decoding(name, verdict))}" if several and verdict.served else ""
        words = f"{name} {'would be' if hypothetical else 'is'} {_class_name(name, verdict)}{on}"
        click.echo(textwrap.fill(words, 80, subsequent_indent="  "))
    _print_rows(_family_rows(verdicts) if several else [])
    _print_rejections(verdicts, several)
    click.echo()
    hook = _hook_problem(e)
    if hook:
        click.echo(textwrap.fill(hook, 80) + "\n")
    names = " and ".join(dict.fromkeys(filter(None, serving)))
    if not names:
        names = " and ".join(dict.fromkeys(family for _, verdict in verdicts for family, _ in verdict.verdicts))
        verb = "WOULD NOT" if hypothetical else "will NOT"
        click.echo(f"{names} {verb} serve decode here: TensorRT-LLM's CUTLASS class runs")
    elif hypothetical:
        click.echo(f"{names} WOULD serve decode {'here, inside TensorRT-LLM' if target is None else f'on {target}'}")
    else:
        click.echo(f"{names} WILL serve decode here")


def _print_rows(rows: list[Row]) -> None:
    for name, value in rows:
        click.echo(textwrap.fill(value, 80, initial_indent=f"{name:<14}", subsequent_indent=" " * 14))


def _print_rejections(verdicts: list[tuple[str, Resolution]], several: bool) -> None:
    """Print each rejection once with its remedy, then the one command that repairs packages."""
    families_of: dict[Rejection, str] = {}
    for _, verdict in verdicts:
        for family, rejection in verdict.refused:
            families_of.setdefault(rejection, family)
    for number, (rejection, family) in enumerate(families_of.items(), 1):
        words = f"{f'not {family}: ' if several else ''}{rejection.reason.name}: {rejection.detail}"
        click.echo("\n" + textwrap.fill(words, 80, initial_indent=f"{number}. ", subsequent_indent="   "))
        remedy = "the command below" if rejection.commands else rejection.remedy
        click.echo(textwrap.fill(remedy, 80, initial_indent="   -> ", subsequent_indent="      "))
    fixable = next((rejection for rejection in families_of if rejection.commands), None)
    if fixable is not None:
        click.echo("\nFixes what the packages of FlashInfer and the CuTe DSL cause, in this Python:")
        click.echo(f"   $ {' && '.join(fixable.commands)}")  # never wrapped, so that it can be copied
        if fixable.moves:
            click.echo(textwrap.fill(f"It moves {', '.join(fixable.moves)}.", 80))


def _family_rows(verdicts: list[tuple[str, Resolution]]) -> list[Row]:
    """Return for each family the layers it is eligible for, or the reasons against it."""
    rows = []
    for family in dict.fromkeys(family for _, verdict in verdicts for family, _ in verdict.verdicts):
        own = [(name, verdict) for name, resolution in verdicts for other, verdict in resolution.verdicts if other == family]
        eligible = [name for name, verdict in own if verdict.served]
        reasons = dict.fromkeys(reason.name for _, verdict in own for reason in verdict.reasons)
        rows.append((family, f"eligible for {', '.join(eligible)}" if eligible else f"refused: {', '.join(reasons)}"))
    return rows


def _hook_problem(e: Environment) -> str:
    """Return why worker processes are not reached, or an empty string."""
    from trtllm_b12x.core import hook

    if e.host == "none" or hook.watching():
        return ""
    return (
        "trtllm_b12x.pth was not run by this interpreter (python -S, or an installation with pip --target), so worker processes "
        "run without our kernels. Install the package into site-packages, or start trtllm-serve or trtllm-bench with "
        '--custom_module_dirs "$(trtllm-b12x switch)"'
    )
