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
        "cuda_graph": (
            "Graph GraphPool MAX_GRAPH_ROWS SideStream StreamEvent StreamTimer"
            " graph_in_capture side_stream staging_bytes staging_tensor"
        )
    },
)
