# SPDX-License-Identifier: Apache-2.0
"""Serialize b12x launches: one in flight per device, and one per captured graph.

b12x kernels use a grid-wide barrier in memory and layers of a geometry share scratch memory, so two launches must not overlap.
A launch on another stream waits for the previous one. With a single stream, the usual case, this costs nothing.
A captured graph has scratch memory of its own, so only launches inside the same graph are ordered, by edges of the graph.
"""

from __future__ import annotations

import threading

import torch

from trtllm_b12x.kernels import driver

_serializers: dict[str, StreamSerializer] = {}
_lock = threading.Lock()


class StreamSerializer:
    """Context manager around one b12x launch, on its stream. Entering returns the id of the active capture, or 0."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        # Captured and eager launches are ordered separately.
        self.last_captured_stream: torch.cuda.Stream | None = None
        self.last_eager_stream: torch.cuda.Stream | None = None
        self.last_capture_id = 0
        self.last_raw_stream = -1
        # Recorded after a launch on a stream that torch does not own, since the stream may be destroyed before the next launch.
        self.done: torch.cuda.Event | None = None

    @staticmethod
    def of(device: torch.device) -> StreamSerializer:
        """Return the serializer of ``device``, which all geometries share."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        with _lock:
            return _serializers.setdefault(str(device), StreamSerializer(device))

    def __enter__(self) -> int:
        self.lock.acquire()
        try:
            if self.device.type != "cuda":
                return 0
            if torch.cuda.is_current_stream_capturing():
                return self._order_captured()
            if torch._C._cuda_getCurrentRawStream(self.device.index) != self.last_raw_stream:
                self._order_eager(torch.cuda.current_stream(self.device))
            return 0
        except BaseException:
            self.lock.release()
            raise

    def _order_eager(self, stream: torch.cuda.Stream) -> None:
        last = self.last_eager_stream
        if self.done is not None:
            stream.wait_event(self.done)
        elif last is not None and not _is_capturing(last):
            stream.wait_stream(last)
        self.last_eager_stream, self.last_raw_stream = stream, stream.cuda_stream
        # torch's streams live as long as the process. The id of an external stream is its handle.
        self.done = torch.cuda.Event() if stream.stream_id == stream.cuda_stream != 0 else None

    def _order_captured(self) -> int:
        stream = torch.cuda.current_stream(self.device)
        capture, last = driver.capture_of(stream.cuda_stream), self.last_captured_stream
        if capture == self.last_capture_id and last is not None and last != stream:
            stream.wait_stream(last)
        self.last_captured_stream, self.last_capture_id = stream, capture
        return capture

    def __exit__(self, *error: object) -> None:
        try:
            if self.done is not None and not torch.cuda.is_current_stream_capturing():
                self.done.record()
        finally:
            self.lock.release()


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
