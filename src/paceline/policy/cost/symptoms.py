"""Failure modes of speculation, each with its figure and its remedy: four across a network, and steps on the host of a GPU."""

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.status import Symptom

MIN_ACCEPTED = 2.0
MAX_HOST_SHARE = 0.05
"""Share of steps on the host above which a GPU loses speed."""
HOST_REMEDIES = {
    "admission": "requests join a batch that drafts with a head or a method that cannot take them over: use a draft model",
    "blocks": "the KV cache has too few free blocks: add cache (`kv_tokens`), or run fewer sequences",
    "draft_behind": "a head computes what it missed before it drafts: use a draft model, or fewer changes of the batch",
    "few_drafts": "few sequences of a batch draft: ask for the same depth in all requests",
    "prefill": "prompts are computed next to drafts of a head: use a draft model, or a prefill worker",
    "proposer": "a method drafts on the host: use a draft model or a head instead of lookups",
    "sampling": "requests have grammars, rejection or long lists of tokens: send them to workers of their own",
    "window": "sequences reach `max_model_len`: raise it",
}
"""What to do about each reason of `HostReason`; the others are rare."""
PERSISTENCE = 20
"""Observations in a row after which a symptom begins or ends."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """Recent measurements. A value that was not measured is None."""

    accepted: float | None = None
    """Accepted drafts per round."""
    depth: float | None = None
    """Drafted tokens per round."""
    draft_seconds: float | None = None
    """Time to draft a round on demand, without the network."""
    verify_seconds: float | None = None
    round_trip: float | None = None
    preemptions: float | None = None
    """Preemptions per step with speculation on."""
    host_share: float | None = None
    """Share of the steps that did not run as CUDA graphs, of an engine that has graphs."""
    host_reason: str = ""
    """The most frequent reason of these steps."""


def symptoms(measurements: Measurements) -> list[Symptom]:
    """The symptoms in these measurements."""
    found = []
    if (
        measurements.accepted is not None
        and (measurements.depth or 0.0) >= MIN_ACCEPTED
        and measurements.accepted < MIN_ACCEPTED
    ):
        remedy = "the breaker switches to plain decoding where drafts lose; choose a closer draft, or n-gram for this traffic"
        found.append(Symptom("low_acceptance", measurements.accepted, MIN_ACCEPTED, remedy))
    draft, verify, network = measurements.draft_seconds, measurements.verify_seconds, measurements.round_trip
    if draft is not None and verify is not None and draft > verify:
        remedy = "depth is reduced until a draft takes no longer than verification; use a smaller draft"
        found.append(Symptom("slow_draft", draft, verify, remedy))
    if network is not None and draft is not None and network > draft:
        remedy = "drafts are sent before they are requested; place the draft pool nearer, or use a local method"
        found.append(Symptom("slow_network", network, draft, remedy))
    if measurements.preemptions:
        remedy = "draft tokens take blocks that sequences need: lower the depth, add cache, or run fewer sequences"
        found.append(Symptom("kv_pressure", measurements.preemptions, 0.0, remedy))
    if measurements.host_share is not None and measurements.host_share > MAX_HOST_SHARE:
        reason = measurements.host_reason
        remedy = f"most often because of {reason}: {HOST_REMEDIES.get(reason, 'see docs/operations.md')}"
        found.append(Symptom("host_steps", measurements.host_share, MAX_HOST_SHARE, remedy))
    return found


class SymptomWatch:
    """Symptoms that persist."""

    def __init__(self, persistence: int = PERSISTENCE) -> None:
        self._persistence = persistence
        self._streak: dict[str, int] = {}
        self._active: dict[str, Symptom] = {}

    @property
    def active(self) -> tuple[Symptom, ...]:
        return tuple(self._active.values())

    def has(self, name: str) -> bool:
        return name in self._active

    def observe(self, measurements: Measurements) -> list[Symptom]:
        """Returns the symptoms that begin now, so that each is logged once."""
        found = {symptom.name: symptom for symptom in symptoms(measurements)}
        new = []
        for name in self._names(found):
            is_present = name in found
            if is_present == (name in self._active):
                self._streak[name] = 0
                if is_present:
                    self._active[name] = found[name]
                continue
            self._streak[name] = self._streak.get(name, 0) + 1
            if self._streak[name] < self._persistence:
                continue
            self._streak[name] = 0
            if is_present:
                self._active[name] = found[name]
                new.append(found[name])
            else:
                del self._active[name]
        return new

    def _names(self, found: Iterable[str]) -> list[str]:
        return sorted({*found, *self._active, *self._streak})
