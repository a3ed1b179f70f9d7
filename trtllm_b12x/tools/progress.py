"""Shared by the commands: errors of one line, plain text, files, and a progress bar."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

import click

from trtllm_b12x.core import disk


class UnusableError(click.ClickException):
    """The arguments or a file cannot be used. The command prints the message as one line and exits with 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {plain(self.message)}", err=True)


def plain(text: object) -> str:
    """Escape what a terminal would interpret or cannot encode. Names come from the checkpoint."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(text))


def expect_writable(file: Path | None) -> None:
    """Expect that the file, if given and not ``-``, can be made: its folder exists, and it is no folder."""
    if file is None or str(file) == "-":
        return
    if file.is_dir():
        raise UnusableError(f"{file}: cannot be written (it is a folder); choose another file")
    if not file.absolute().parent.is_dir():
        raise UnusableError(f"{file}: its folder does not exist; create it first")


def is_replaceable(file: Path) -> bool:
    """Return whether the file may be replaced at any time. ``-``, pipes and devices are written once."""
    return str(file) != "-" and (file.is_file() or not file.exists())


def write(file: Path, text: str) -> None:
    """Write a file atomically, or to a device, or to standard output if it is ``-``."""
    if str(file) == "-":
        click.echo(text, nl=False)
        return
    try:
        if is_replaceable(file):
            disk.replace(file, text)
        else:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnusableError(f"{file}: cannot be written ({error.strerror}); free space or choose another file") from None


def print_line(text: str, err: bool = False) -> None:
    """Print a line of plain text. While a progress bar is shown, rich puts the line above the bar."""
    stream = sys.stderr if err else sys.stdout
    print(plain(text).encode(stream.encoding, "backslashreplace").decode(stream.encoding), file=stream, flush=True)


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error, if that is a terminal. Yield a function that sets the done and the total number."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.BarColumn()
    bar = progress.Progress(
        *columns,
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
    task = bar.add_task(description, total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for an error that Ctrl-C caused: torch's C code turns an interrupt into a ValueError."""
    default, pressed = signal.default_int_handler, False
    if signal.getsignal(signal.SIGINT) is not default:  # jobs of a shell may ignore it
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        default(number, frame)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, default)
