"""A target worker: an engine behind a socket."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.worker.server.draft_swap import AlternatingDraftTrial, DraftSwaps
    from paceline.worker.server.gateways import GatewaySession, GatewaySessions, Submission
    from paceline.worker.server.server import TargetWorker, WorkerHung

__all__ = [
    "AlternatingDraftTrial",
    "DraftSwaps",
    "GatewaySession",
    "GatewaySessions",
    "Submission",
    "TargetWorker",
    "WorkerHung",
]

__getattr__ = lazy_face(
    __name__,
    {
        "AlternatingDraftTrial": "draft_swap",
        "DraftSwaps": "draft_swap",
        "GatewaySession": "gateways",
        "GatewaySessions": "gateways",
        "Submission": "gateways",
        "TargetWorker": "server",
        "WorkerHung": "server",
    },
)
