"""One row of logits and all parameters of its distribution."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.speculation.drafts import Draft, depths
from paceline.speculation.verification.noise import NoiseKey


class Facts(Protocol):
    """The attributes of a sequence that a row needs; `Sequence` and `Progress` have them."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def choice(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class RowContext:
    """The row predicts the token at absolute `position`, after `ids` and then `path`."""

    params: SamplingParams
    seed: int
    choice: int
    position: int
    ids: Sequence[int]
    """Committed tokens, a live view."""
    num_prompt: int
    path: tuple[int, ...] = ()
    """Drafted tokens between the last committed token and this row."""
    mask: Tensor | None = None
    """[ceil(V / 32)] int32, bit t of word t // 32: a grammar allows token t."""

    @property
    def key(self) -> NoiseKey:
        return NoiseKey(self.seed, self.choice, self.position)

    @property
    def is_processed(self) -> bool:
        """Whether its logits are modified before temperature and truncation."""
        params = self.params
        return params.has_penalties or bool(params.logit_bias) or self.mask is not None or self.is_ending_blocked

    @property
    def is_ending_blocked(self) -> bool:
        """Whether the end tokens are excluded, because the output is shorter than `min_tokens`."""
        return self.position - self.num_prompt < self.params.min_tokens and bool(self.params.blocked_ids)

    @property
    def is_truncated(self) -> bool:
        return self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0


def row_contexts(facts: Facts, draft: Draft, masks: Sequence[Tensor] | None = None) -> tuple[RowContext, ...]:
    """The 1 + len(draft) rows of a sequence: after its last committed token, then after each node of its draft."""
    end = len(facts.ids)
    if not draft.tokens:  # most rows of a large batch
        mask = None if masks is None else masks[0]
        return (RowContext(facts.sampling, facts.seed, facts.choice, end, facts.ids, facts.num_prompt, (), mask),)
    paths: list[tuple[int, ...]] = [()]  # path of each row: of the root, then of each node
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    levels = (0, *depths(draft.parents))
    return tuple(
        RowContext(
            facts.sampling,
            facts.seed,
            facts.choice,
            end + level,
            facts.ids,
            facts.num_prompt,
            path,
            None if masks is None else masks[row],
        )
        for row, (level, path) in enumerate(zip(levels, paths, strict=True))
    )
