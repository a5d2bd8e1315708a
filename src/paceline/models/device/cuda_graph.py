"""CUDA graphs, events and staging memory. Without a GPU a graph runs its function again, so that code built on graphs can be
tested on any machine.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

MAX_GRAPH_ROWS = 512
"""Most rows of a padded pass that is captured. In larger passes the launches overlap with the work."""

_CAPTURING = threading.local()

_CAPTURE_LOCK = threading.Lock()
"""Lock of captures in this process: a capture first synchronises the device, which is illegal during another capture."""


class Graph(Generic[T]):
    """A captured function. `compute` reads and writes tensors whose addresses do not change."""

    def __init__(
        self, compute: Callable[[], T], device: torch.device, pool: "GraphPool", is_warm: bool = False
    ) -> None:
        """Run `compute` once, to load kernels and allocate memory, then capture it. `is_warm` is true if all kernels of
        `compute` have run on the stream of the pool before. It is then captured at once."""
        self._compute = compute
        self._graph: torch.cuda.CUDAGraph | None = None
        self.before_replay: list[Callable[[], None]] = []
        """Actions of the host before each replay."""
        if device.type != "cuda":
            compute()
            return
        with _CAPTURE_LOCK:
            side = pool.stream()
            if not is_warm:
                with pool.on_stream():
                    compute()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads continue to use their own streams
            capture = torch.cuda.graph(graph, pool=pool.handle, stream=side, capture_error_mode="thread_local")
            with _no_garbage_collection(), _captured_by(self), capture:
                self._output = compute()
            self._graph = graph

    def replay(self) -> T:
        """Launch the graph. Every launch returns the same output tensors."""
        if self._graph is None:
            return self._compute()
        for action in self.before_replay:
            action()
        self._graph.replay()
        return self._output

    def release(self) -> None:
        """Free what was captured. The graph cannot be replayed any more."""
        if self._graph is not None:
            self._graph.reset()


@contextmanager
def _captured_by(graph: Graph[Any]) -> Iterator[None]:
    _CAPTURING.graph = graph
    try:
        yield
    finally:
        _CAPTURING.graph = None


def graph_in_capture() -> Graph[Any] | None:
    """The graph that this thread captures now. None if it captures no graph, so that submitted work runs at once."""
    graph: Graph[Any] | None = getattr(_CAPTURING, "graph", None)
    return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection could free the graphs of an engine that is no longer used, which is illegal during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphPool:
    """Memory shared by graphs that never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._stream: torch.cuda.Stream | None = None

    def stream(self) -> torch.cuda.Stream:
        """Stream on which graphs are captured. Graphs keep its priority, which is that of the stream of the first capture."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=torch.cuda.current_stream().priority)
        return self._stream

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Submit work to the stream of captures, after the work of the current stream and before what it gets next."""
        if self.handle is None:
            yield
            return
        current, side = torch.cuda.current_stream(), self.stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield
        current.wait_stream(side)


class SideStream:
    """A second stream of device work, for what need not wait for the work of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None

    @contextmanager
    def after(self, event: "StreamEvent") -> Iterator[None]:
        """Submit work to this stream, behind `event`."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            event.block()
            yield


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """Work inside it does not wait for the engine's. It can be entered again."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


class StreamEvent:
    """A point in the stream of device work, like a CUDA event."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._at = 0.0

    def record(self) -> None:
        if self._event is None:
            self._at = time.perf_counter()
        else:
            self._event.record()

    def wait(self) -> None:
        """Block until the device has reached the event."""
        if self._event is not None:
            self._event.synchronize()

    def block(self) -> None:
        """Let later work of the current stream wait for the event; the host does not wait."""
        if self._event is not None:
            self._event.wait()

    def seconds_since(self, earlier: "StreamEvent") -> float:
        """Device time between two events that the device has reached."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class StreamTimer:
    """Measures device time from its construction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = StreamEvent(device)
        self._began.record()

    def seconds(self) -> float:
        """Device time until all submitted work is done. It blocks until then."""
        end = StreamEvent(self._device)
        end.record()
        end.wait()
        return end.seconds_since(self._began)


def staging_bytes(size: int, device: torch.device) -> memoryview:
    """Host memory for copies from and to `device`, with undefined content; pinned for a GPU."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data
    return np.empty(size, np.uint8).data  # numpy asks for huge pages: fewer page faults than memory of torch


def staging_tensor(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory; pinned for a GPU, so that copies do not block."""
    values = torch.zeros(*shape, dtype=dtype)
    return values.pin_memory() if device.type == "cuda" else values
