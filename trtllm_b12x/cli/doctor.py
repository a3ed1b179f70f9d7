"""``trtllm-b12x doctor``: is it active here, and if not, which command makes it so?"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from enum import Enum
from pathlib import Path
from typing import Any

import click

from trtllm_b12x import __version__
from trtllm_b12x.decision import Environment, Problem, Verdict, decide

_USUAL = tuple(
    Problem(quant_algo="NVFP4", group_size=16, activation_dtype="bfloat16", activation=activation)
    for activation in ("Swiglu", "Relu2")
)
_HOSTS = {
    "none": "not installed (the embedded host stands in)",
    "unsupported": "installed, of a shape that is not known",
    "installed": "installed",
}
_TARGETS = {"sm_120a": 120, "sm_121a": 121}


@click.command(short_help="Is b12x active here, and if not, why?")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the screen.")
@click.option("--compile", "compile_", is_flag=True, help="Prove the CuTe DSL: compile FlashInfer's micro kernel (seconds).")
@click.option("--target", type=click.Choice(sorted(_TARGETS)), help="Judge for this card instead of the one that is here.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Judge this checkpoint's own MoE layers.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, compile_: bool, target: str | None, checkpoint: Path | None) -> None:
    """Say whether b12x will serve decode here, why not, and the command that mends it.

    Exit status: 0 it will be active, 1 it will not, 2 wrong usage or an unusable checkpoint.
    """
    from trtllm_b12x import settings
    from trtllm_b12x.checkpoint import CheckpointError
    from trtllm_b12x.environment import driver_cuda, probe

    _look_at_host()
    environment = probe(always_look=True)
    if target is not None:
        # Another machine's card; its toolkit is unknown where this one has none.
        toolkit = environment.toolkit_cuda if environment.toolkit_cuda != (0, 0) else None
        environment = dataclasses.replace(environment, sm=_TARGETS[target], toolkit_cuda=toolkit)
    proof = None
    if compile_:
        from trtllm_b12x.kernels.prove import prove

        proof = prove(target or ("sm_121a" if environment.sm == 121 else "sm_120a"))
        environment = dataclasses.replace(environment, compile_proved=proof.compiled)
    try:
        problems = _USUAL if checkpoint is None else _problems(checkpoint)
    except CheckpointError as error:
        click.echo(f"error: {error}", err=True)
        ctx.exit(2)
    verdicts = [(_name(problem), decide(problem, environment=environment)) for problem in problems]
    active = any(verdict.served for _, verdict in verdicts) and (proof is None or proof.compiled)
    complaints = settings.complaints()
    if as_json:
        report = {
            "trtllm_b12x": __version__,
            "active": active,
            "environment": dataclasses.asdict(environment),
            "driver_cuda": driver_cuda(),
            "settings": complaints,
            "proof": None if proof is None else dataclasses.asdict(proof),
            "verdicts": [_verdict_json(name, verdict) for name, verdict in verdicts],
        }
        click.echo(json.dumps(report, indent=2, default=_plain))
    else:
        _screen(environment, target, driver_cuda(), complaints, proof, verdicts, active)
    ctx.exit(0 if active else 1)


def _look_at_host() -> None:
    """Import TensorRT-LLM, if it is there, for the comparison with what is known of it; what it prints is not our output."""
    import contextlib
    import sys

    from trtllm_b12x import host

    if host.installed():
        click.echo("importing TensorRT-LLM, which takes a while ...", err=True)
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(host.UnsupportedHostError):
            host.load()


def _problems(checkpoint: Path) -> tuple[Problem, ...]:
    """The different problems that the checkpoint's layers pose, in the model's order."""
    from trtllm_b12x.checkpoint import Checkpoint
    from trtllm_b12x.verification import Ranks, problem_of

    return tuple(dict.fromkeys(problem_of(layer, Ranks()) for layer in Checkpoint(checkpoint).layers))


def _name(problem: Problem) -> str:
    words = [problem.quant_algo or "", problem.activation or ""]
    if problem.num_experts is not None:
        words.append(f"{problem.num_experts} experts, top {problem.top_k}, {problem.hidden_size} x {problem.intermediate_size}")
    return " ".join(words)


def _class_name(verdict: Verdict) -> str:
    return "FlashInferNvfp4Sm12xFusedMoE" if verdict.served else "CutlassFusedMoE"


def _verdict_json(name: str, verdict: Verdict) -> dict[str, Any]:
    rejections = [
        {"reason": r.reason.name, "detail": r.detail, "remedy": r.remedy, "commands": list(r.commands)}
        for r in verdict.rejections
    ]
    return {
        "layers": name,
        "served": verdict.served,
        "class": _class_name(verdict),
        "rejections": rejections,
        "warnings": verdict.warnings,
    }


def _plain(value: object) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.name
    raise TypeError(type(value).__name__)


def _screen(
    e: Environment,
    target: str | None,
    driver: tuple[int, int] | None,
    complaints: list[str],
    proof: Any,
    verdicts: list[tuple[str, Verdict]],
    active: bool,
) -> None:
    """At most 80 columns, no color: it is pasted into issues and found in logs."""

    def cuda(version: tuple[int, int] | None) -> str:
        return "unknown" if version is None else f"CUDA {version[0]}.{version[1]}" if version[0] else "none"

    gpu = "unknown" if e.sm is None else f"SM{e.sm}" if e.sm else "none"
    facts = [
        ("trtllm-b12x", __version__),
        ("TensorRT-LLM", _HOSTS.get(e.host or "", f"recognized as generation {e.host}")),
        ("GPU", f"{gpu} (assumed: --target {target})" if target else gpu),
        ("driver", cuda(driver)),
        ("toolkit", f"{cuda(e.toolkit_cuda)} (nvcc or torch, as FlashInfer sees it)"),
        ("FlashInfer", "not installed" if e.flashinfer == "none" else f"{e.flashinfer}{_features(e)}"),
        ("CuTe DSL", "not installed" if e.dsl == "none" else f"{e.dsl}, payload that loads: {cuda(e.payload_cuda)}"),
    ]
    if proof is not None:
        words = f"micro kernel for {proof.target}: " + (f"compiled in {proof.seconds} s" if proof.compiled else proof.error)
        facts.append(("compile", words))
    for name, value in facts:
        click.echo(textwrap.fill(value, 80, initial_indent=f"{name:<14}", subsequent_indent=" " * 14))
    for complaint in [*complaints, *dict.fromkeys(w for _, verdict in verdicts for w in verdict.warnings)]:
        click.echo(textwrap.fill(complaint, 80, initial_indent=f"{'setting':<14}", subsequent_indent=" " * 14))
    click.echo()
    for name, verdict in verdicts:
        click.echo(textwrap.fill(f"{name}: {_class_name(verdict)}", 80, subsequent_indent="  "))
    problems = list(dict.fromkeys(rejection for _, verdict in verdicts for rejection in verdict.rejections))
    for number, rejection in enumerate(problems, 1):
        click.echo()
        words = f"{rejection.reason.name}: {rejection.detail}"
        click.echo(textwrap.fill(words, 80, initial_indent=f"{number}. ", subsequent_indent="   "))
        if rejection.commands:
            for command in rejection.commands:
                click.echo(f"   $ {command}")  # never wrapped: it is to be copied
        else:
            click.echo(textwrap.fill(rejection.remedy, 80, initial_indent="   -> ", subsequent_indent="      "))
    click.echo()
    hook = _hook(e)
    if hook:
        click.echo(textwrap.fill(hook, 80) + "\n")
    if not active:
        click.echo("b12x will NOT serve decode here: the host's own CUTLASS class runs")
    elif e.host == "none":
        click.echo("b12x WOULD serve decode here, inside TensorRT-LLM")
    else:
        click.echo("b12x WILL serve decode here")


def _hook(e: Environment) -> str:
    """Why the worker processes would not be reached, empty if they will be."""
    import sys

    from trtllm_b12x import bootstrap

    if e.host == "none" or any(isinstance(finder, bootstrap.Finder) for finder in sys.meta_path):
        return ""
    return (
        "trtllm_b12x.pth was not run by this interpreter (python -S, or an installation with pip --target): worker processes "
        "will not be promoted. Install the package into site-packages, or start trtllm-serve or trtllm-bench with "
        '--custom_module_dirs "$(trtllm-b12x switch)"'
    )


def _features(e: Environment) -> str:
    if e.exact_scales is None:
        return ""
    scales = "exact scales" if e.exact_scales else "no exact scales"
    return f" ({scales}, {'expert parallelism' if e.expert_parallel else 'no expert parallelism'})"
