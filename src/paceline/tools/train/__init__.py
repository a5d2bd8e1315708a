"""Training of drafts: the target generates text, a draft learns to predict it, and a card holds its scores."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.tools.train.card import export_head, table
    from paceline.tools.train.evaluate import Score
    from paceline.tools.train.further import DraftTraining, FurtherTraining, LearnedDraft, Pacer, lower_priority
    from paceline.tools.train.plan import LearnPlan, TrainPlan
    from paceline.tools.train.run import train

__all__ = [
    "DraftTraining",
    "FurtherTraining",
    "LearnPlan",
    "LearnedDraft",
    "Pacer",
    "Score",
    "TrainPlan",
    "export_head",
    "lower_priority",
    "table",
    "train",
]

__getattr__ = lazy_face(
    __name__,
    {
        "card": "export_head table",
        "evaluate": "Score",
        "further": "DraftTraining FurtherTraining LearnedDraft Pacer lower_priority",
        "plan": "LearnPlan TrainPlan",
        "run": "train",
    },
)
