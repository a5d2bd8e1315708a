"""The backend of a draft worker: a draft model that drafts for branches of many targets, with prompts computed in chunks.

`load_draft_model` loads a whole model, or a distilled draft with its target's embedding and head.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import IncompatibleDraft, InvalidConfig, UnsupportedModel
from paceline.drafting import branches as distributions
from paceline.drafting.branches import DraftDistribution
from paceline.drafting.state import DraftBranch, DraftedToken
from paceline.engine.start import pick_dtype, pick_quantization
from paceline.kernels.sampling import top
from paceline.models.drafts import DraftFolder, find_draft, load_draft, load_tables
from paceline.models.loading import LoadedModel
from paceline.models.runner import ModelRunner
from paceline.speculation.proposers.model import Chunk, ModelDrafter, SequenceParams
from paceline.speculation.rows import Purpose, RowContext, gumbel_at
from paceline.transfer.weights import WeightManager
from paceline.wire.worker_spec import WorkerSpec

NUM_ALTERNATIVES = 4
NUM_CANDIDATES = 64
"""Most likely tokens among which alternatives are ranked."""


class ModelDraftBackend:
    """A `DraftBackend` with a `ModelDrafter`.

    On a GPU it has its own stream of high priority: in one process with a target, the short passes of the draft must not wait
    for the long passes of the verification.
    """

    def __init__(self, runner: ModelRunner, max_rows: int, num_proposable: int, vocab_size: int) -> None:
        """See `ModelDrafter`."""
        self.drafter: ModelDrafter[DraftDistribution] = ModelDrafter(
            runner, max_rows, num_proposable, vocab_size, distributions.sample
        )
        self._stream: torch.cuda.Stream | None = None
        if runner.device.type == "cuda":
            self._stream = torch.cuda.Stream(runner.device, priority=-1)
            # Weights and cache are written on the current stream
            self._stream.wait_stream(torch.cuda.current_stream(runner.device))

    @property
    def num_free_blocks(self) -> int:
        return self.drafter.num_free_blocks

    def warm_up(self, max_num_seqs: int, window: int) -> None:
        """Compile kernels and capture graphs before the first branch. Has no effect on a CPU."""
        if self._stream is None:
            return
        from paceline.models.runner.gpu import GpuRunner

        runner = self.drafter.runner
        assert isinstance(runner, GpuRunner)
        with self._on_stream():
            runner.warm_up(max_num_seqs, self.drafter.max_rows, window)

    def step(self, branches: Sequence[DraftBranch]) -> list[DraftedToken | None]:
        drafter = self.drafter
        chunks: list[Chunk] = []
        ending: list[int] = []
        budget = drafter.max_rows
        for i, branch in enumerate(branches):
            if budget == 0 or not drafter.is_in_window(len(branch.ids)):
                continue
            if not drafter.reserve(branch, len(branch.ids)):
                continue
            chunks.append(Chunk(branch, min(branch.num_missing, budget)))
            if branch.num_missing <= budget:
                ending.append(i)
            budget -= chunks[-1].num_tokens
        drafted: list[DraftedToken | None] = [None] * len(branches)
        if not chunks:
            return drafted
        with self._on_stream():
            tokens = self._draft(chunks, [branches[i] for i in ending])
        for i, token in zip(ending, tokens, strict=True):
            drafted[i] = token
        return drafted

    def fork(self, branch: DraftBranch, child: DraftBranch) -> None:
        with self._on_stream():
            self.drafter.fork(branch, child)

    def truncate(self, branch: DraftBranch, length: int) -> None:
        self.drafter.truncate(branch, length)

    def close(self, branches: Sequence[DraftBranch]) -> None:
        self.drafter.close(branches)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def _draft(self, chunks: Sequence[Chunk], ending: Sequence[DraftBranch]) -> list[DraftedToken]:
        """Run one pass over the chunks. Returns the tokens after the branches that end in it."""
        if not any(branch.is_ranked for branch in ending) and (picks := self.drafter.pick(chunks)) is not None:
            return [DraftedToken(token) for token in picks]
        logits = self.drafter.forward(chunks)
        return self._choose(logits, ending) if logits is not None and ending else []

    def _choose(self, logits: Tensor, branches: Sequence[DraftBranch]) -> list[DraftedToken]:
        rows = [branch.row() for branch in branches]
        chosen = self.drafter.choose(logits, branches, rows)
        if not any(branch.is_ranked for branch in branches):
            return [DraftedToken(token, distribution=q) for token, q in chosen]
        ranked = rank(logits, rows, [branch.params for branch in branches])
        drafted = []
        for (token, q), (tokens, gap) in zip(chosen, ranked, strict=True):
            if q is not None:
                drafted.append(DraftedToken(token, tuple(tokens), q))
                continue
            alternatives = tuple(other for other in tokens if other != token)
            # Penalties and truncation, which the ranking leaves out, may choose another token
            drafted.append(DraftedToken(token, alternatives, gap=gap if token == tokens[0] else None))
        return drafted


class Ranking(NamedTuple):
    tokens: list[int]
    """Most likely first."""
    gap: float
    """Score of the first token less that of the second. Infinite if there is no second token."""


def rank(logits: Tensor, rows: Sequence[RowContext], params: Sequence[SequenceParams]) -> list[Ranking]:
    """The tokens that the target chooses most likely, for each row of the draft's logits [R, V]: the target's noise applied to
    the draft's logits. Scores are logits plus noise times temperature.

    The ranking decides which outcomes are prepared, never a drafted token. So the noise of the round's last token may be used
    under rejection too.
    """
    if all(row.params.is_greedy for row in rows):  # no noise: the order of the logits
        tokens, scores = top(logits, NUM_ALTERNATIVES + 1)
        return _rankings(tokens, scores)
    candidates, scores = top(logits, NUM_CANDIDATES)
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=logits.device)
    scores = scores.to(torch.float32)
    for purpose in (Purpose.SHARED, Purpose.RECOVER):
        chosen = [
            i
            for i, row in enumerate(rows)
            if not row.params.is_greedy and params[i].needs_distribution == (purpose is Purpose.RECOVER)
        ]
        if chosen:
            noise = gumbel_at([rows[i].key for i in chosen], purpose, candidates[chosen])
            scores[chosen] += noise * temperature[chosen].unsqueeze(1)
    best = scores.topk(min(NUM_ALTERNATIVES + 1, scores.shape[1]), dim=1)
    return _rankings(candidates.gather(1, best.indices), best.values)


def _rankings(tokens: Tensor, scores: Tensor) -> list[Ranking]:
    """From the best tokens of each row and their scores, best first, [R, N] each."""
    ranked: list[list[int]] = tokens.tolist()
    scored: list[list[float]] = scores[:, :2].tolist()
    return [
        Ranking(tokens, first - second[0] if second else math.inf)
        for tokens, (first, *second) in zip(ranked, scored, strict=True)
    ]


def load_draft_model(
    spec: WorkerSpec, device: torch.device, weights: WeightManager
) -> tuple[LoadedModel, LoadedModel | None]:
    """The draft, and the embedding and head that a distilled draft shares with its target. It is None for a whole model.

    A whole model may come from a peer. A distilled draft is small and always comes from disk.
    """
    config = spec.engine
    dtype = pick_dtype(config.dtype, device)
    folder = _draft_folder(config.model)
    if folder is None:
        loaded = weights.load(config.model, device, dtype, pick_quantization(config.quantization))
        weights.wait()
        return loaded, None
    if folder.kind != "distilled":
        raise IncompatibleDraft(
            f"{folder.name} ({folder.kind}) drafts from hidden states of the target: set it as `draft` of the target pool. "
            "A draft pool takes whole models and distilled drafts"
        )
    if config.quantization != "none":
        raise InvalidConfig(
            f"{folder.name} is a distilled draft and cannot be quantised: leave out `quantization` of its pool"
        )
    return _load_distilled(folder, spec.targets, device, dtype)


def _load_distilled(
    folder: DraftFolder, targets: Sequence[str], device: torch.device, dtype: torch.dtype
) -> tuple[LoadedModel, LoadedModel]:
    """The draft with the tables of the first target that it fits. Raises the `IncompatibleDraft` of the last target
    if none fits."""
    reason = IncompatibleDraft(f"{folder.name} needs a target pool")
    for name in targets:
        tables = load_tables(name, device, dtype)
        try:
            draft = load_draft(folder, tables)
        except IncompatibleDraft as error:
            reason = error
        else:
            assert isinstance(draft, LoadedModel)
            return draft, tables
    raise reason


def _draft_folder(name: str) -> DraftFolder | None:
    try:
        return find_draft(name)
    except UnsupportedModel:  # not on this machine; a peer may have it
        return None
