"""One line of an error, and one line for standard error. Standard library only."""

import os
import sys


def first_line(error: BaseException) -> str:
    """Return ``Type: first line of the message``."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def say(line: str) -> None:
    """Write a line to standard error, or drop it: the stream may be closed, full, or a pipe that nobody reads any more."""
    try:
        stream = sys.stderr
        if stream is None:  # print would take standard output instead
            return
        unchanged = stream is sys.__stderr__
        if unchanged:
            # Not print: the stream keeps a line that it cannot write, and the interpreter's last flush fails (exit status 120).
            stream.flush()
            os.write(stream.fileno(), f"{line}\n".encode(stream.encoding, "backslashreplace"))
        else:
            print(line, file=stream)
    except Exception:  # OSError, ValueError of a closed file, or whatever somebody else's stream raises
        return
