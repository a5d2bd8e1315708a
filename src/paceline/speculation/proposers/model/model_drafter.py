"""Drafting with a model: its KV cache, the passes over it, and the choice of drafted tokens.

The proposer `draft_model`, the graph executor and draft workers all draft with a `ModelDrafter`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.core.request import SamplingParams, Verification
from paceline.kernels.cpu.decoder import Sampler
from paceline.kv import BlockTables, blocks_for
from paceline.models.device import StreamTimer
from paceline.models.runner import ModelRunner, Span
from paceline.speculation.distribution import pick
from paceline.speculation.drafts import DraftCost, DraftPrefill
from paceline.speculation.rows import Purpose, RowContext, stream

Q = TypeVar("Q")
"""Type of a draft distribution."""

LONG_GAP = 16
"""Missing tokens above which computing them counts as draft prefill. Fewer are missing after any round without drafts."""


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """Parameters of a sequence that never change."""

    sampling: SamplingParams
    seed: int
    choice: int
    num_prompt: int
    rule: Verification
    salt: str

    @property
    def needs_distribution(self) -> bool:
        """Whether verification needs the distribution `q` of every drafted token."""
        return self.rule == "rejection" and not self.sampling.is_greedy


@dataclass(slots=True, eq=False)
class DraftSequence:
    """A text in the cache of a draft model: committed tokens, then drafted tokens."""

    id: int
    params: SequenceParams
    ids: list[int]
    num_committed: int
    """Number of committed tokens, the first of `ids`. The tokens after them may be rolled back."""
    num_cached: int = field(default=0, init=False)
    """Tokens of `ids` whose KV is in the draft's cache. The drafter sets it."""
    is_shared: bool = field(default=True, init=False)
    """Whether other sequences may use its cache: one set of weights has computed it."""

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is not in the draft's cache."""
        return len(self.ids) - self.num_cached

    def commit(self, ids: Sequence[int]) -> None:
        """Make `ids` the committed tokens; they begin with those committed before. Keeps the cache of equal tokens."""
        matched, end = self.num_committed, min(len(self.ids), len(ids))
        while matched < end and self.ids[matched] == ids[matched]:
            matched += 1
        del self.ids[matched:]
        self.ids.extend(ids[matched:])
        self.num_committed = len(ids)
        # The last token is computed again at least: its logits give the first draft
        self.num_cached = min(self.num_cached, matched, len(ids) - 1)

    def row(self) -> RowContext:
        """Context of the row that predicts the next token."""
        params = self.params
        return RowContext(params.sampling, params.seed, params.choice, len(self.ids), self.ids, params.num_prompt)


class Chunk(NamedTuple):
    """The next `num_tokens` uncomputed tokens of a sequence."""

    sequence: DraftSequence
    num_tokens: int


class ModelDrafter(Generic[Q]):
    """A draft model with its block tables. Sequences belong to the caller, which passes them to every call.

    Under coupled verification tokens are picked with the target's noise; under rejection `sample_q` samples them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        max_rows: int,
        num_proposable: int,
        vocab_size: int,
        sample_q: Callable[[Tensor, Sequence[RowContext]], Iterable[tuple[int, Q]]],
        prefix_caching: bool = True,
    ) -> None:
        """`max_rows` is the most rows of one pass. Token ids below `num_proposable` exist in the target's and in the draft's
        vocabulary. `vocab_size` is the size of the target's vocabulary. `sample_q` samples a token per row of logits, and
        returns it with its distribution."""
        self.runner = runner
        self.max_rows = max_rows
        self.num_proposable = num_proposable
        self.vocab_size = vocab_size
        self.tables = BlockTables(runner.num_blocks, prefix_caching)
        self._sample_q = sample_q

    @property
    def num_free_blocks(self) -> int:
        return self.tables.pool.num_free

    def is_in_window(self, num_tokens: int) -> bool:
        """Whether the draft model has positions for `num_tokens` tokens. Its window may be shorter than the target's."""
        return num_tokens <= self.runner.model.config.max_position

    def is_open(self, sequence: DraftSequence) -> bool:
        return sequence.id in self.tables

    def has_room(self, sequence: DraftSequence | None, num_tokens: int) -> bool:
        """Whether `num_tokens` of the sequence fit into the window and the cache. `sequence` is None if it has no blocks."""
        held = len(self.tables.blocks(sequence.id)) if sequence is not None and self.is_open(sequence) else 0
        return self.is_in_window(num_tokens) and blocks_for(num_tokens) - held <= self.num_free_blocks

    def reserve(self, sequence: DraftSequence, num_tokens: int) -> bool:
        """Reserve blocks for `num_tokens`, starting from the cached prefix; False without enough free blocks."""
        if not self.is_open(sequence):
            committed = sequence.ids[: sequence.num_committed]
            sequence.num_cached = self.tables.open(sequence.id, committed, sequence.params.salt)
        sequence.num_cached = min(sequence.num_cached, len(sequence.ids) - 1)
        return self.tables.grow(sequence.id, num_tokens)

    def prefill(
        self, sequences: Iterable[DraftSequence], depths: Iterable[int], budget: int
    ) -> tuple[list[DraftSequence], DraftCost]:
        """Compute missing tokens until at most two are missing, and reserve blocks for `depths` drafted tokens.

        Computes up to `budget` tokens, `max_rows` per pass. Returns the sequences that can draft, and the cost.
        """
        ready: list[DraftSequence] = []
        behind: list[int] = []
        chunks: list[Chunk] = []  # of the next pass
        rows = num_long = num_hits = 0
        room = self.max_rows
        timer = StreamTimer(self.runner.device)
        for sequence, depth in zip(sequences, depths, strict=True):
            was_open = self.is_open(sequence)
            has_room = self.reserve(sequence, len(sequence.ids) + depth)
            if not was_open:
                num_hits += sequence.num_cached
            if not has_room:
                continue
            gap = sequence.num_missing - 1
            is_long = gap > LONG_GAP
            while gap > 1 and budget > 0:  # the first drafting pass computes two tokens at no extra cost
                count = min(gap, budget, room)
                chunks.append(Chunk(sequence, count))
                gap, budget, room = gap - count, budget - count, room - count
                rows, num_long = rows + count, num_long + count * is_long
                if room == 0:
                    self.forward(chunks)
                    chunks, room = [], self.max_rows
            if gap <= 1:
                ready.append(sequence)
            else:
                behind.append(sequence.id)
        if chunks:
            self.forward(chunks)
        seconds = timer.seconds() * num_long / rows if num_long else 0.0
        return ready, DraftCost(DraftPrefill(num_hits + num_long, seconds), behind=frozenset(behind))

    def forward(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """One pass. Returns logits [R, V] over the target's vocabulary, a row per chunk that ends its sequence."""
        logits = self.runner.forward([self.span(chunk) for chunk in chunks]).logits
        for chunk in chunks:
            self.advance(chunk)
        if logits is None:
            return None
        # Tokens that the draft does not have are impossible
        num_unknown = self.vocab_size - self.num_proposable
        logits = logits[:, : self.num_proposable]
        return pad(logits, (0, num_unknown), value=-torch.inf) if num_unknown else logits

    def pick(self, chunks: Sequence[Chunk]) -> list[int] | None:
        """One pass that picks the next tokens itself, in order of the chunks that end their sequences; it returns no logits.
        None, without a pass: the runner cannot, or a sequence needs its logits."""
        is_whole = self.vocab_size == self.num_proposable == self.runner.model.config.vocab_size
        if not is_whole or not self.runner.can_pick or any(_needs_logits(chunk.sequence) for chunk in chunks):
            return None
        params = [chunk.sequence.params for chunk in chunks]
        samplers = [Sampler(param.sampling, stream(Purpose.SHARED, param.seed, param.choice)) for param in params]
        picks = self.runner.forward([self.span(chunk) for chunk in chunks], samplers=samplers).sampled_tokens
        for chunk in chunks:
            self.advance(chunk)
        return list(picks or ())

    def span(self, chunk: Chunk) -> Span:
        """The tokens of the chunk as part of a pass."""
        sequence, start = chunk.sequence, chunk.sequence.num_cached
        end = start + chunk.num_tokens
        tokens = self._known(sequence.ids[start:end])
        return Span(self.tables.blocks(sequence.id), start, tokens, int(end == len(sequence.ids)))

    def advance(self, chunk: Chunk) -> None:
        """A pass over the chunk was submitted."""
        sequence = chunk.sequence
        sequence.num_cached += chunk.num_tokens
        if sequence.is_shared:
            self.tables.publish(sequence.id, sequence.ids, min(sequence.num_cached, sequence.num_committed))

    def choose(
        self, logits: Tensor, sequences: Sequence[DraftSequence], rows: Sequence[RowContext]
    ) -> list[tuple[int, Q | None]]:
        """The next token of each sequence from logits [R, V], and its distribution where verification needs one."""
        chosen: list[tuple[int, Q | None]] = [(0, None)] * len(rows)
        picked = [i for i, sequence in enumerate(sequences) if not sequence.params.needs_distribution]
        if len(picked) == len(rows):  # a selection of rows would copy their logits
            return [(token, None) for token in pick(logits, rows).tolist()]
        if picked:
            for i, token in zip(picked, pick(logits[picked], [rows[i] for i in picked]).tolist(), strict=True):
                chosen[i] = token, None
        sampled = [i for i, sequence in enumerate(sequences) if sequence.params.needs_distribution]
        if sampled:
            for i, (token, q) in zip(sampled, self._sample_q(logits[sampled], [rows[i] for i in sampled]), strict=True):
                chosen[i] = token, q
        return chosen

    def fork(self, sequence: DraftSequence, child: DraftSequence) -> None:
        """Let `child` share the cache of the tokens that it has in common with its parent."""
        shared = min(sequence.num_cached, len(child.ids) - 1)
        if not self.is_open(sequence) or shared < sequence.num_committed:
            return  # `child` starts from the prefix cache
        slots = self.tables.fork(sequence.id, child.id, shared)
        if slots is not None:
            self.runner.move(*slots)
            child.num_cached = shared

    def truncate(self, sequence: DraftSequence, length: int) -> None:
        """Drop the tokens after `length`, and the blocks that they alone used."""
        del sequence.ids[length:]
        sequence.num_cached = min(sequence.num_cached, length)
        self.release_unused(sequence)

    def release_unused(self, sequence: DraftSequence) -> None:
        """Free the blocks after the cached tokens."""
        if self.is_open(sequence):
            self.tables.shrink(sequence.id, sequence.num_cached)

    def mark_computed(self, sequence: DraftSequence, num_tokens: int) -> None:
        """The first `num_tokens`, all committed, were computed in the sequence's blocks by the graph executor."""
        if self.is_open(sequence):
            sequence.num_cached = num_tokens
            self.release_unused(sequence)
            if sequence.is_shared:
                self.tables.publish(sequence.id, sequence.ids, num_tokens)

    def close(self, sequences: Iterable[DraftSequence]) -> None:
        """Free the blocks of these sequences."""
        for sequence in sequences:
            self.tables.close(sequence.id)
            sequence.num_cached = 0

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """`tokens` with 0 for those outside the draft's vocabulary. They affect the quality of drafts only."""
        return [token if token < self.num_proposable else 0 for token in tokens]


def _needs_logits(sequence: DraftSequence) -> bool:
    """Whether its logits are modified before a token is picked, or its draft needs a distribution."""
    return sequence.params.needs_distribution or sequence.row().is_processed
