"""`paceline learn`: trains a draft further on what a server generates, and offers it to the server."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.tools.learn.run import learn
    from paceline.tools.learn.versions import Lineage, TrialResult, VersionFolder

__all__ = ["Lineage", "TrialResult", "VersionFolder", "learn"]

__getattr__ = lazy_face(__name__, {"run": "learn", "versions": "Lineage TrialResult VersionFolder"})
