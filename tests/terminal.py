# SPDX-License-Identifier: Apache-2.0
"""A pseudo-terminal: run a command as a user does, and render what the screen shows in the end."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass

_CODE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")
_SECONDS = 120


@dataclass(frozen=True)
class Screen:
    status: int
    written: str
    """Everything that was written, escape sequences included."""
    lines: list[str]
    """Lines on the screen and above it at the end. A line that the terminal wrapped is one line here."""
    rows: list[str]
    """The same as the terminal shows it, at most ``columns`` wide."""


def run(*command: str, columns: int = 80, interrupt_at: str = "", **variables: str) -> Screen:
    """Run Python with ``command`` as the foreground job of a new terminal. Press Ctrl-C once it has written ``interrupt_at``."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    }
    with subprocess.Popen(
        [sys.executable, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm-256color", **variables},
        start_new_session=True,
        preexec_fn=_take_terminal,
    ) as process:
        os.close(theirs)
        written, started = b"", time.monotonic()
        try:
            while part := _read(ours):
                written += part
                if interrupt_at and interrupt_at in written.decode(errors="replace"):
                    os.write(ours, b"\x03")
                    interrupt_at = ""
                assert time.monotonic() - started < _SECONDS, written
        finally:
            process.kill()
            os.close(ours)
    text = written.decode(variables.get("PYTHONIOENCODING", "utf-8"))
    return Screen(process.returncode, text, *render(text, columns))


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell may ignore it


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # EIO: the last process has closed the terminal
        return b""


def render(text: str, columns: int) -> tuple[list[str], list[str]]:
    """Return lines and rows of a screen that scrolls without end. Raise ValueError for a sequence that it does not know."""
    rows: list[list[str]] = [[]]
    wrapped: set[int] = set()
    row = column = 0
    while text:
        character, text = text[0], text[1:]
        if character == "\x1b":
            code = _CODE.match(character + text)
            if code is None:
                raise ValueError(f"a broken escape sequence before {text[:20]!r}")
            text = text[len(code[0]) - 1 :]
            number, kind = code[1], code[2]
            if kind == "A":
                row = max(row - int(number or 1), 0)
            elif kind == "K":
                rows[row] = [] if number == "2" else rows[row][:column]
            elif kind not in "mhl":
                raise ValueError(f"{code[0]!r} is not rendered")
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
        else:
            if column == columns:
                wrapped.add(row)
                row, column = row + 1, 0
            rows += [[] for _ in range(row + 1 - len(rows))]
            rows[row] += " " * (column + 1 - len(rows[row]))
            rows[row][column] = character
            column += 1
        rows += [[] for _ in range(row + 1 - len(rows))]
    shown = ["".join(cells) for cells in rows]
    lines: list[str] = []
    for number, cells in enumerate(shown):
        if number - 1 in wrapped:
            lines[-1] += cells
        else:
            lines.append(cells)
    return [line.rstrip() for line in lines], [cells.rstrip() for cells in shown]
