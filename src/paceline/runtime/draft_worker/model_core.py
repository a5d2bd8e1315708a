"""A draft model as the core of a draft worker: one pass over branches of many targets, prompts in chunks beside them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.models.runner import ModelRunner, Span
from paceline.runtime.draft_worker import distributions
from paceline.runtime.draft_worker.branch_tables import ForkingTables
from paceline.runtime.draft_worker.core import DraftBranch, DraftedToken, SequenceParams
from paceline.speculation.verification.distribution import pick
from paceline.speculation.verification.noise import Purpose, gumbel_at
from paceline.speculation.verification.rows import RowContext

NUM_RIVALS = 4
CANDIDATES = 64
"""Rivals are looked for among so many of the likeliest tokens: a guess at a guess need not see the whole vocabulary."""


class ModelCore:
    """Draws as `draft_model` does: with the target's own noise under coupled verification, from a law under rejection.

    On a GPU it has a stream of its own, before others in line: a target in the same process verifies meanwhile, and the little
    that a draft computes must not wait for the much that a verification does.
    """

    def __init__(self, runner: ModelRunner, max_rows: int, num_proposable: int, vocab_size: int) -> None:
        """`max_rows` of one pass; token ids below `num_proposable` are known to both models, `vocab_size` is the target's."""
        self._runner = runner
        self._max_rows = max_rows
        self._num_proposable = num_proposable
        self._vocab_size = vocab_size
        self._tables = ForkingTables(runner.num_blocks)
        self._stream: torch.cuda.Stream | None = None
        if runner.device.type == "cuda":
            self._stream = torch.cuda.Stream(runner.device, priority=-1)
            self._stream.wait_stream(torch.cuda.current_stream(runner.device))  # weights and cache are written there

    @property
    def num_free_blocks(self) -> int:
        return self._tables.pool.num_free

    def warm_up(self, max_num_seqs: int, window: int) -> None:
        """On a GPU: compile and record what branches will want, before there are any."""
        if self._stream is None:
            return
        from paceline.models.gpu.runner import GpuRunner

        assert isinstance(self._runner, GpuRunner)
        with self._on_stream():
            self._runner.warm_up(max_num_seqs, self._max_rows, window)

    def step(self, branches: Sequence[DraftBranch]) -> list[DraftedToken | None]:
        spans, stepped, budget = [], [], self._max_rows
        for i, branch in enumerate(branches):
            if budget == 0 or not self._has_room(branch):
                continue
            tokens = branch.ids[branch.num_cached : branch.num_cached + budget]
            budget -= len(tokens)
            is_last = branch.num_cached + len(tokens) == len(branch.ids)
            spans.append(Span(self._tables.blocks(branch.id), branch.num_cached, self._known(tokens), int(is_last)))
            branch.num_cached += len(tokens)
            if is_last:
                stepped.append(i)
        drawn: list[DraftedToken | None] = [None] * len(branches)
        if not spans:
            return drawn
        with self._on_stream():
            logits = self._runner.forward(spans).logits
            for branch in branches:
                if branch.id in self._tables:
                    self._tables.publish(branch.id, branch.ids, min(branch.num_cached, branch.num_committed))
            if logits is not None and stepped:
                for i, token in zip(stepped, self._draw(logits, [branches[i] for i in stepped]), strict=True):
                    drawn[i] = token
        return drawn

    def fork(self, branch: DraftBranch, child: DraftBranch) -> None:
        shared = min(branch.num_cached, len(child.ids) - 1)
        if branch.id not in self._tables or shared < branch.num_committed:
            return  # nothing computed worth sharing: the child starts by itself
        copies = self._tables.fork(branch.id, child.id, shared)
        if copies is not None:
            with self._on_stream():
                self._runner.move(*copies)
            child.num_cached = shared

    def truncate(self, branch: DraftBranch, length: int) -> None:
        del branch.ids[length:]
        branch.num_cached = min(branch.num_cached, length)
        if branch.id in self._tables:
            self._tables.shrink(branch.id, branch.num_cached)

    def close(self, branches: Sequence[DraftBranch]) -> None:
        for branch in branches:
            self._tables.close(branch.id)
            branch.num_cached = 0

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def _has_room(self, branch: DraftBranch) -> bool:
        if len(branch.ids) > self._runner.model.config.max_position:
            return False
        if branch.id not in self._tables:
            branch.num_cached = self._tables.open(branch.id, branch.ids[: branch.num_committed], branch.params.salt)
        # The newest token is computed again at the least: its logits are wanted
        branch.num_cached = min(branch.num_cached, len(branch.ids) - 1)
        return self._tables.grow(branch.id, len(branch.ids))

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """A committed token may lie past the draft's embeddings. Any other stands in for it: a draft is a guess."""
        return [token if token < self._num_proposable else 0 for token in tokens]

    def _draw(self, logits: Tensor, branches: Sequence[DraftBranch]) -> list[DraftedToken]:
        logits = logits[:, : self._num_proposable]
        missing = self._vocab_size - self._num_proposable
        if missing:
            logits = pad(logits, (0, missing), value=-torch.inf)
        rows = [_row(branch.params, branch.ids) for branch in branches]
        rivals = rank(logits, rows, [branch.params for branch in branches])
        drawn: list[DraftedToken | None] = [None] * len(branches)
        by_law = [i for i, branch in enumerate(branches) if branch.params.needs_distribution]
        by_pick = [i for i, branch in enumerate(branches) if not branch.params.needs_distribution]
        if by_law:
            for i, (token, law) in zip(
                by_law, distributions.sample(logits[by_law], [rows[i] for i in by_law]), strict=True
            ):
                drawn[i] = DraftedToken(token, tuple(rivals[i]), law)
        if by_pick:
            picks = pick(logits[by_pick], [rows[i] for i in by_pick]).tolist()
            for i, token in zip(by_pick, picks, strict=True):
                drawn[i] = DraftedToken(token, tuple(rival for rival in rivals[i] if rival != token))
        return [one for one in drawn if one is not None]


def rank(logits: Tensor, rows: Sequence[RowContext], params: Sequence[SequenceParams]) -> list[list[int]]:
    """The tokens a target is likeliest to choose where the draft has logits [R, V]: its own noise on the draft's opinion.

    Only which outcomes are prepared for follows from this, never a drafted token; so under rejection too the noise of
    the token that ends a round may be looked at.
    """
    best = logits.topk(min(CANDIDATES, logits.shape[1]), dim=1)
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=logits.device)
    scores = best.values.to(torch.float32) / temperature.clamp_(min=1e-3).unsqueeze(1)
    for purpose in (Purpose.SHARED, Purpose.RECOVER):
        chosen = [
            i
            for i, row in enumerate(rows)
            if not row.params.is_greedy and params[i].needs_distribution == (purpose is Purpose.RECOVER)
        ]
        if chosen:
            scores[chosen] += gumbel_at([rows[i].key for i in chosen], purpose, best.indices[chosen])
    order = scores.topk(min(NUM_RIVALS + 1, scores.shape[1]), dim=1).indices
    ranked: list[list[int]] = best.indices.gather(1, order).tolist()
    return ranked


def _row(params: SequenceParams, ids: list[int]) -> RowContext:
    return RowContext(params.sampling, params.seed, params.choice, len(ids), ids, params.num_prompt)
