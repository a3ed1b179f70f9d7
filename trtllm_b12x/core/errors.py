# SPDX-License-Identifier: Apache-2.0
"""Format an error as one line, and write one line to standard error. This module imports only the standard library."""

import os
import sys


def first_line(error: BaseException) -> str:
    """Return ``Type: first line of the message``."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def say(line: str) -> None:
    """Write ``line`` to standard error. Drop it if the stream is closed, full, or a pipe without a reader."""
    try:
        stream = sys.stderr
        if stream is None:  # print would write to standard output
            return
        unchanged = stream is sys.__stderr__
        if unchanged:
            # print would keep an unwritable line in the stream's buffer, and the flush at exit would fail (exit status 120).
            stream.flush()
            os.write(stream.fileno(), f"{line}\n".encode(stream.encoding, "backslashreplace"))
        else:
            print(line, file=stream)
    except Exception:  # OSError, ValueError of a closed file, or any error of a replaced stream
        return
