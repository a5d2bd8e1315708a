"""The proposer `combined`: of several methods, the best one drafts for each sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.core.clock import Clock
from paceline.speculation import HiddenRequest, Proposer, ProposerTraits, SequenceProgress
from paceline.speculation.drafts import DraftBatch, DraftTree, merge_batches
from paceline.speculation.proposers.choice import DraftCandidate, MethodChoice


@dataclass(slots=True)
class _Sequence:
    progress: SequenceProgress
    method: str = ""
    drafted: str = ""
    """Method whose draft was returned. Only that method gets the target's picks after its nodes."""
    without_picks: SequenceProgress = field(init=False)
    """Progress for the other methods."""
    base: int = 0
    """Committed tokens when `trees` were drafted."""
    trees: dict[str, DraftTree] = field(default_factory=dict)

    def progress_for(self, method: str) -> SequenceProgress:
        return self.progress if method == self.drafted else self.without_picks


class CombinedProposer:
    """Lookups draft in every round and are compared with the text whether used or not. Only the chosen models draft.

    The parts may serve other sequences on their own at the same time. If the chosen model returns no draft, the best lookup
    drafts instead. A draft prefill of a part counts as drafting time here.
    """

    def __init__(self, lookups: Mapping[str, Proposer], models: Mapping[str, Proposer], clock: Clock) -> None:
        """`lookups` draft from memory within microseconds, whatever the deadline; `models` take longer."""
        if set(lookups) & set(models):
            raise ValueError(f"both a lookup and a model: {', '.join(sorted(set(lookups) & set(models)))}")
        self._lookups, self._models, self._clock = lookups, models, clock
        self._choice = MethodChoice(list(models))
        self._sequences: dict[int, _Sequence] = {}
        self._returned_at: float | None = None
        self._observe_seconds = dict.fromkeys(models, 0.0)
        """Seconds that each model's last `observe` took."""
        traits = [model.traits for model in models.values()]
        self.traits = ProposerTraits(
            hidden=_union([model_traits.hidden for model_traits in traits if model_traits.hidden is not None]),
            runners=tuple(runner for model_traits in traits for runner in model_traits.runners),
            heads=tuple(head for model_traits in traits for head in model_traits.heads),
            weights=next((model_traits.weights for model_traits in traits if model_traits.weights is not None), None),
        )

    def method(self, sequence_id: int) -> str:
        """The method that drafts next for this sequence; "" if none does."""
        sequence = self._sequences.get(sequence_id)
        return sequence.method if sequence else ""

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        if self._returned_at is not None:
            self._choice.observe_pass_time(self._clock.now() - self._returned_at)
            self._returned_at = None
        sequences = [self._commit(progress) for progress in batch]
        self._look_up([sequence for sequence in sequences if sequence.progress.depth > 0])
        for name, model in self._models.items():
            started = self._clock.now()
            model.observe(
                [
                    s.progress_for(name) if s.method == name else replace(s.progress_for(name), depth=0)
                    for s in sequences
                ]
            )
            self._observe_seconds[name] = self._clock.now() - started

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        sequences = [sequence for i in sequence_ids if (sequence := self._sequences.get(i)) and sequence.method]
        batches: list[DraftBatch] = []
        drafted: set[int] = set()
        for name, model in self._models.items():
            chosen = [sequence.progress.sequence_id for sequence in sequences if sequence.method == name]
            if not chosen:
                continue
            started = self._clock.now()
            batch = model.collect(chosen, deadline)
            drafts = batch.split()
            self._choice.observe_draft_time(name, self._observe_seconds[name] + self._clock.now() - started)
            for sequence_id in chosen:
                draft = drafts.get(sequence_id)
                sequence = self._sequences[sequence_id]
                sequence.trees[name] = DraftTree(draft.tokens, draft.parents) if draft else DraftTree()
                sequence.drafted = name if draft else ""
            drafted.update(drafts)
            batches.append(batch)
        others = [sequence for sequence in sequences if sequence.progress.sequence_id not in drafted]
        for sequence in others:
            sequence.drafted = self._lookup_for(sequence)
        trees = ((s.progress.sequence_id, s.trees.get(s.drafted, DraftTree())) for s in others)
        batches.append(DraftBatch.trees(trees))
        self._returned_at = self._clock.now()
        return merge_batches(batches)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for part in (*self._lookups.values(), *self._models.values()):
            part.close(sequence_ids)
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)
            self._choice.forget(sequence_id)

    def _commit(self, progress: SequenceProgress) -> _Sequence:
        """Compare the last drafts with the tokens committed since."""
        sequence = self._sequences.setdefault(progress.sequence_id, _Sequence(progress))
        committed = progress.ids[sequence.base :] if sequence.trees else ()
        if committed:
            for method, tree in sequence.trees.items():
                matched = tree.num_matched(committed)
                open_ended = matched == len(committed) and matched < len(tree)
                size = sequence.progress.depth if method in self._models else len(tree)
                self._choice.observe(progress.sequence_id, method, size, matched, open_ended)
        sequence.progress, sequence.method, sequence.base, sequence.trees = progress, "", len(progress.ids), {}
        has_nodes = len(progress.picks) > 1
        sequence.without_picks = replace(progress, picks=progress.picks[:1]) if has_nodes else progress
        return sequence

    def _look_up(self, sequences: Sequence[_Sequence]) -> None:
        """Draft by every lookup, then choose the method of each sequence."""
        ids = [sequence.progress.sequence_id for sequence in sequences]
        for name, lookup in self._lookups.items():
            lookup.observe([sequence.progress_for(name) for sequence in sequences])
            for sequence_id, draft in lookup.collect(ids, self._clock.now()).split().items():
                self._sequences[sequence_id].trees[name] = DraftTree(draft.tokens, draft.parents)
        candidates = [
            DraftCandidate(
                s.progress.sequence_id, s.progress.depth, {name: len(tree) for name, tree in s.trees.items()}
            )
            for s in sequences
        ]
        for sequence, method in zip(sequences, self._choice.choose(candidates), strict=True):
            sequence.method = method

    def _lookup_for(self, sequence: _Sequence) -> str:
        """The chosen lookup, or the best one if a model was chosen and returned no draft."""
        if sequence.method in self._lookups:
            return sequence.method
        sizes = {name: len(tree) for name, tree in sequence.trees.items() if name in self._lookups}
        return self._choice.best_lookup(DraftCandidate(sequence.progress.sequence_id, sequence.progress.depth, sizes))


def _union(requests: Sequence[HiddenRequest]) -> HiddenRequest | None:
    if not requests:
        return None
    layers = sorted({layer for request in requests for layer in request.layers})
    return HiddenRequest(tuple(layers), any(request.last for request in requests))
