"""One line of a check-up: what was looked at, what was found, and what to change."""

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    GOOD = "good"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    found: str
    verdict: Verdict = Verdict.GOOD
    advice: str = ""

    @classmethod
    def note(cls, name: str, found: str, advice: str) -> "Check":
        """Works, but could be better."""
        return cls(name, found, Verdict.NOTE, advice)

    @classmethod
    def problem(cls, name: str, found: str, advice: str = "") -> "Check":
        """Does not work as configured."""
        return cls(name, found, Verdict.PROBLEM, advice)
