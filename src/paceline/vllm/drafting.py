"""One step of drafting for vLLM: rows of its batch go in, a chain of draft tokens for each row comes out.

vLLM calls the plugin after every step, with the tokens just sampled, and verifies the returned drafts in the next step. The
time from a return to the next call is the time of vLLM's step; the depth policy learns from it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.core.clock import Clock
from paceline.engine.isolation.proposer_guard import ProposerGuard
from paceline.speculation.depth.policy import (
    Candidate,
    DepthPolicy,
    DraftingObservation,
    RoundObservation,
    StepObservation,
)
from paceline.speculation.drafts import Draft
from paceline.speculation.proposer import Progress, Proposer
from paceline.vllm.batch import UNKNOWN, Batch, RowSampling
from paceline.vllm.padding import Padding
from paceline.vllm.pause import Pause
from paceline.vllm.sequences import Matches, SequenceTable, TrackedSequence

PREFILL_RATIO = 16
"""Tokens that a lookup indexes in about the time of one draft. The first draft of a sequence indexes all of its tokens."""


class DraftLoop:
    """Observes vLLM's steps, decides depths and drafts. It belongs to one thread."""

    def __init__(
        self,
        method: str,
        proposer: Proposer,
        depth: DepthPolicy,
        max_depth: int,
        vocab_size: int,
        clock: Clock,
    ) -> None:
        self.num_steps = 0
        self.num_drafted = 0
        """Tokens returned as drafts, without padding."""
        self.num_accepted = 0
        self.num_padded = 0
        """Steps whose drafts were padded."""
        self.depth = depth
        """Depth policy; another one may be set between two steps."""
        self._method = method
        self._max_depth, self._vocab_size, self._clock = max_depth, vocab_size, clock
        self._guard = ProposerGuard({method: proposer})
        self._table = SequenceTable(max_growth=max_depth + 1)
        self._lengths = np.empty(0, dtype=np.int64)
        self._returned_at: float | None = None
        self._drafting: DraftingObservation | None = None
        """What drafting for the step under way cost; None: it has no drafts."""
        self._network_seconds = 0.0
        self._drafted: list[TrackedSequence] = []
        """Sequences whose drafts are being verified."""
        self._padding = Padding()
        self._is_padded: bool | None = None
        """Whether the drafts of the step under way are padded; None: there was no choice."""
        self._pause = Pause()

    def propose(self, batch: Batch) -> list[list[int]]:
        """A draft for every row, empty where none pays."""
        started = self._clock.now()
        seconds = 0.0 if self._returned_at is None else started - self._returned_at
        self.num_steps += 1
        try:
            if self._pause.covers(batch.sampled, seconds):
                self._lengths += 1
                drafts: list[list[int]] = [[] for _ in batch.sampled]
                return self._fill(batch, drafts) if self._is_padded else drafts
            self._observe_padding(batch, seconds)
            return self._padded(batch, self._step(batch, seconds))
        finally:
            self._returned_at = self._clock.now()
            if self._drafting is None:
                self._pause.add_cost(self._returned_at - started, seconds)

    def _observe_padding(self, batch: Batch, seconds: float) -> None:
        """Learn from a step in which the rows of the step before it decoded, and nothing else."""
        if self._is_padded is None or len(batch.sampled) != len(self._lengths):
            return
        grown = batch.lengths[: len(batch.sampled)] - self._lengths
        if ((grown >= 1) & (grown <= self._max_depth + 1)).all():
            self._padding.observe(len(grown), self._is_padded, seconds)

    def _padded(self, batch: Batch, drafts: list[list[int]]) -> list[list[int]]:
        """The drafts, filled up to the same length where such steps are faster."""
        self._is_padded, count = None, len(drafts)
        longest = batch.tokens.shape[1] - self._max_depth - 1
        if not count or not all(batch.sampled) or int(batch.lengths[:count].max()) > longest:
            return drafts
        if all(len(draft) == self._max_depth for draft in drafts):
            return drafts
        self._is_padded = self._padding.decide(count)
        return self._fill(batch, drafts) if self._is_padded else drafts

    def _fill(self, batch: Batch, drafts: list[list[int]]) -> list[list[int]]:
        """A row that repeats its last token accepts what is right and no more, as with any draft."""
        self.num_padded += 1
        return [
            draft + [tokens[-1]] * (self._max_depth - len(draft))
            for draft, tokens in zip(drafts, batch.sampled, strict=True)
        ]

    def _step(self, batch: Batch, seconds: float) -> list[list[int]]:
        count = len(batch.sampled)
        self._pause.end()
        lengths = batch.lengths[:count].astype(np.int64)
        is_plain = self._drafting is None and len(self._lengths) == count and bool((lengths - self._lengths == 1).all())
        self._lengths = lengths
        if is_plain:
            self.depth.observe(self._observation(count, seconds, ()))
            if self.depth.skip_step(count):
                self._pause.begin(count)
                return [[] for _ in range(count)]
        rows = [i for i, sampled in enumerate(batch.sampled) if sampled]
        matches = self._table.match(
            [batch.tokens[i, : lengths[i]] for i in rows], [len(batch.sampled[i]) for i in rows], self.num_steps
        )
        for ended in matches.ended:
            self._guard.close(self._method, ended.id)
        if not is_plain:
            sampled = {one.id: len(batch.sampled[i]) for i, one in zip(rows, matches.rows, strict=True)}
            self._learn(matches, sampled, count - len(rows), seconds)
            if self.depth.skip_step(len(rows)):
                return [[] for _ in range(count)]
        sampling = [batch.sampling[i] for i in rows] if batch.sampling else [UNKNOWN] * len(rows)
        drafts = self._draft(matches.rows, sampling, batch.tokens.shape[1], deadline=self._clock.now() + seconds)
        result: list[list[int]] = [[] for _ in range(count)]
        for i, sequence in zip(rows, matches.rows, strict=True):
            if draft := drafts.get(sequence.id):
                result[i] = list(draft)
        return result

    def _learn(self, matches: Matches, sampled: Mapping[int, int], num_partial: int, seconds: float) -> None:
        """Report the outcome of the drafts and the time of the step, which may have computed prompts too."""
        rounds = []
        for sequence in self._drafted:
            if (tokens := sampled.get(sequence.id)) is not None:
                accepted = min(tokens - 1, sequence.drafted)
                self.num_accepted += accepted
                rounds.append(
                    RoundObservation(sequence.id, self._method, sequence.drafted, accepted, sequence.requested)
                )
            sequence.drafted = sequence.requested = 0
        prompts = sum(one.num_prompt for one in matches.opened) + num_partial
        decoding = len(matches.rows) - len(matches.opened)
        if decoding:
            self.depth.observe(self._observation(decoding, seconds, tuple(rounds), prompts))
        self._drafted, self._drafting = [], None

    def _observation(
        self, batch: int, seconds: float, rounds: tuple[RoundObservation, ...], prompts: int = 0
    ) -> StepObservation:
        return StepObservation(
            batch=batch,
            rows=batch + sum(one.drafted for one in rounds),
            prefill_rows=prompts,
            drafting=() if self._drafting is None else (self._drafting,),
            verify_seconds=seconds,
            network_seconds=self._network_seconds if self._drafting is not None else 0.0,
            rounds=rounds,
            is_timed=seconds > 0.0,
            context=int(self._lengths.sum()),
        )

    def _draft(
        self, sequences: Sequence[TrackedSequence], sampling: Sequence[RowSampling], longest: int, deadline: float
    ) -> dict[int, tuple[int, ...]]:
        depths = self.depth.decide(
            [Candidate(one.id, self._method, self._limit(one, longest), len(one.ids)) for one in sequences]
        )
        wanted = [(one, depth, row) for one, depth, row in zip(sequences, depths, sampling, strict=True) if depth > 0]
        if not wanted:
            return {}
        started = self._clock.now()
        drafts, network = self._collect(wanted, deadline)
        took = max(0.0, self._clock.now() - started - network)
        prefill = sum(len(one.ids) for one, _, _ in wanted if not one.has_drafted)
        drafting = took * len(wanted) / (len(wanted) + prefill / PREFILL_RATIO)
        for one, depth, _ in wanted:
            one.has_drafted, one.requested = True, depth
        chains = {}
        for one, depth, _ in wanted:
            draft = drafts.get(one.id)
            chain = () if draft is None else _chain(draft, depth, self._vocab_size)
            one.drafted = len(chain)
            self.num_drafted += len(chain)
            chains[one.id] = chain
        self._drafted = [one for one, _, _ in wanted]
        self._drafting = DraftingObservation(
            self._method, max(depth for _, depth, _ in wanted), drafting, prefill, took - drafting
        )
        self._network_seconds = network
        return chains

    def _collect(
        self, wanted: Sequence[tuple[TrackedSequence, int, RowSampling]], deadline: float
    ) -> tuple[dict[int, Draft], float]:
        """Drafts by sequence, and the seconds that the network took."""
        self._guard.observe(
            self._method,
            [
                Progress(one.id, one.ids, depth, row.params, row.seed, 0, one.num_prompt, "coupled")
                for one, depth, row in wanted
            ],
        )
        ids = [one.id for one, _, _ in wanted]
        drafts, cost = self._guard.collect(self._method, ids, deadline)
        return drafts, cost.network_seconds

    def _limit(self, sequence: TrackedSequence, longest: int) -> int:
        """Tokens that may be drafted: the row has room for them and for the token after them."""
        if self._guard.excludes(sequence.id):
            return 0
        return max(0, min(self._max_depth, longest - len(sequence.ids) - 1))


def _chain(draft: Draft, depth: int, vocab_size: int) -> tuple[int, ...]:
    """The first child of every node, down to `depth`; it ends before a token that the target does not have."""
    chain: list[int] = []
    node = -1
    for child, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if len(chain) == depth or not 0 <= token < vocab_size:
            break
        if parent == node:
            chain.append(token)
            node = child
    return tuple(chain)
