"""One step of drafting for vLLM: rows of its batch go in, a chain of draft tokens for each row comes out.

vLLM calls the plugin after every step, with the tokens just sampled, and verifies the returned drafts in the next step. The
time from a return to the next call is the time of vLLM's step; the depth policy learns from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline.core.clock import Clock
from paceline.engine import ProposerGuard
from paceline.policy.depth.observation import (
    DepthCandidate,
    DepthPolicy,
    DraftingObservation,
    RoundObservation,
    StepObservation,
)
from paceline.speculation import Proposer, SequenceProgress
from paceline.speculation.drafts import Draft
from paceline.vllm.decisions import (
    LatencyLimit,
    LookupTime,
    OutputLengths,
    Pause,
    UnverifiedDrafts,
    sample,
    sample_size,
)
from paceline.vllm.sequences import (
    UNKNOWN,
    Batch,
    Matches,
    RowSampling,
    SequenceTable,
    TrackedSequence,
    first_chain,
    traffic_classes,
)


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
        lookups: LookupTime,
        keep: Callable[[SequenceProgress], None] | None = None,
    ) -> None:
        """`lookups` has the time that lookups take on this host. `keep` takes sequences that have ended without a draft, whose
        texts may become drafts of other sequences."""
        self.num_steps = 0
        self.num_drafted = 0
        """Tokens returned as drafts."""
        self.num_accepted = 0
        self.depth = depth
        """Depth policy. Another policy may be set between two steps."""
        self._method = method
        self._max_depth, self._vocab_size, self._clock = max_depth, vocab_size, clock
        self._lookups = lookups
        self._guard = ProposerGuard({method: proposer})
        self._table = SequenceTable(max_growth=max_depth + 1)
        self._lengths = np.empty(0, dtype=np.int64)
        self._returned_at: float | None = None
        self._drafting: DraftingObservation | None = None
        """Cost of the call that drafted for the step under way. None if the step has no drafts."""
        self._network_seconds = 0.0
        self._drafted: list[TrackedSequence] = []
        """Sequences whose drafts are being verified."""
        self._unread: list[Sequence[Sequence[int]]] = []
        """Tokens of the steps that were left out, one for each row."""
        self._pause = Pause()
        self._limit = LatencyLimit(max_depth)
        self._unverified = UnverifiedDrafts(method, max_depth)
        self._outputs = OutputLengths()
        self._keep = keep

    def propose(self, batch: Batch) -> list[list[int]]:
        """A draft for every row, empty where none pays."""
        started = self._clock.now()
        seconds = 0.0 if self._returned_at is None else started - self._returned_at
        self.num_steps += 1
        try:
            if self._pause.covers(batch.sampled, seconds) and not self._unverified.is_waiting:
                self._lengths += 1
                self._unread.append(batch.sampled)
                return [[] for _ in batch.sampled]
            return self._step(batch, seconds)
        finally:
            self._returned_at = self._clock.now()
            took = self._returned_at - started
            if self._drafting is None:
                self._pause.add_cost(took, seconds)
            else:  # the GPU waits for the whole call, not only for the proposer
                others = self._network_seconds + self._drafting.prefill_seconds
                self._drafting = replace(self._drafting, seconds=max(0.0, took - others))

    def _step(self, batch: Batch, seconds: float) -> list[list[int]]:
        count = len(batch.sampled)
        self._pause.end()
        lengths = batch.lengths[:count].astype(np.int64)
        is_plain = self._drafting is None and len(self._lengths) == count and bool((lengths - self._lengths == 1).all())
        self._lengths = lengths
        rows = [i for i, sampled in enumerate(batch.sampled) if sampled]
        self._table.append(self._unread)  # else those of a sequence that has ended since would be lost
        self._unread = []
        matches = self._table.match(
            [batch.tokens[i, : lengths[i]] for i in rows], [len(batch.sampled[i]) for i in rows], self.num_steps
        )
        self._close(matches.ended)
        compared = self._unverified.compare()
        if is_plain:
            self._limit.observe(count, False, seconds)
            self.depth.observe(self._observation(count, seconds, (), compared))
        else:
            sampled = {sequence.id: len(batch.sampled[i]) for i, sequence in zip(rows, matches.rows, strict=True)}
            self._learn(matches, sampled, count - len(rows), seconds, compared)
        sampling = [batch.sampling[i] for i in rows] if batch.sampling else [UNKNOWN] * len(rows)
        longest, deadline = batch.tokens.shape[1], self._clock.now() + seconds
        may_draft = self._may_draft(matches)
        drafts = self._draft(matches.rows, sampling, longest, deadline) if may_draft else {}
        if self._drafting is None:
            self._compare_later(matches.rows, sampling, longest, deadline)
            if not may_draft:
                self._pause.begin(count)
            return [[] for _ in range(count)]
        self._unverified.discard()
        result: list[list[int]] = [[] for _ in range(count)]
        for i, sequence in zip(rows, matches.rows, strict=True):
            if draft := drafts.get(sequence.id):
                result[i] = list(draft)
        return result

    def _close(self, ended: Sequence[TrackedSequence]) -> None:
        for sequence in ended:
            self._outputs.add(len(sequence.ids) - sequence.num_prompt)
            if self._keep is not None and not sequence.has_drafted:
                prompt = sequence.num_prompt
                self._keep(
                    SequenceProgress(sequence.id, sequence.ids, 0, UNKNOWN.params, UNKNOWN.seed, 0, prompt, "coupled")
                )
            self._guard.close(self._method, sequence.id)

    def _may_draft(self, matches: Matches) -> bool:
        """Whether the policy decides about drafts in this step."""
        records, needed = [sequence.record for sequence in matches.rows], sample_size(len(matches.rows))
        if not records:
            return False
        if matches.opened and sum(record.num_trials > 0 for record in records) < needed:
            self._unverified.start()
            if len(records) > needed:  # a few lookups show what indexing all these prompts would be worth
                return False
        return self._limit.allows(records, needed) and not self.depth.skip_step(len(records))

    def _compare_later(
        self, sequences: Sequence[TrackedSequence], sampling: Sequence[RowSampling], longest: int, deadline: float
    ) -> None:
        """Draft for a few sequences without returning the drafts, if earlier decisions are paid back."""
        if not self._unverified.is_waiting and not self._pause.is_paid:
            return
        chosen = {sequence.id for sequence in sample(sequences)}
        wanted = [
            (sequence, depth, row)
            for sequence, row in zip(sequences, sampling, strict=True)
            if sequence.id in chosen and (depth := self._limit_of(sequence, longest))
        ]
        drafts, _ = self._collect(wanted, deadline)
        chains = {i: first_chain(draft, self._max_depth, self._vocab_size) for i, draft in drafts.items()}
        for sequence, _, _ in wanted:
            sequence.has_drafted = True
        self._unverified.add([sequence for sequence, _, _ in wanted], chains)

    def _learn(
        self,
        matches: Matches,
        sampled: Mapping[int, int],
        num_partial: int,
        seconds: float,
        compared: tuple[RoundObservation, ...],
    ) -> None:
        """Report the outcome of the drafts and the time of the step, which may have computed prompts too."""
        rounds = []
        for sequence in self._drafted:
            if (tokens := sampled.get(sequence.id)) is not None:
                accepted = min(tokens - 1, sequence.drafted)
                self.num_accepted += accepted
                sequence.record.add(sequence.drafted, accepted)
                rounds.append(
                    RoundObservation(sequence.id, sequence.traffic, sequence.drafted, accepted, sequence.requested)
                )
            sequence.drafted = sequence.requested = 0
        prompts = sum(sequence.num_prompt for sequence in matches.opened) + num_partial
        decoding = len(matches.rows) - len(matches.opened)
        if decoding:
            step = self._observation(decoding, seconds, tuple(rounds), compared, prompts)
            self.depth.observe(step)
            if step.drafting and not prompts and not step.drafting[0].prefill_tokens:
                self._limit.observe(decoding, True, step.seconds)
        self._drafted, self._drafting = [], None

    def _observation(
        self,
        batch: int,
        seconds: float,
        rounds: tuple[RoundObservation, ...],
        compared: tuple[RoundObservation, ...],
        prompts: int = 0,
    ) -> StepObservation:
        """`rounds` were verified, `compared` were not."""
        return StepObservation(
            batch=batch,
            rows=batch + sum(round_.drafted for round_ in rounds),
            prefill_rows=prompts,
            drafting=() if self._drafting is None else (self._drafting,),
            verify_seconds=seconds,
            network_seconds=self._network_seconds if self._drafting is not None else 0.0,
            rounds=rounds + compared,
            is_timed=seconds > 0.0,
            context=int(self._lengths.sum()),
        )

    def _draft(
        self, sequences: Sequence[TrackedSequence], sampling: Sequence[RowSampling], longest: int, deadline: float
    ) -> dict[int, tuple[int, ...]]:
        classes = traffic_classes(self._method, [sequence.record for sequence in sequences])
        for sequence, traffic in zip(sequences, classes, strict=True):
            sequence.traffic = traffic
        depths = self.depth.decide([self._candidate(sequence, longest) for sequence in sequences])
        wanted = [
            (sequence, depth, row)
            for sequence, depth, row in zip(sequences, depths, sampling, strict=True)
            if depth > 0
        ]
        if not wanted:
            return {}
        started = self._clock.now()
        drafts, network = self._collect(wanted, deadline)
        took = max(0.0, self._clock.now() - started - network)
        prefill = sum(len(sequence.ids) for sequence, _, _ in wanted if not sequence.has_drafted)
        drafting = took * self._lookups.drafting_share(len(wanted), prefill)
        for sequence, depth, _ in wanted:
            sequence.has_drafted, sequence.requested = True, depth
        chains = {}
        for sequence, depth, _ in wanted:
            draft = drafts.get(sequence.id)
            chain = () if draft is None else first_chain(draft, depth, self._vocab_size)
            sequence.drafted = len(chain)
            self.num_drafted += len(chain)
            chains[sequence.id] = chain
        self._drafted = [sequence for sequence, _, _ in wanted]
        self._drafting = DraftingObservation(
            self._method, max(depth for _, depth, _ in wanted), drafting, prefill, took - drafting
        )
        self._network_seconds = network
        return chains

    def _candidate(self, sequence: TrackedSequence, longest: int) -> DepthCandidate:
        remaining = self._outputs.remaining(len(sequence.ids) - sequence.num_prompt)
        return DepthCandidate(
            sequence.id, sequence.traffic, self._limit_of(sequence, longest), len(sequence.ids), remaining
        )

    def _collect(
        self, wanted: Sequence[tuple[TrackedSequence, int, RowSampling]], deadline: float
    ) -> tuple[dict[int, Draft], float]:
        """Drafts by sequence, and the seconds that the network took."""
        self._guard.observe(
            self._method,
            [
                SequenceProgress(
                    sequence.id, sequence.ids, depth, row.params, row.seed, 0, sequence.num_prompt, "coupled"
                )
                for sequence, depth, row in wanted
            ],
        )
        ids = [sequence.id for sequence, _, _ in wanted]
        drafts, cost = self._guard.collect(self._method, ids, deadline)
        return drafts, cost.network_seconds

    def _limit_of(self, sequence: TrackedSequence, longest: int) -> int:
        """Tokens that may be drafted: the row has room for them and for the token after them."""
        if self._guard.excludes(sequence.id):
            return 0
        return max(0, min(self._max_depth, longest - len(sequence.ids) - 1))
