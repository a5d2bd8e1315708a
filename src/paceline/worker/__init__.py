"""A worker process: its server, its engine or upstream server, and the hand-off of prompts."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.worker.main import Process, make_worker

__all__ = ["Process", "make_worker"]

__getattr__ = lazy_face(__name__, {"main": "Process make_worker"})
