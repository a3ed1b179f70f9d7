"""Command line: ``trtllm-b12x`` and ``python -m trtllm_b12x``."""

from __future__ import annotations

import click

from trtllm_b12x.core.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trtllm-b12x")
def main() -> None:
    """Quantized MoE decode inside TensorRT-LLM on SM120 and SM121: FlashInfer's b12x kernels, or Triton's."""


@main.command()
def switch() -> None:
    """Print the folder for --custom_module_dirs, an explicit switch where no .pth is read."""
    from pathlib import Path

    click.echo(Path(__file__).parents[1] / "switch" / "trtllm_b12x_switch")


# Below the group: commands import what they need only when they run, so that --help stays quick.
from .cache import cache  # noqa: E402
from .doctor import doctor  # noqa: E402
from .tune import tune  # noqa: E402
from .verify_command import verify  # noqa: E402
from .warmup import warmup  # noqa: E402

main.add_command(cache)
main.add_command(doctor)
main.add_command(tune)
main.add_command(verify)
main.add_command(warmup)
