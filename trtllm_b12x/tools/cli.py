# SPDX-License-Identifier: Apache-2.0
"""Command line: ``trtllm-b12x`` and ``python -m trtllm_b12x``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trtllm_b12x.core import disk
from trtllm_b12x.core.version import __version__

# Commands import what they need only when they run, so that --help stays quick.
from .doctor import doctor
from .progress import UnusableError
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
        except OSError as error:
            if ctx.invoked_subcommand != "cache" or error.filename is None:  # None: standard output failed
                raise
            problem = f"{disk.directory()}: {error.strerror}; remove it as its owner, or set XDG_CACHE_HOME"
            raise UnusableError(problem) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trtllm-b12x")
def main() -> None:
    """MoE kernels for quantized experts in TensorRT-LLM, vLLM and SGLang, on SM120 and SM121: our own, and FlashInfer's b12x."""


@main.command()
def switch() -> None:
    """Print the folder for --custom_module_dirs, an explicit switch where no .pth is read."""
    click.echo(Path(__file__).parents[1] / "switch" / "trtllm_b12x_switch")


@main.group(invoke_without_command=True, short_help="What is kept on this machine; clear removes it.")
@click.pass_context
def cache(ctx: click.Context) -> None:
    """Show the cache folder: CuTe DSL payloads found to load, compile results, and measured crossovers."""
    folder = disk.directory()
    if ctx.invoked_subcommand is None:
        click.echo(f"{folder}: {sum(size for _, size in disk.contents())} bytes" if folder else "no folder: no HOME is known")


@cache.command()
def clear() -> None:
    """Remove the cache folder. The next process that needs its contents measures again."""
    click.echo(f"{disk.clear()} bytes removed")


for command in (doctor, tune, verify, warmup):
    main.add_command(command)
