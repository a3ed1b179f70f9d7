"""``trtllm-b12x cache``: show or clear the cache folder, the only thing that uninstalling the package leaves."""

from __future__ import annotations

import click


@click.group(invoke_without_command=True, short_help="What is kept on this machine; clear removes it.")
@click.pass_context
def cache(ctx: click.Context) -> None:
    """Show the cache folder: CuTe DSL payloads found to load, compile results, and measured crossovers."""
    from trtllm_b12x.core import disk

    if ctx.invoked_subcommand is None:
        folder = disk.directory()
        click.echo(f"{folder}: {sum(size for _, size in disk.contents())} bytes" if folder else "no folder: no HOME is known")


@cache.command()
def clear() -> None:
    """Remove the cache folder. The next process that needs its contents measures again."""
    from trtllm_b12x.core import disk

    try:
        click.echo(f"{disk.clear()} bytes removed")
    except OSError as error:
        raise click.ClickException(f"{error.filename or disk.directory()}: {error.strerror}") from error
