"""The token ids that a draft can predict. Fewer ids make its head, most of a small draft's cost, cheaper."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """The target ids of a draft's tokens. `ids` [Vd] int64 ascending has the target id of each draft id. If it is None, the
    draft has the whole vocabulary."""

    size: int
    """Size of the target's vocabulary, V."""
    ids: Tensor | None = None

    def head(self, target_head: Tensor) -> Tensor:
        """[Vd, D]: the rows of the target's head for these ids."""
        return target_head if self.ids is None else target_head[self.ids.to(target_head.device)]

    def contains(self, tokens: Tensor) -> Tensor:
        """Whether the vocabulary has each token, as bool of the shape of `tokens`."""
        if self.ids is None:
            return torch.ones_like(tokens, dtype=torch.bool)
        return self._inside(tokens.device)[tokens]

    def to_draft(self, tokens: Tensor) -> Tensor:
        """The draft ids of `tokens`. 0 for tokens that the vocabulary does not contain."""
        if self.ids is None:
            return tokens
        inside = self._inside(tokens.device)
        return ((inside.cumsum(0) - 1) * inside)[tokens]

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the saved folder: `d2t`, the offset from draft id to target id, and `t2d`, the mask of ids."""
        if self.ids is None:
            return {}
        return {"d2t": self.ids - torch.arange(len(self.ids)), "t2d": self._inside(self.ids.device)}

    @classmethod
    def from_tensors(cls, size: int, tensors: dict[str, Tensor]) -> "DraftVocabulary":
        offsets = tensors.get("d2t")
        return cls(size, None if offsets is None else offsets + torch.arange(len(offsets)))

    def _inside(self, device: torch.device) -> Tensor:
        assert self.ids is not None
        inside = torch.zeros(self.size, dtype=torch.bool, device=device)
        inside[self.ids.to(device)] = True
        return inside


def most_frequent(text: Tensor, size: int, count: int | None) -> DraftVocabulary:
    """The `count` most frequent ids of `text`. Ties go to the lower id."""
    if count is None or count >= size:
        return DraftVocabulary(size)
    frequency = torch.bincount(text.flatten().cpu().long(), minlength=size)
    chosen = torch.sort(frequency, descending=True, stable=True).indices[:count]
    return DraftVocabulary(size, chosen.sort().values)
