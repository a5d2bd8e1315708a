"""Times at which the requests of an open loop arrive."""

from pathlib import Path

from paceline.planning.traces.trace_file import load_trace


def arrival_times(path: Path, count: int, rate: float) -> list[float]:
    """The first `count` arrivals of a trace, scaled to a mean of `rate` per second."""
    seconds = [request.arrival for request in load_trace(path).requests[:count]]
    scale = (len(seconds) - 1) / rate / (seconds[-1] - seconds[0])
    return [scale * (second - seconds[0]) for second in seconds]
