"""Draft, verify and accept captured as CUDA graphs, submitted one step ahead."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.engine.graph.drafter import GraphProposer
    from paceline.engine.graph.executor import GraphExecutor
    from paceline.engine.graph.selection import draft_shape

__all__ = ["GraphExecutor", "GraphProposer", "draft_shape"]

__getattr__ = lazy_face(__name__, {"drafter": "GraphProposer", "executor": "GraphExecutor", "selection": "draft_shape"})
