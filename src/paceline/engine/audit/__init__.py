"""Finished texts are computed again without speculation and compared."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.engine.audit.rescoring import (
        Difference,
        FinishedText,
        Rescored,
        Rescoring,
        computed_in,
        differences,
        rounding,
    )
    from paceline.engine.audit.self_audit import SelfAudit

__all__ = ["Difference", "FinishedText", "Rescored", "Rescoring", "SelfAudit", "computed_in", "differences", "rounding"]

__getattr__ = lazy_face(
    __name__,
    {
        "rescoring": "Difference FinishedText Rescored Rescoring computed_in differences rounding",
        "self_audit": "SelfAudit",
    },
)
