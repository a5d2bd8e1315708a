"""The four ways in which speculation across a network goes wrong, each with the figure that shows it and its remedy."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Name = Literal["low_acceptance", "slow_draft", "slow_network", "kv_pressure"]

FEW_ACCEPTED = 2.0
PERSISTENCE = 20
"""Looks in a row that must agree before a symptom is there, and before it is gone."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What was measured of late. None: not measured."""

    accepted: float | None = None
    """Drafts accepted a round."""
    depth: float | None = None
    """Drafts offered a round: with fewer than two, fewer than two accepted says nothing."""
    draft_seconds: float | None = None
    """To draft a round afresh, network left out."""
    verify_seconds: float | None = None
    round_trip: float | None = None
    preemptions: float | None = None
    """A step, with speculation on."""


@dataclass(frozen=True, slots=True)
class Symptom:
    name: Name
    figure: float
    limit: float
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.figure:.4g} against {self.limit:.4g}; {self.remedy}"


def symptoms(vitals: Vitals) -> list[Symptom]:
    """What shows in these figures alone."""
    found = []
    if vitals.accepted is not None and (vitals.depth or 0.0) >= FEW_ACCEPTED and vitals.accepted < FEW_ACCEPTED:
        remedy = "the breaker turns to plain decoding where it loses; choose a closer draft, or n-gram for this traffic"
        found.append(Symptom("low_acceptance", vitals.accepted, FEW_ACCEPTED, remedy))
    draft, verify, network = vitals.draft_seconds, vitals.verify_seconds, vitals.round_trip
    if draft is not None and verify is not None and draft > verify:
        found.append(
            Symptom("slow_draft", draft, verify, "depth is cut until a draft takes no longer; use a smaller draft")
        )
    if network is not None and draft is not None and network > draft:
        remedy = "drafts are sent ahead of the verdict; place the draft pool nearer, or use a local method"
        found.append(Symptom("slow_network", network, draft, remedy))
    if vitals.preemptions:
        remedy = "speculative slots crowd out sequences: less depth, more cache, or fewer sequences at once"
        found.append(Symptom("kv_pressure", vitals.preemptions, 0.0, remedy))
    return found


class SymptomWatch:
    """Symptoms that persist. `observe` returns those that have just set in, so that each is logged once."""

    def __init__(self, persistence: int = PERSISTENCE) -> None:
        self._persistence = persistence
        self._streak: dict[Name, int] = {}
        self._active: dict[Name, Symptom] = {}

    @property
    def active(self) -> tuple[Symptom, ...]:
        return tuple(self._active.values())

    def has(self, name: Name) -> bool:
        return name in self._active

    def observe(self, vitals: Vitals) -> list[Symptom]:
        found = {symptom.name: symptom for symptom in symptoms(vitals)}
        new = []
        for name in self._names(found):
            present = name in found
            if present == (name in self._active):
                self._streak[name] = 0
                if present:
                    self._active[name] = found[name]
                continue
            self._streak[name] = self._streak.get(name, 0) + 1
            if self._streak[name] < self._persistence:
                continue
            self._streak[name] = 0
            if present:
                self._active[name] = found[name]
                new.append(found[name])
            else:
                del self._active[name]
        return new

    def _names(self, found: Iterable[Name]) -> list[Name]:
        return sorted({*found, *self._active, *self._streak})
