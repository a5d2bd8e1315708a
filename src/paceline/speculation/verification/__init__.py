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
        "InvalidDraft": "tree",
        "MAX_NODES": "tree",
        "PLAIN": "verification",
        "Round": "verification",
        "Verdict": "verification",
        "ancestors": "tree",
        "prune": "tree",
        "validate": "tree",
        "verify": "verification",
        "verify_picks": "verification",
    },
)
