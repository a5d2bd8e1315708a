"""The interface that every method of drafting implements."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from paceline.core.request import SamplingParams, Verification
from paceline.core.sequence import Sequence
from paceline.core.traffic import TrafficClass
from paceline.models.decoder import HiddenStates
from paceline.speculation.drafts import DraftBatch

if TYPE_CHECKING:
    from paceline.models.decoder import DecoderModel
    from paceline.models.heads import MedusaModel
    from paceline.models.heads.block import BlockRunner
    from paceline.models.heads.eagle import EagleRunner
    from paceline.models.runner import ModelRunner
    from paceline.speculation.draft_weights import DraftWeights


@dataclass(frozen=True, slots=True)
class HiddenRequest:
    """Which of the target's hidden states a method drafts from."""

    layers: tuple[int, ...] = ()
    """Layers, counted as in `DecoderModel.forward(state_layers=...)`."""
    last: bool = False
    """Whether it needs the last one, after the final norm."""


@dataclass(frozen=True, slots=True, eq=False)
class HiddenRows:
    """The target's hidden states of n consecutive committed tokens, the first of them at position `start`."""

    start: int
    by_layer: Mapping[int, Tensor]  # layer -> [n, D]
    last: Tensor | None  # [n, D], after the final norm

    @property
    def end(self) -> int:
        if isinstance(self.by_layer, HiddenStates):
            return self.start + self.by_layer.num_rows
        rows = self.last if self.last is not None else next(iter(self.by_layer.values()))
        return self.start + len(rows)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceProgress:
    """The state of one sequence after a commit."""

    sequence_id: int
    ids: Seq[int]
    """All committed tokens, prompt included. A live view: do not copy it or write to it."""
    depth: int
    """Tokens to draft next; 0 requests no draft and must cost nothing."""
    sampling: SamplingParams
    seed: int
    choice: int
    num_prompt: int
    verification: Verification
    cache_salt: str = ""
    """Salt of the prefix cache: sequences with different salts share no blocks, nor in a draft's cache."""
    hidden: HiddenRows | None = None
    """Hidden states of the tokens that this step computed and committed, if `traits.hidden` requests them. Tokens from the
    prefix cache, or computed while speculation was off, have none: positions may skip."""
    picks: Seq[int] = ()
    """The target's picks of the last round: after the last token committed before it, then after each verified node of the
    draft. Empty under rejection sampling: a draft must not depend on the target's randomness."""
    max_levels: int | None = None
    """Length of the longest useful path, one token less than the request may still generate. None if it is not known."""
    allows_drafts: bool = True
    """Whether the request allows speculation."""

    @classmethod
    def of(
        cls, sequence: Sequence, max_levels: int, hidden: HiddenRows | None = None, picks: Seq[int] = ()
    ) -> "SequenceProgress":
        return cls(
            sequence_id=sequence.id,
            ids=sequence.ids,
            depth=sequence.depth,
            sampling=sequence.sampling,
            seed=sequence.seed,
            choice=sequence.choice,
            num_prompt=sequence.num_prompt,
            verification=sequence.verification,
            cache_salt=sequence.cache_salt,
            hidden=hidden,
            picks=picks,
            max_levels=max_levels,
            allows_drafts=sequence.speculation.enabled,
        )


@dataclass(frozen=True, slots=True)
class ProposerTraits:
    """What the engine has to know about a proposer."""

    hidden: HiddenRequest | None = None
    """Hidden states of the target that it drafts from. It then observes prompts too, chunk by chunk, with depth 0."""
    is_tree: bool = False
    """It fills a tree with as many nodes as it is granted. Near the end of a text `SequenceProgress.max_levels` bounds the
    length of its paths, and not the number of its nodes."""
    is_lazy: bool = False
    """It observes only sequences that it is to draft for. It learns nothing from other sequences."""
    can_miss_steps: bool = False
    """Steps in which none of its sequences drafts may run without `observe`, because the next `SequenceProgress` has all that
    it needs. Its sequences then decode in graph steps while they do not draft."""
    traffic_class: Callable[[TrafficClass, int], TrafficClass] | None = None
    """Gives the traffic class of a sequence by the class of its method and category, and its id. It is for a proposer whose
    drafts for some sequences are of another quality, such as a second draft on trial. None if all have the same class."""
    is_available: Callable[[], bool] | None = None
    """Returns whether it can draft for another sequence now. None if it always can."""
    is_remote: bool = False
    """It drafts in other processes, whose time the steps of the engine do not wait for."""
    can_run_in_graph: bool = False
    """The graph executor can draft by this method on a GPU."""
    runners: "tuple[ModelRunner | EagleRunner | BlockRunner, ...]" = ()
    """Runners of the models that it drafts with, for warm-up and measurements."""
    heads: "tuple[MedusaModel, ...]" = ()
    """Models without a cache that it drafts with."""
    weights: "DraftWeights | None" = None
    """The weights of the draft that it was made with, if they can be exchanged."""
    q_model: "DecoderModel | None" = None
    """The model whose distributions its sampled drafts are drawn from. None if its drafts are one-hot, or of several models."""


class Proposer(Protocol):
    """Drafts the next tokens of sequences. It owns its state per sequence; `close` ends it.

    A proposer may return fewer tokens than requested, or none. Its drafts can cost speed and never correctness, provided
    that `DraftBatch.probs` are the distributions its tokens were drawn from.
    """

    @property
    def traits(self) -> ProposerTraits: ...

    def observe(self, batch: Seq[SequenceProgress]) -> None:
        """Take in what was committed and the depth requested next. It may start work and must not wait for it."""
        ...

    def collect(self, sequence_ids: Seq[int], deadline: float) -> DraftBatch:
        """Drafts of those of `sequence_ids` that are ready by `deadline` (seconds on the engine's clock)."""
        ...

    def close(self, sequence_ids: Seq[int]) -> None:
        """Forget these sequences and free what they hold."""
        ...
