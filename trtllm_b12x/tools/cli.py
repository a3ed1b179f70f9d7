"""Command line: ``trtllm-b12x`` and ``python -m trtllm_b12x``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trtllm_b12x.core.version import __version__

# Commands import what they need only when they run, so that --help stays quick.
from .cache import cache
from .doctor import doctor
from .tune import tune
from .verify_command import verify
from .warmup import warmup


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trtllm-b12x")
def main() -> None:
    """Quantized MoE decode inside TensorRT-LLM on SM120 and SM121: FlashInfer's b12x kernels, or Triton's."""


@main.command()
def switch() -> None:
    """Print the folder for --custom_module_dirs, an explicit switch where no .pth is read."""
    click.echo(Path(__file__).parents[1] / "switch" / "trtllm_b12x_switch")


for command in (cache, doctor, tune, verify, warmup):
    main.add_command(command)
