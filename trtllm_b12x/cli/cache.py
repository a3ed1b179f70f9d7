"""``trtllm-b12x cache``: what the package keeps on this machine, the one thing that uninstalling it leaves."""

from __future__ import annotations

import click


@click.group(invoke_without_command=True, short_help="What is kept on this machine; clear removes it.")
@click.pass_context
def cache(ctx: click.Context) -> None:
    """Show the folder of kept answers: which CuTe DSL payload loads, what a compile proved, and measured crossovers."""
    from trtllm_b12x.environment import answers

    if ctx.invoked_subcommand is None:
        folder = answers.directory()
        click.echo(f"{folder}: {sum(size for _, size in answers.contents())} bytes" if folder else "no folder: no HOME is known")


@cache.command()
def clear() -> None:
    """Remove it; the next process that asks looks again."""
    from trtllm_b12x.environment import answers

    try:
        click.echo(f"{answers.clear()} bytes removed")
    except OSError as error:
        raise click.ClickException(f"{error.filename or answers.directory()}: {error.strerror}") from error
