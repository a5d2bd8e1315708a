"""The server of a target worker, and its engine behind it."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.worker.server.backend import BackendReport, Control, WorkerFailed
    from paceline.worker.server.draft_swap import DraftSwaps
    from paceline.worker.server.draft_trial import AlternatingDraftTrial
    from paceline.worker.server.engine_backend import EngineBackend, WorkerHung
    from paceline.worker.server.gateways import Submission
    from paceline.worker.server.overload import WorkerOverload
    from paceline.worker.server.server import WorkerServer
    from paceline.worker.server.weights_change import WeightsChanges, weights_loader

__all__ = [
    "AlternatingDraftTrial",
    "BackendReport",
    "Control",
    "DraftSwaps",
    "EngineBackend",
    "Submission",
    "WeightsChanges",
    "WorkerFailed",
    "WorkerHung",
    "WorkerOverload",
    "WorkerServer",
    "weights_loader",
]

__getattr__ = lazy_face(
    __name__,
    {
        "backend": "BackendReport Control WorkerFailed",
        "draft_swap": "DraftSwaps",
        "draft_trial": "AlternatingDraftTrial",
        "engine_backend": "EngineBackend WorkerHung",
        "gateways": "Submission",
        "overload": "WorkerOverload",
        "server": "WorkerServer",
        "weights_change": "WeightsChanges weights_loader",
    },
)
