"""Which models run beside the target, what they keep in memory, and what a pass has to read of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.cluster.cost.cost import Footprint

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.models.runner import Span

BLOCK_AXES = 2
"""A cache tensor is [blocks, slots, …]."""


@dataclass(frozen=True, slots=True)
class DraftParts:
    """What a proposer drafts with; the target itself is never among them."""

    runners: tuple[Any, ...]
    """A model with its cache: `forward(spans, …)`."""
    heads: tuple[Any, ...]
    """Models without one: `logits(hidden)`."""


def draft_parts(engine: "Engine", methods: Iterable[str] | None = None) -> DraftParts:
    """Of these methods, or of all; each part once."""
    proposers = engine.speculator.proposers
    traits = [proposers[method].traits for method in methods or proposers]
    runners = dict.fromkeys(runner for one in traits for runner in one.runners)
    heads = dict.fromkeys(head for one in traits for head in one.heads)
    return DraftParts(tuple(runners), tuple(heads))


def footprint(engine: "Engine", method: str) -> Footprint:
    """Memory that the method takes besides the target's own."""
    parts = draft_parts(engine, [method])
    shared = {id(layer) for layer in engine.runner.model.layers}
    # An early exit of the target has the target's layers and its cache.
    own = [runner for runner in parts.runners if not any(id(layer) in shared for layer in _layers(runner.model))]
    return Footprint(
        weight_bytes=sum(model.weight_bytes for model in (*(runner.model for runner in own), *parts.heads)),
        kv_bytes_per_token=sum(map(kv_bytes_per_token, own)),
    )


def kv_bytes_per_token(runner: Any) -> int:
    """Over all layers, as the cache stores it."""
    return sum(
        tensor.nbytes // (tensor.shape[0] * tensor.shape[1])
        for tensor in _tensors(runner.cache)
        if tensor.dim() > BLOCK_AXES
    )


def weight_reads(model: Any) -> int:
    """Bytes of matrices that one pass goes through. Of an embedding only the rows of its tokens are read: nothing."""
    layers = _layers(model)
    if layers:
        matrices = (m for layer in layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return int(sum(matrix.nbytes for matrix in matrices) + model.head.nbytes)
    # A head counts its own vocabulary, where it has one; it reads whichever it uses.
    return int(model.weight_bytes - model.vocabulary.nbytes + model.vocabulary.head.nbytes)


def pass_bytes(runner: Any, spans: "Sequence[Span]") -> int:
    """Every matrix once, and the keys and values of each context once."""
    window = getattr(runner.model.config, "sliding_window", None)
    contexts = (span.context_len + len(span.tokens) for span in spans)
    tokens = sum(contexts if window is None else (min(context, window) for context in contexts))
    return weight_reads(runner.model) + tokens * kv_bytes_per_token(runner)


def _layers(model: Any) -> Sequence[Any]:
    return getattr(model, "layers", ())


def _tensors(cache: Any) -> Iterator[Any]:
    for part in cache:
        if isinstance(part, tuple | list):
            yield from _tensors(part)
        else:
            yield part
