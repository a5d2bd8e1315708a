"""CUDA graphs and memory of a device."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.device.cuda_graph import (
        MAX_GRAPH_ROWS,
        Graph,
        GraphPool,
        SideStream,
        StreamEvent,
        StreamTimer,
        graph_in_capture,
        side_stream,
        staging_bytes,
        staging_tensor,
    )

__all__ = [
    "MAX_GRAPH_ROWS",
    "Graph",
    "GraphPool",
    "SideStream",
    "StreamEvent",
    "StreamTimer",
    "graph_in_capture",
    "side_stream",
    "staging_bytes",
    "staging_tensor",
]

__getattr__ = lazy_face(
    __name__,
    {
        "Graph": "cuda_graph",
        "GraphPool": "cuda_graph",
        "MAX_GRAPH_ROWS": "cuda_graph",
        "SideStream": "cuda_graph",
        "StreamEvent": "cuda_graph",
        "StreamTimer": "cuda_graph",
        "graph_in_capture": "cuda_graph",
        "side_stream": "cuda_graph",
        "staging_bytes": "cuda_graph",
        "staging_tensor": "cuda_graph",
    },
)
