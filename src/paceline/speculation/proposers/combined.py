"""Several methods at once: every sequence is drafted for by the one that promises most for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.core.clock import Clock
from paceline.speculation.drafts import NO_COST, DraftBatch
from paceline.speculation.proposer import HiddenRequest, Progress, Proposer, ProposerTraits
from paceline.speculation.proposers.choice import Candidate, MethodChoice
from paceline.speculation.trees.guess import Guess, batch_of
from paceline.speculation.trees.merging import merge


@dataclass(slots=True)
class _Rider:
    progress: Progress
    method: str = ""
    drafted: str = ""
    """The method whose guess was handed over: picks after its nodes are for nobody else."""
    muted: Progress = field(init=False)
    """What the others hear."""
    base: int = 0
    """Tokens that were committed when `guesses` were made."""
    guesses: dict[str, Guess] = field(default_factory=dict)

    def heard_by(self, method: str) -> Progress:
        return self.progress if method == self.drafted else self.muted


class CombinedProposer:
    """Lookups guess every round and are judged by the text whether used or not; of the models only the chosen one works.

    Its parts may serve other sequences on their own at the same time: a sequence belongs to one method. A model that was
    chosen and has nothing leaves the round to the best lookup.
    """

    def __init__(self, lookups: Mapping[str, Proposer], models: Mapping[str, Proposer], clock: Clock) -> None:
        """`lookups` answer from memory within microseconds, whatever the deadline; `models` take their time."""
        if set(lookups) & set(models):
            raise ValueError(f"both a lookup and a model: {', '.join(sorted(set(lookups) & set(models)))}")
        self._lookups, self._models, self._clock = lookups, models, clock
        self._choice = MethodChoice(list(models))
        self._riders: dict[int, _Rider] = {}
        self._handed_over: float | None = None
        self._started = dict.fromkeys(models, 0.0)
        """Seconds that each model's `observe` took for the round to come."""
        traits = [model.traits for model in models.values()]
        self.traits = ProposerTraits(
            hidden=_union([one.hidden for one in traits if one.hidden is not None]),
            runners=tuple(runner for one in traits for runner in one.runners),
            heads=tuple(head for one in traits for head in one.heads),
        )

    def method(self, sequence_id: int) -> str:
        """Who drafts for this sequence next; empty if nobody does."""
        rider = self._riders.get(sequence_id)
        return rider.method if rider else ""

    def observe(self, batch: Sequence[Progress]) -> None:
        if self._handed_over is not None:
            self._choice.passed(self._clock.now() - self._handed_over)
            self._handed_over = None
        riders = [self._settle(progress) for progress in batch]
        self._look_up([rider for rider in riders if rider.progress.depth > 0])
        for name, model in self._models.items():
            started = self._clock.now()
            model.observe(
                [r.heard_by(name) if r.method == name else replace(r.heard_by(name), depth=0) for r in riders]
            )
            self._started[name] = self._clock.now() - started

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        riders = [rider for i in sequence_ids if (rider := self._riders.get(i)) and rider.method]
        batches: list[DraftBatch] = []
        delivered: set[int] = set()
        for name, model in self._models.items():
            asked = [rider.progress.sequence_id for rider in riders if rider.method == name]
            if not asked:
                continue
            started = self._clock.now()
            drafts = model.collect(asked, deadline)
            split = drafts.split()
            self._choice.took(name, self._started[name] + self._clock.now() - started)
            for sequence_id in asked:
                draft = split.get(sequence_id)
                rider = self._riders[sequence_id]
                rider.guesses[name] = Guess(draft.tokens, draft.parents) if draft else Guess()
                rider.drafted = name if draft else ""
            delivered.update(split)
            batches.append(drafts)
        rest = [rider for rider in riders if rider.progress.sequence_id not in delivered]
        for rider in rest:
            rider.drafted = self._in_hand(rider)
        batches.append(batch_of((r.progress.sequence_id, r.guesses.get(r.drafted, Guess())) for r in rest))
        self._handed_over = self._clock.now()
        return replace(merge(batches), cost=NO_COST)  # a draft prefill of a part counts as drafting here

    def close(self, sequence_ids: Sequence[int]) -> None:
        for part in (*self._lookups.values(), *self._models.values()):
            part.close(sequence_ids)
        for sequence_id in sequence_ids:
            self._riders.pop(sequence_id, None)
            self._choice.forget(sequence_id)

    def _settle(self, progress: Progress) -> _Rider:
        """Hold the last guesses against what was committed since."""
        rider = self._riders.setdefault(progress.sequence_id, _Rider(progress))
        committed = progress.ids[rider.base :] if rider.guesses else ()
        if committed:
            for method, guess in rider.guesses.items():
                matched = guess.matched(committed)
                open_ended = matched == len(committed) and matched < len(guess)
                size = rider.progress.depth if method in self._models else len(guess)
                self._choice.observe(progress.sequence_id, method, size, matched, open_ended)
        rider.progress, rider.method, rider.base, rider.guesses = progress, "", len(progress.ids), {}
        rider.muted = replace(progress, picks=progress.picks[:1]) if len(progress.picks) > 1 else progress
        return rider

    def _look_up(self, riders: Sequence[_Rider]) -> None:
        """Every lookup's guess, and from these the method of each rider."""
        ids = [rider.progress.sequence_id for rider in riders]
        for name, lookup in self._lookups.items():
            lookup.observe([rider.heard_by(name) for rider in riders])
            for sequence_id, draft in lookup.collect(ids, self._clock.now()).split().items():
                self._riders[sequence_id].guesses[name] = Guess(draft.tokens, draft.parents)
        candidates = [
            Candidate(r.progress.sequence_id, r.progress.depth, {name: len(g) for name, g in r.guesses.items()})
            for r in riders
        ]
        for rider, method in zip(riders, self._choice.choose(candidates), strict=True):
            rider.method = method

    def _in_hand(self, rider: _Rider) -> str:
        """The chosen lookup, or the best of all where a model was chosen and had nothing."""
        if rider.method in self._lookups:
            return rider.method
        sizes = {name: len(guess) for name, guess in rider.guesses.items() if name in self._lookups}
        return self._choice.in_hand(Candidate(rider.progress.sequence_id, rider.progress.depth, sizes))


def _union(requests: Sequence[HiddenRequest]) -> HiddenRequest | None:
    if not requests:
        return None
    layers = sorted({layer for request in requests for layer in request.layers})
    return HiddenRequest(tuple(layers), any(request.last for request in requests))
