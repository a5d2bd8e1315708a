"""The sampling parameters of the slots of a batch, in device memory that the batches of all sizes share.

`SlotParams` writes the parameters of a sequence that enters a slot. `Sampling` says which kernels serve all slots: what no slot
uses costs nothing.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.core.sequence import Sequence
from paceline.kernels.gpu.speculation.edits import IN_PROMPT, MAX_BIASED, MAX_BLOCKED, EditTensors
from paceline.models.device import StreamEvent, staging_tensor
from paceline.speculation.rows import Purpose, stream

PickKind = Literal["greedy", "sampled", "truncated"]
"""The simplest pick kernel that serves every slot."""


class Sampling(NamedTuple):
    """The kernels that serve every slot."""

    kind: PickKind
    is_edited: bool = False
    """Whether logits are modified: a slot has penalties, biases or blocked tokens."""
    is_scored: bool = False
    """Whether a slot wants log-probabilities."""

    @property
    def has_features(self) -> bool:
        """Whether it is not one of the three kinds alone."""
        return self.is_edited or self.is_scored


WARM_UP_SAMPLING = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9))
"""One set of parameters for each `PickKind`."""


def _edited(params: SamplingParams) -> SamplingParams:
    return replace(params, repetition_penalty=1.1, logit_bias={0: 1.0}, min_tokens=1, blocked_ids=(0,))


def _scored(params: SamplingParams) -> SamplingParams:
    return replace(params, logprobs=1)


WARM_UP_FEATURES = (*map(_edited, WARM_UP_SAMPLING), *map(_scored, WARM_UP_SAMPLING))
"""One set of parameters for each `Sampling` with one feature. Steps with both have no graph of what follows the pass."""
WARM_UP_ALL = _edited(_scored(WARM_UP_SAMPLING[0]))
"""Parameters that use every kernel of the features."""


class Slot(NamedTuple):
    """One sequence, as the batch loads it."""

    ids: Seq[int]
    sampling: SamplingParams
    seed: int
    choice: int
    num_prompt: int = 0
    """Tokens of `ids` that are the prompt."""
    noise: Purpose = Purpose.SHARED
    """The noise that its tokens are picked with."""

    @staticmethod
    def of(sequence: Sequence) -> "Slot":
        # Without drafts, rejection picks every token with the noise of recovered tokens
        noise = Purpose.SHARED if sequence.verification == "coupled" else Purpose.RECOVER
        return Slot(sequence.ids, sequence.sampling, sequence.seed, sequence.choice, sequence.num_prompt, noise)


def fits_slot(params: SamplingParams, vocab_size: int) -> bool:
    """Whether the lists of tokens are short enough for the kernels, and not all tokens of the vocabulary are blocked."""
    num_blocked = len(params.blocked_ids) if params.min_tokens else 0
    are_short = len(params.logit_bias) <= MAX_BIASED and num_blocked <= MAX_BLOCKED
    return are_short and num_blocked < vocab_size and (params.logprobs or 0) <= vocab_size


@dataclass(frozen=True, slots=True, eq=False)
class SamplingTensors:
    """Sampling parameters by slot."""

    streams: Tensor  # [B] int64
    top_k: Tensor  # [B] int64
    top_p: Tensor  # [B] float64
    temperature: Tensor  # [B] float32, 0: greedy
    min_p: Tensor  # [B] float32

    def map(self, change: Callable[[Tensor], Tensor]) -> "SamplingTensors":
        return SamplingTensors(*(change(getattr(self, field.name)) for field in fields(self)))


class Columns(NamedTuple):
    """All parameters by slot, in adjacent memory, so that one copy transfers them."""

    streams: Tensor  # as in `SamplingTensors`
    top_k: Tensor
    top_p: Tensor
    temperature: Tensor
    min_p: Tensor
    repetition: Tensor  # as in `EditTensors`
    presence: Tensor
    frequency: Tensor
    first_end: Tensor
    num_biased: Tensor
    num_blocked: Tensor
    num_top: Tensor  # [B] int32, alternatives reported with each token; -1: no log-probabilities

    @staticmethod
    def in_memory(memory: Tensor) -> "Columns":
        """Views of `memory` [SLOT_BYTES * B] uint8."""
        size = len(memory) // SLOT_BYTES
        longs, shares, floats, ints = memory.split([16 * size, 8 * size, 20 * size, 16 * size])
        eights, fours = longs.view(torch.int64).view(2, size), ints.view(torch.int32).view(4, size)
        return Columns._make([*eights, shares.view(torch.float64), *floats.view(torch.float32).view(5, size), *fours])


SLOT_BYTES = 60
_EMPTY = (0, 0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0, 0, 0, -1)
"""`Columns` of an empty slot, which counts as greedy."""


class SlotParams:
    """The sampling parameters of all slots. The host changes them in its own memory, and `upload` copies them to the device.
    Lists, and the tokens that penalties count, are copied when a sequence enters its slot."""

    def __init__(self, size: int, device: torch.device, vocab_size: int = 0) -> None:
        self._memory = torch.zeros(SLOT_BYTES * size, dtype=torch.uint8, device=device)
        columns = Columns.in_memory(self._memory)
        self.on_device = SamplingTensors(*columns[:5])
        self.edits = EditTensors(
            *columns[5:11],
            torch.zeros(size, MAX_BIASED, dtype=torch.int32, device=device),
            torch.zeros(size, MAX_BIASED, device=device),
            torch.zeros(size, MAX_BLOCKED, dtype=torch.int32, device=device),
            torch.zeros(size, vocab_size, dtype=torch.int32, device=device),
        )
        self.num_top = columns.num_top
        self._written = torch.zeros(SLOT_BYTES * size, dtype=torch.uint8)
        self._columns = [column.numpy() for column in Columns.in_memory(self._written)]
        self._staging = [
            (staging_tensor(SLOT_BYTES * size, dtype=torch.uint8, device=device), StreamEvent(device)) for _ in range(2)
        ]
        self._turn = 0
        self._is_stale = True
        self.sampling = Sampling("greedy")
        for slot in range(size):
            self.clear(slot)
        self.upload()

    def clear(self, slot: int) -> None:
        self._write(slot, *_EMPTY)

    def set(self, slot: int, content: Slot) -> None:
        params, number = content.sampling, stream(content.noise, content.seed, content.choice)
        temperature = 0.0 if params.is_greedy else params.temperature
        signed = number - (1 << 64) if number >> 63 else number
        is_short = len(content.ids) - content.num_prompt < params.min_tokens
        blocked = params.blocked_ids if is_short else ()
        self._write(
            *(slot, signed, params.top_k, params.top_p, temperature, params.min_p),
            *(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
            *(content.num_prompt + params.min_tokens, len(params.logit_bias), len(blocked)),
            -1 if params.logprobs is None else params.logprobs,
        )
        if params.logit_bias:
            self._copy(self.edits.biased[slot], list(params.logit_bias))
            self._copy(self.edits.biases[slot], list(params.logit_bias.values()))
        if blocked:
            self._copy(self.edits.blocked[slot], blocked)
        if params.has_penalties:
            self._count(self.edits.seen[slot], content)

    def _write(self, slot: int, *values: float) -> None:
        """`values` in the order of `Columns`."""
        for column, value in zip(self._columns, values, strict=True):
            column[slot] = value
        self._is_stale = True

    def _copy(self, row: Tensor, values: Seq[float]) -> None:
        row[: len(values)].copy_(self._staged(values, row.dtype), non_blocking=True)

    def _count(self, seen: Tensor, content: Slot) -> None:
        """The tokens of a text, as penalties read them. The host does not wait."""
        prompt, output = content.ids[: content.num_prompt], content.ids[content.num_prompt :]
        seen.zero_()
        if prompt:
            seen.index_fill_(0, self._on_device(prompt), IN_PROMPT)
        if output:
            tokens = self._on_device(output)
            seen.scatter_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))

    def _on_device(self, tokens: Seq[int]) -> Tensor:
        return self._staged(tokens, torch.int64).to(self._memory.device, non_blocking=True)

    def _staged(self, values: Seq[float], dtype: torch.dtype) -> Tensor:
        """Pinned memory, which torch keeps until it is copied."""
        tensor = torch.tensor(values, dtype=dtype)
        return tensor.pin_memory() if self._memory.is_cuda else tensor

    def upload(self) -> None:
        """Make changes effective for the steps submitted from now on."""
        if not self._is_stale:
            return
        self._turn = 1 - self._turn
        staging, copied = self._staging[self._turn]
        copied.wait()
        staging.copy_(self._written)
        self._memory.copy_(staging, non_blocking=True)
        copied.record()
        self._is_stale = False
        _, top_k, top_p, temperature, min_p, repetition, presence, frequency, _, num_biased, num_blocked, num_top = (
            self._columns
        )
        is_sampled = temperature > 0.0
        is_cut = is_sampled & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
        is_edited = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0) | (num_biased > 0) | (num_blocked > 0)
        kind: PickKind = "truncated" if is_cut.any() else "sampled" if is_sampled.any() else "greedy"
        self.sampling = Sampling(kind, bool(is_edited.any()), bool((num_top >= 0).any()))
