"""Verification: the target distribution, the two acceptance rules, and the noise."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.speculation.verification.tree import MAX_NODES, InvalidDraft, ancestors, prune, validate
    from paceline.speculation.verification.verification import PLAIN, Round, Verdict, verify, verify_picks

__all__ = [
    "MAX_NODES",
    "PLAIN",
    "InvalidDraft",
    "Round",
    "Verdict",
    "ancestors",
    "prune",
    "validate",
    "verify",
    "verify_picks",
]

__getattr__ = lazy_face(
    __name__,
    {
        "tree": "InvalidDraft MAX_NODES ancestors prune validate",
        "verification": "PLAIN Round Verdict verify verify_picks",
    },
)
