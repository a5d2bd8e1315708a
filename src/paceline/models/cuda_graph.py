"""Work for the device that recurs: recorded once as a CUDA graph, then launched as one. Without a GPU it is simply done again,
the run before recording included, so that everything built on graphs can be tested anywhere."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

MAX_GRAPH_ROWS = 512
"""Rows of the largest pass of the host's that is worth a graph: beyond, launches hide behind the work."""

_RECORDING = threading.Lock()
"""One at a time in a process: to begin, the whole device is waited for, which nobody may do while another records."""


class Graph(Generic[T]):
    """`compute` reads and writes tensors that stay where they are."""

    def __init__(self, compute: Callable[[], T], device: torch.device, pool: "GraphPool") -> None:
        """Runs `compute` once, to compile and settle, before recording it."""
        self._compute = compute
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            compute()
            return
        with _RECORDING:
            side = pool.stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                compute()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads compute on, on streams of their own
            with torch.cuda.graph(graph, pool=pool.handle, stream=side, capture_error_mode="thread_local"):
                self._output = compute()
            self._graph = graph

    def replay(self) -> T:
        """Launch it. The output's memory is the same every time."""
        if self._graph is None:
            return self._compute()
        self._graph.replay()
        return self._output


class GraphPool:
    """Memory that graphs share which never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._stream: torch.cuda.Stream | None = None

    def stream(self) -> torch.cuda.Stream:
        """Where its graphs are recorded. They keep its priority wherever they are launched: that of whoever recorded first."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=torch.cuda.current_stream().priority)
        return self._stream


class Stamp:
    """A moment in the device's stream of work."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._at = 0.0

    def record(self) -> None:
        if self._event is None:
            self._at = time.perf_counter()
        else:
            self._event.record()

    def wait(self) -> None:
        """Until the device has come this far."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Stamp") -> float:
        """Both must have been passed."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Stopwatch:
    """Runs from now on, as the device's stream of work goes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = Stamp(device)
        self._began.record()

    def seconds(self) -> float:
        """Until all is done that the device was given."""
        end = Stamp(self._device)
        end.record()
        end.wait()
        return end.seconds_since(self._began)


def host_bytes(size: int, device: torch.device) -> memoryview:
    """Memory of the host that bytes of `device` are copied through; pinned where that makes it faster."""
    return staging(size, dtype=torch.uint8, device=device).numpy().data


def staging(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the host that `device` can copy from and to without anybody waiting."""
    values = torch.zeros(*shape, dtype=dtype)
    return values.pin_memory() if device.type == "cuda" else values
