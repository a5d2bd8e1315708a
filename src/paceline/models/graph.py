"""Work for the device that recurs: recorded once as a CUDA graph, then launched as one. Without a GPU it is simply done again,
so that everything built on graphs can be tested anywhere."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Graph(Generic[T]):
    """`compute` reads and writes tensors that stay where they are."""

    def __init__(self, compute: Callable[[], T], device: torch.device, pool: "GraphPool") -> None:
        """Runs `compute` once, to compile and settle, before recording it."""
        self._compute = compute
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool.handle):
            self._output = compute()

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
        if self._event is None:
            return self._at - earlier._at
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def staging(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the host that `device` can copy from and to without anybody waiting."""
    values = torch.zeros(*shape, dtype=dtype)
    return values.pin_memory() if device.type == "cuda" else values
