"""Collects the samples of one session, if its key agreed to learning."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.output import StepOutput
from paceline.core.request import ValidatedRequest
from paceline.core.sequence import Origin
from paceline.server.auth.api_keys import ApiKey
from paceline.server.learning.sample_ring import SampleRing


@dataclass(slots=True)
class _Choice:
    """The output of one choice so far."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: int = 0
    rounds: int = 0


class SampleCollector:
    """Adds every choice of a session to the ring when it finishes. A cancelled or failed choice adds nothing."""

    def __init__(self, ring: SampleRing, key: ApiKey, requests: Sequence[ValidatedRequest]) -> None:
        self._ring, self._tenant = ring, ring.tenant(key.id)
        # A resumed stream lacks the origins of its first tokens, and a verification has no output of its own.
        self._requests = {one.id: one for one in requests if not one.committed and one.draft is None}
        self._choices: dict[tuple[str, int], _Choice] = {}

    def add(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            place = output.request_id, output.choice
            choice = self._choices.setdefault(place, _Choice())
            start = len(choice.tokens)
            choice.tokens += output.tokens
            choice.accepted += [start + i for i, origin in enumerate(output.origins) if origin is Origin.ACCEPTED]
            choice.drafted += output.drafted
            choice.rounds += bool(output.tokens)
            if output.finish_reason is not None:
                del self._choices[place]
                self._finish(request, choice)

    def _finish(self, request: ValidatedRequest, choice: _Choice) -> None:
        if choice.tokens:
            self._ring.add(
                request.prompt_ids,
                choice.tokens,
                choice.accepted,
                choice.drafted,
                choice.rounds,
                self._tenant,
                request.category,
            )


def make_collector(
    ring: SampleRing | None, key: ApiKey, is_strict: bool, requests: Sequence[ValidatedRequest]
) -> SampleCollector | None:
    """None if the server does not collect, the key did not agree, or the session is strict, which uses no drafts."""
    if ring is None or not key.learning or is_strict:
        return None
    return SampleCollector(ring, key, requests)
