"""Requests to simulate: files of public traces, and synthetic traffic."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.planning.traces.trace import BLOCK_TOKENS, Trace, TraceRequest
    from paceline.planning.traces.trace_files import TrafficPattern, load_trace, synthesize

__all__ = ["BLOCK_TOKENS", "Trace", "TraceRequest", "TrafficPattern", "load_trace", "synthesize"]

__getattr__ = lazy_face(
    __name__,
    {
        "BLOCK_TOKENS": "trace",
        "Trace": "trace",
        "TraceRequest": "trace",
        "TrafficPattern": "trace_files",
        "load_trace": "trace_files",
        "synthesize": "trace_files",
    },
)
