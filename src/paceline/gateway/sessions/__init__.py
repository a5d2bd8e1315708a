"""Admission, sessions and streams of HTTP requests."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.sessions.gateway import Gateway
    from paceline.gateway.sessions.models import ServedModels
    from paceline.gateway.sessions.samples import LearningSample, SampleBatch, SampleRing
    from paceline.gateway.sessions.session import RequestSession

__all__ = ["Gateway", "LearningSample", "RequestSession", "SampleBatch", "SampleRing", "ServedModels"]

__getattr__ = lazy_face(
    __name__,
    {
        "gateway": "Gateway",
        "models": "ServedModels",
        "samples": "LearningSample SampleBatch SampleRing",
        "session": "RequestSession",
    },
)
