"""Requests to simulate: files of public traces, and synthetic traffic."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.planning.traces.trace import BLOCK_TOKENS, Trace, TraceRequest
    from paceline.planning.traces.trace_files import TrafficPattern, load_trace, synthesize

__all__ = ["BLOCK_TOKENS", "Trace", "TraceRequest", "TrafficPattern", "load_trace", "synthesize"]

__getattr__ = lazy_face(
    __name__, {"trace": "BLOCK_TOKENS Trace TraceRequest", "trace_files": "TrafficPattern load_trace synthesize"}
)
