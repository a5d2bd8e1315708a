"""The tokens a draft may propose and the head that scores them: the target's own, or fewer of its rows.

The head is most of what a small draft costs, and a few thousand tokens are nearly all of what is ever written.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.linear import LinearWeight, linear
from paceline.models.architectures.llama import DecoderModel
from paceline.models.loading.checkpoint import Weights
from paceline.models.parallel.shared_tables import head_for, prepare_draft


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """Column i of the draft's logits is the target's token `ids[i]`; `ids=None`: they are the same."""

    vocab_size: int
    """The target's."""
    head: LinearWeight  # [V', D]
    ids: Tensor | None = None  # [V'] int64
    nbytes: int = 0
    """Memory besides the target's own."""

    def logits(self, normed: Tensor) -> Tensor:
        """[R, V'] float32 from normed hidden states [R, D]."""
        return linear(normed, self.head).float()

    def tokens(self, columns: Tensor) -> Tensor:
        """The target's ids of these columns, same shape."""
        return columns if self.ids is None else self.ids[columns]

    def spread(self, logits: Tensor) -> Tensor:
        """[R, V'] -> [R, V]: tokens that the draft does not have are impossible."""
        if self.ids is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        whole[:, self.ids] = logits
        return whole

    @classmethod
    def of(cls, target: DecoderModel, weights: Weights, hidden_size: int) -> "DraftVocabulary":
        """As a draft's checkpoint says: `d2t` [V'] holds the offset of each draft id to the target's; a head it may bring."""
        names, vocab_size = weights.names(), target.config.vocab_size
        ids = None
        if "d2t" in names:
            offsets = weights.vector("d2t").to(torch.int64)
            ids = (torch.arange(len(offsets)) + offsets).to(target.device)
        if "lm_head.weight" in names:
            head = prepare_draft(weights.matrix("lm_head.weight"), target.device, target.dtype)
        else:
            head = head_for(target, hidden_size, ids)
        if ids is None and head.shape[0] != vocab_size:
            ids = torch.arange(head.shape[0], device=target.device)
        return cls(vocab_size, head, ids, 0 if head is target.head else head.nbytes)
