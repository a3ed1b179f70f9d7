"""At most one launch of b12x in flight per device, and within each captured graph.

The CTAs of static, micro and direct micro wait for each other on a barrier in memory, and layers of a geometry share scratch
memory.  Launches are cooperative from 0.6.17 on, so that a grid is resident as a whole or not at all; two of them could still
share scratch.  So a launch on another stream than the last one waits for it.  One stream, the usual case, costs nothing.
A graph that is captured has scratch memory of its own, so only its own launches are ordered, by edges of the graph.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch

_turns: dict[str, Turn] = {}
_lock = threading.Lock()


class Turn:
    """The right to launch on one device; a context manager around the launch, on its stream, that gives the capture under way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.last: dict[bool, Any] = {}
        """Stream of the last launch, of those that were captured and of the others."""
        self.capture = 0
        """Id of the graph capture that the last captured launch belongs to."""
        self.stream = -1
        """Stream of the last launch that was not captured."""
        self.done: torch.cuda.Event | None = None
        """Behind the last launch, where its stream is not torch's own: it may be gone when the next one asks."""

    @staticmethod
    def of(device: torch.device) -> Turn:
        """The one of ``device``; all geometries share it."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        with _lock:
            return _turns.setdefault(str(device), Turn(device))

    def __enter__(self) -> int:
        """Identity of the capture that the current stream takes part in, 0 for none."""
        self.lock.acquire()
        try:
            if self.device.type != "cuda":
                return 0
            if torch.cuda.is_current_stream_capturing():
                return self._enter_capture()
            if torch._C._cuda_getCurrentRawStream(self.device.index) != self.stream:
                self._wait_for_the_last(torch.cuda.current_stream(self.device))
            return 0
        except BaseException:
            self.lock.release()
            raise

    def _wait_for_the_last(self, stream: torch.cuda.Stream) -> None:
        last = self.last.get(False)
        if self.done is not None:
            stream.wait_event(self.done)
        elif last is not None and not _is_capturing(last):
            stream.wait_stream(last)
        self.last[False], self.stream = stream, stream.cuda_stream
        # A stream of torch's own lives as long as the process.  One from elsewhere carries its handle as its id.
        self.done = torch.cuda.Event() if stream.stream_id == stream.cuda_stream != 0 else None

    def _enter_capture(self) -> int:
        stream = torch.cuda.current_stream(self.device)
        capture = _capture_id(stream)
        last = self.last.get(True) if capture == self.capture else None
        if last is not None and last != stream:
            stream.wait_stream(last)
        self.last[True], self.capture = stream, capture
        return capture

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self.done is not None and not torch.cuda.is_current_stream_capturing():
                self.done.record()
        finally:
            self.lock.release()


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _capture_id(stream: torch.cuda.Stream) -> int:
    from cuda.bindings import runtime  # a requirement of the CuTe DSL

    status, *found = runtime.cudaStreamGetCaptureInfo(stream.cuda_stream)
    if int(status):
        raise RuntimeError(f"cudaStreamGetCaptureInfo: {status}")
    return int(found[1])
