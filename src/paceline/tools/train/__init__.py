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
        "DraftTraining": "further",
        "FurtherTraining": "further",
        "LearnPlan": "plan",
        "LearnedDraft": "further",
        "Pacer": "further",
        "Score": "evaluate",
        "TrainPlan": "plan",
        "export_head": "card",
        "lower_priority": "further",
        "table": "card",
        "train": "run",
    },
)
