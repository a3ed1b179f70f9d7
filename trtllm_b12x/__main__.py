"""Entry of the command line. It is ready for Ctrl-C and for every locale before anything large is imported."""

import errno
import io
import os
import signal
import sys
from types import FrameType

from trtllm_b12x.core.errors import say


def main() -> None:
    """Run ``trtllm-b12x``. Ctrl-C ends it with one line and status 130; text that standard output cannot encode is escaped."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # jobs of a shell may ignore it
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
    """Exit at once. An exception could be lost or reported as another in what is being imported."""
    say("interrupted")
    os._exit(130)


if __name__ == "__main__":
    main()
