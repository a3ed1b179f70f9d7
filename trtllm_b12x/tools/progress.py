"""Shared by the commands: errors of one line, plain text, files, and a progress bar."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

import click


class UnusableError(click.ClickException):
    """The arguments or a file cannot be used. The command prints the message as one line and exits with 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {plain(self.message)}", err=True)


def plain(text: object) -> str:
    """Escape what a terminal would interpret or cannot encode. Names come from the checkpoint."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(text))


def expect_folder(*files: Path | None) -> None:
    """Expect that each file, if given and not ``-``, can be made in a folder that exists."""
    for file in files:
        if file is not None and str(file) != "-" and not file.absolute().parent.is_dir():
            raise UnusableError(f"{file}: its folder does not exist; create it first")


def is_replaceable(file: Path) -> bool:
    """Return whether the file may be replaced at any time. ``-``, pipes and devices are written once."""
    return str(file) != "-" and (file.is_file() or not file.exists())


@contextmanager
def writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnusableError(f"{file}: cannot be written ({error.strerror}); free space or choose another file") from None


def write(file: Path, text: str) -> None:
    """Write a file atomically, or to a device, or to standard output if it is ``-``."""
    from trtllm_b12x.core import disk

    if str(file) == "-":
        click.echo(text, nl=False)
        return
    with writing(file):
        if is_replaceable(file):
            disk.replace(file, text)
        else:
            file.write_text(text, encoding="utf-8")


class Progress:
    """A progress bar on standard error, if that is a terminal."""

    def __init__(self, description: str, total: int = 1) -> None:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TaskProgressColumn()
        self._bar = progress.Progress(
            *columns,
            progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(description, total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def set(self, done: float, total: int | None = None) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def line(self, text: str, err: bool = False) -> None:
        """Print a line of plain text above the bar."""
        running = self._bar.live.is_started
        if running:
            self._bar.stop()
        click.echo(plain(text), err=err)
        if running:
            self._bar.start()


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for an error that Ctrl-C caused: torch's C code turns an interrupt into a ValueError."""
    default, pressed = signal.default_int_handler, False
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not default:
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        default(number, frame)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    except Exception as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, default)
