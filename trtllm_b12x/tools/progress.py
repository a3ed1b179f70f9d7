# SPDX-License-Identifier: Apache-2.0
"""Helpers of the commands: one-line errors, plain text, files, and a progress bar."""

from __future__ import annotations

import os
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
    """Escape characters that a terminal would interpret or cannot encode. Names come from the checkpoint."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(text))


def expect_writable(file: Path | None) -> None:
    """Raise UnusableError if ``file`` is given and cannot be written."""
    if file is None:
        return
    folder = file.absolute().parent
    if os.path.isdir(file):
        raise UnusableError(f"{file}: cannot be written (it is a folder); choose another file")
    if os.path.isfile(folder):
        raise UnusableError(f"{file}: cannot be written ({folder} is a file, not a folder); choose another file")
    if not os.path.isdir(folder):
        raise UnusableError(f"{file}: its folder does not exist; create it first")
    if not os.access(folder if is_replaceable(file) else file, os.W_OK):
        raise UnusableError(f"{file}: cannot be written (no permission); choose another file, or chmod u+w {folder}")


def is_replaceable(file: Path) -> bool:
    """Return whether the file may be replaced at any time. Pipes and devices are written once."""
    return os.path.isfile(file) or not os.path.exists(file)


def write(file: Path, text: str) -> None:
    """Write a file atomically, or to a device."""
    try:
        if is_replaceable(file):
            disk.replace(file, text)
        else:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnusableError(f"{file}: cannot be written ({error.strerror}); free space or choose another file") from None


def print_line(text: str, err: bool = False) -> None:
    """Print a line of plain text. While a progress bar is shown, rich replaces the streams and puts the line above the bar."""
    stream = sys.stderr if err else sys.stdout
    if stream is not None:  # None: closed before the start
        print(plain(text), file=stream, flush=True)


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if standard error is a terminal. Yield a function that sets the done and the total number.

    Inside, Ctrl-C raises KeyboardInterrupt.
    """
    from rich import progress
    from rich.console import Console, ConsoleOptions

    class _Console(Console):
        """Console that leaves two columns for the terminal's ^C. If ^C took its own row, the bar would stay on screen."""

        @property
        def options(self) -> ConsoleOptions:
            return super().options.update_width(max(self.width - 2, 1))

    console = _Console(stderr=True, soft_wrap=True)  # the terminal wraps lines: rich would break them between words
    shown = sys.stderr is not None and sys.stderr.isatty() and console.is_interactive  # TERM=dumb has no bar
    bar = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        console=console,
        disable=not shown,
        transient=True,
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    )
    task = bar.add_task(description, total=None)

    with _interruptible() as raise_if_pressed:

        def set_progress(done: int, total: int) -> None:
            raise_if_pressed()
            bar.update(task, completed=done, total=total)

        try:
            bar.start()
            yield set_progress
        finally:
            if shown:  # else rich prints an empty line. Even an interrupted start must stop, to show the cursor
                bar.stop()


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Raise KeyboardInterrupt at Ctrl-C, even if other code drops or converts it. torch's C code makes it a ValueError.

    Yield a function that raises KeyboardInterrupt if Ctrl-C was pressed.
    """
    handler, pressed = signal.getsignal(signal.SIGINT), False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def raise_if_pressed() -> None:
        if pressed:
            raise KeyboardInterrupt

    if not callable(handler):  # a shell's background jobs may ignore SIGINT
        yield raise_if_pressed
        return
    signal.signal(signal.SIGINT, on_signal)
    try:
        yield raise_if_pressed
        raise_if_pressed()
    except Exception as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, handler)
