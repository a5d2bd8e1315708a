"""Computes whether the target and the draft fit the device, and how many tokens of KV cache remain."""

from dataclasses import dataclass

from paceline.core.errors import OutOfMemory
from paceline.core.machine import GIB
from paceline.kernels.layout import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class ModelFootprint:
    """Memory of one model."""

    name: str
    weight_bytes: int
    kv_bytes_per_token: int
    activation_bytes: int
    """The largest pass: its hidden states and its logits."""


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """The target's and the draft's cache hold `kv_tokens` each: a sequence that fits the target's cache fits the draft's."""

    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // BLOCK_SIZE

    @property
    def kv_bytes(self) -> int:
        return self.kv_tokens * self.kv_bytes_per_token

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.weight_bytes - self.activation_bytes - self.kv_bytes


def memory_fit(
    target: ModelFootprint,
    draft: ModelFootprint | None,
    budget_bytes: int,
    wanted_tokens: int,
    required_tokens: int,
) -> MemoryFit:
    """Divide `budget_bytes`. Weights and activations come first, and the caches of target and draft get the rest, up to
    `wanted_tokens`.

    `required_tokens` is the size of one sequence of full length with its drafts. With less, no request could run.
    """
    models = [target] if draft is None else [target, draft]
    weights = sum(model.weight_bytes for model in models)
    activations = sum(model.activation_bytes for model in models)
    per_token = sum(model.kv_bytes_per_token for model in models)
    available = (budget_bytes - weights - activations) // per_token
    tokens = min(wanted_tokens, available) // BLOCK_SIZE * BLOCK_SIZE
    if tokens < required_tokens:
        raise OutOfMemory(
            _advice(models, budget_bytes, weights, activations, per_token, max(tokens, 0), required_tokens)
        )
    return MemoryFit(budget_bytes, weights, activations, per_token, tokens)


def _advice(
    models: list[ModelFootprint],
    budget: int,
    weights: int,
    activations: int,
    per_token: int,
    available: int,
    required: int,
) -> str:
    names = " and ".join(model.name for model in models)
    parts = [
        f"{names} do not fit: weights {weights / GIB:.2f} GiB + activations {activations / GIB:.2f} GiB leave room for "
        f"{available} tokens of cache out of {budget / GIB:.2f} GiB, and one full sequence needs {required} "
        f"({required * per_token / GIB:.2f} GiB)."
    ]
    if available >= 4 * BLOCK_SIZE:
        parts.append(f"Set max_model_len to {available - BLOCK_SIZE} or less,")
    else:
        parts.append("Use a smaller or more strongly quantised model,")
    parts.append(
        "raise memory_fraction or kv_tokens," if len(models) == 1 else "leave out the draft or take a smaller one,"
    )
    parts.append("or take a device with more memory.")
    return " ".join(parts)
