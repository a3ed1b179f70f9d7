# SPDX-License-Identifier: Apache-2.0
"""Start the command line. Ctrl-C and every locale are handled before a large module is imported."""

import errno
import io
import os
import signal
import sys
from types import FrameType

from trtllm_b12x.core.errors import say


def main() -> None:
    """Run ``trtllm-b12x``. Ctrl-C ends it with one line and status 130; text that standard output cannot encode is escaped."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's job may ignore SIGINT
        signal.signal(signal.SIGINT, _stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from trtllm_b12x.tools.cli import main

        main()
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich", "packaging", "filelock"):
            raise
        say(f"error: {error.name} is not installed: pip install {error.name}")
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        say(f"error: standard output cannot be written ({error.strerror})")
        os._exit(2)  # Python's own flush would fail again


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit at once. A module that is being imported could swallow an exception or raise a different one."""
    say("interrupted")
    os._exit(130)


if __name__ == "__main__":
    main()
