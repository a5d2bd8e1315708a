"""Embedding, head and vocabulary of a draft, mostly taken from its target.

A reduced vocabulary makes a small draft cheaper: its head is most of its cost, and a few thousand tokens cover most text. A
draft made for a small model also fits an inflated target, whose hidden states and tables start with those of the small model.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.cpu import native
from paceline.kernels.formats.linear import LinearWeight
from paceline.kernels.formats.quantized import QuantizedWeight, quantize
from paceline.kernels.formats.weights import GROUPS, Dense, Grouped, Weight, concat
from paceline.kernels.linear import embedding_rows, linear, prepare
from paceline.models.decoder import DecoderModel, Layer
from paceline.models.families.spec import DecoderSpec
from paceline.models.weights import Weights

Bits = Literal[4, 8]
"""Bits of a weight value of a draft on a CPU."""
HEAD_BITS: Bits = 4
"""Bits of an EAGLE head and of a block drafter on a CPU, where a pass takes about as long as reading them."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """Tokens that a draft may propose. Column i of its logits is the target's token `ids[i]`, or token i if `ids` is None."""

    vocab_size: int
    """Vocabulary size of the target."""
    head: LinearWeight  # [V', D]
    ids: Tensor | None = None  # [V'] int64
    nbytes: int = 0
    """Bytes that are not shared with the target."""

    def logits(self, normed: Tensor) -> Tensor:
        """[R, V'] float32 from normed hidden states [R, D]."""
        return linear(normed, self.head).float()

    def tokens(self, columns: Tensor) -> Tensor:
        """Token ids of these columns, in the same shape."""
        return columns if self.ids is None else self.ids[columns]

    def expand_logits(self, logits: Tensor) -> Tensor:
        """[R, V'] -> [R, V]; -inf for tokens outside the draft's vocabulary."""
        if self.ids is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        whole[:, self.ids] = logits
        return whole

    @classmethod
    def of(
        cls, target: DecoderModel, weights: Weights, hidden_size: int, bits: Bits = 8, output: str = "lm_head.weight"
    ) -> "DraftVocabulary":
        """Vocabulary of a draft's checkpoint, which may have its own head under the name `output`. `prepare_draft` describes
        `bits`."""
        ids = draft_ids(weights, target.config.vocab_size)
        ids = None if ids is None else ids.to(target.device)
        if output in weights.names():
            head = prepare_draft(weights.matrix(output), target.device, target.dtype, bits)
        else:
            head = head_for(target, hidden_size, ids, bits)
        if ids is None and head.shape[0] != target.config.vocab_size:
            ids = torch.arange(head.shape[0], device=target.device)
        return cls(target.config.vocab_size, head, ids, 0 if head is target.head else head.nbytes)


def proposable_ids(target: DecoderSpec, draft: DecoderSpec) -> range:
    """Token ids that a draft may propose: those in the embeddings of target and draft.

    Rows beyond the tokenizer's ids are padding, which a target never samples.
    """
    return range(min(target.vocab_size, draft.vocab_size))


def draft_ids(weights: Weights, vocab_size: int) -> Tensor | None:
    """The target's ids [V'] of the tokens that a draft may propose; None if these are all. `d2t` has the offset of each draft
    id to the target's id, `token_map` has the target's ids. Raises `UnsupportedModel` unless the ids are different tokens."""
    name = next((name for name in ("d2t", "token_map") if name in weights.names()), None)
    if name is None:
        return None
    values = weights.vector(name)
    if values.dim() != 1 or not bool(torch.isfinite(values).all()):
        raise UnsupportedModel(f"{name} of the draft is not a vector of {'offsets' if name == 'd2t' else 'ids'}")
    ids = values.to(torch.int64) + (torch.arange(len(values)) if name == "d2t" else 0)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise UnsupportedModel(
            f"{name} of the draft leads to ids outside the target's vocabulary of {vocab_size} tokens"
        )
    if len(ids.unique()) < len(ids):
        raise UnsupportedModel(f"{name} of the draft leads to the same id twice: it must be a map of different tokens")
    return ids


def inner_width(target: DecoderModel, hidden_size: int) -> int:
    """`hidden_size` if the target is inflated from a model of that width, otherwise the target's hidden size.

    In an inflated target the other columns of the embedding are zero.
    """
    width = target.config.hidden_size
    if not 0 < hidden_size < width:
        return width
    if target.device.type == "meta":  # it has no values to look at
        return hidden_size
    rest = _rows(target.embedding, torch.arange(target.config.vocab_size, device=target.device))[:, hidden_size:]
    return width if bool(rest.any()) else hidden_size


def embedding_for(target: DecoderModel, hidden_size: int) -> LinearWeight:
    """[V, hidden_size]: the target's embedding, or its first columns."""
    if hidden_size == target.config.hidden_size:
        return target.embedding
    rows = _rows(target.embedding, torch.arange(target.config.vocab_size, device=target.device))[:, :hidden_size]
    return prepare(Dense(rows.to(torch.bfloat16).contiguous()), target.device, target.dtype)


def head_for(target: DecoderModel, hidden_size: int, ids: Tensor | None, bits: Bits = 8) -> LinearWeight:
    """[V, hidden_size]: the target's head; with `ids`, only these rows."""
    if hidden_size == target.config.hidden_size:
        if ids is None:
            return target.head
        if isinstance(target.head, QuantizedWeight):
            return QuantizedWeight(target.head.values[ids], target.head.scales[ids])
    rows = torch.arange(target.config.vocab_size, device=target.device) if ids is None else ids
    return _copy(target.head, rows, hidden_size, target, bits)


def _copy(weight: LinearWeight, ids: Tensor, hidden_size: int, target: DecoderModel, bits: Bits) -> LinearWeight:
    return prepare_draft(Dense(_rows(weight, ids)[:, :hidden_size].contiguous()), target.device, target.dtype, bits)


def prepare_draft(weight: Weight, device: torch.device, dtype: torch.dtype, bits: Bits = 8) -> LinearWeight:
    """As `prepare`, but in 8 or 4 bits for the native kernels, whose time is proportional to the bytes read. A draft may be
    less precise."""
    is_native = device.type == "cpu" and dtype == torch.float32 and native.available()
    if is_native and isinstance(weight, Dense) and weight.shape[1] % GROUPS[-1] == 0:
        values = weight.values.float()
        return prepare(four_bits(values) if bits == 4 else quantize(values, "int8"), device, dtype)
    return prepare(weight, device, dtype)


class HeadLoader:
    """Loads the weights of a head to its target's device, in its target's dtype."""

    def __init__(self, weights: Weights, target: DecoderModel) -> None:
        self._weights, self._target = weights, target
        self.device, self.dtype = target.device, target.dtype

    def vocabulary(self, width: int) -> DraftVocabulary:
        return DraftVocabulary.of(self._target, self._weights, width, HEAD_BITS)

    def embedding(self, width: int) -> LinearWeight:
        """The head's own embedding, or the target's."""
        has_own = "embed_tokens.weight" in self._weights.names()
        return self.matrix("embed_tokens.weight") if has_own else embedding_for(self._target, width)

    def matrix(self, *names: str) -> LinearWeight:
        """The matrices `names` joined by rows."""
        parts = [self._weights.matrix(name) for name in names]
        return prepare_draft(concat(parts), self.device, self.dtype, HEAD_BITS)

    def vector(self, *names: str) -> Tensor:
        return torch.cat([self._weights.vector(name) for name in names]).to(self.device, self.dtype)

    def layer(self, decoder: DecoderSpec, number: int, has_input_norm: bool = True) -> Layer:
        """A layer, without its input norm if another part of the head has it, or the head has none."""
        found: dict[str, LinearWeight | Tensor] = {}
        for piece in decoder.pieces(number):
            names = [f"layers.{number}.{tensor.name}" for tensor in piece.tensors]
            if piece.is_matrix:
                found[piece.attribute] = self.matrix(*names)
            elif has_input_norm or piece.attribute != "input_norm":
                found[piece.attribute] = self.vector(*names)
        return Layer(decoder, number, found)


def four_bits(values: Tensor) -> Grouped:
    """values [N, K] in 16 steps from the least to the largest of each 32 inputs; K is a multiple of 32."""
    groups = values.unflatten(1, (-1, GROUPS[-1]))  # [N, K/32, 32]
    least, most = groups.aminmax(dim=2)
    offsets = least.half().float()
    scales = ((most - offsets) / 15.0).half().float()
    steps = torch.where(scales > 0, scales, 1.0)
    codes = ((groups - offsets.unsqueeze(2)) / steps.unsqueeze(2)).round_().clamp_(0, 15).to(torch.uint8)
    return Grouped(codes.flatten(1), scales, offsets, GROUPS[-1])


def _rows(weight: LinearWeight, ids: Tensor) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        return QuantizedWeight(weight.values[ids], weight.scales[ids]).dequantize()
    return embedding_rows(weight, ids)
