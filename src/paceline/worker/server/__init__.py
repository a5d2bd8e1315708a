"""The server of a target worker, and its engine behind it."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.worker.server.backend import BackendReport, Control, WorkerFailed
    from paceline.worker.server.draft_swap import DraftSwaps
    from paceline.worker.server.draft_trial import AlternatingDraftTrial
    from paceline.worker.server.engine_backend import EngineBackend, WorkerHung
    from paceline.worker.server.gateways import Submission
    from paceline.worker.server.server import WorkerServer

__all__ = [
    "AlternatingDraftTrial",
    "BackendReport",
    "Control",
    "DraftSwaps",
    "EngineBackend",
    "Submission",
    "WorkerFailed",
    "WorkerHung",
    "WorkerServer",
]

__getattr__ = lazy_face(
    __name__,
    {
        "AlternatingDraftTrial": "draft_trial",
        "BackendReport": "backend",
        "Control": "backend",
        "DraftSwaps": "draft_swap",
        "EngineBackend": "engine_backend",
        "Submission": "gateways",
        "WorkerFailed": "backend",
        "WorkerHung": "engine_backend",
        "WorkerServer": "server",
    },
)
