"""At most one launch of b12x in flight per device.

The CTAs of static, micro and direct micro wait for each other on a barrier in memory, and layers of a geometry share scratch
memory.  Launches are cooperative in 0.6.17 to 0.7.2, so that a grid is resident as a whole or not at all; two of them could still
share scratch.  So a launch on another stream than the last one waits for it.  One stream, the usual case, costs nothing.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch

_turns: dict[str, Turn] = {}
_lock = threading.Lock()


class Turn:
    """The right to launch on one device; a context manager around the launch, on its stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.last: dict[bool, Any] = {}
        """Stream of the last launch, of those that were captured and of the others."""
        self.now: tuple[int, bool] | None = None

    @staticmethod
    def of(device: torch.device) -> Turn:
        """The one of ``device``; all geometries share it."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        with _lock:
            return _turns.setdefault(str(device), Turn(device))

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.device.type != "cuda":
            return
        try:
            now = torch._C._cuda_getCurrentRawStream(self.device.index), torch.cuda.is_current_stream_capturing()
            if now != self.now:
                self._change(now[1])
                self.now = now
        except BaseException:
            self.lock.release()
            raise

    def _change(self, capturing: bool) -> None:
        stream, last = torch.cuda.current_stream(self.device), self.last.get(capturing)
        # No edge can be drawn between a graph that is being captured and what is not: whoever replays it orders it against the
        # rest, as with all its other memory.
        if last is not None and last != stream and _is_capturing(last) == capturing:
            stream.wait_stream(last)
        self.last[capturing] = stream

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.lock.release()


def _is_capturing(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
