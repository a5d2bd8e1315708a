"""The files of drafts: their forms, pickled weights, and weights by the names of a loader."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.draft_files.forms import (
        FORM_NAMES,
        DraftForm,
        DraftKind,
        FileWeights,
        recognize_draft,
    )
    from paceline.models.draft_files.names import NamedWeights, check_shapes, name_weights

__all__ = [
    "FORM_NAMES",
    "DraftForm",
    "DraftKind",
    "FileWeights",
    "NamedWeights",
    "check_shapes",
    "name_weights",
    "recognize_draft",
]

__getattr__ = lazy_face(
    __name__,
    {
        "forms": "FORM_NAMES DraftForm DraftKind FileWeights recognize_draft",
        "names": "NamedWeights check_shapes name_weights",
    },
)
