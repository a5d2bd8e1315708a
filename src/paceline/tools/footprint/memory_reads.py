"""Memory of drafts, bytes that a pass reads, and the memory bandwidth of a device."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.clock import Clock
from paceline.policy.cost.cost import Footprint

if TYPE_CHECKING:
    import torch

    from paceline.engine import EngineParts
    from paceline.models.runner import Span


BLOCK_AXES = 2
"""Leading axes of a cache tensor: [blocks, slots, …]."""


@dataclass(frozen=True, slots=True)
class DraftParts:
    """The models of a proposer, without the target."""

    runners: tuple[Any, ...]
    """Models with a KV cache: `forward(spans, …)`."""
    heads: tuple[Any, ...]
    """Models without a KV cache: `logits(hidden)`."""


def draft_parts(engine: "EngineParts", methods: Iterable[str] | None = None) -> DraftParts:
    """The parts of these methods, or of all methods, each once."""
    proposers = engine.speculator.proposers
    traits = [proposers[method].traits for method in methods or proposers]
    runners = dict.fromkeys(runner for trait in traits for runner in trait.runners)
    heads = dict.fromkeys(head for trait in traits for head in trait.heads)
    return DraftParts(tuple(runners), tuple(heads))


def footprint(engine: "EngineParts", method: str) -> Footprint:
    """Memory of a method, without the target's."""
    parts = draft_parts(engine, [method])
    shared = {id(layer) for layer in engine.runner.model.layers}
    # Layer skip uses the target's layers and cache.
    own = [runner for runner in parts.runners if not any(id(layer) in shared for layer in _layers(runner.model))]
    return Footprint(
        weight_bytes=sum(model.weight_bytes for model in (*(runner.model for runner in own), *parts.heads)),
        kv_bytes_per_token=sum(map(kv_bytes_per_token, own)),
    )


def kv_bytes_per_token(runner: Any) -> int:
    """KV bytes of one token over all layers."""
    return sum(
        tensor.nbytes // (tensor.shape[0] * tensor.shape[1])
        for tensor in _tensors(runner.cache)
        if tensor.dim() > BLOCK_AXES
    )


def weight_reads(model: Any) -> int:
    """Bytes of matrices that one pass reads. Embeddings do not count: only the rows of its tokens are read."""
    layers = _layers(model)
    if layers:
        matrices = (m for layer in layers for m in layer.matrices)
        return int(sum(matrix.nbytes for matrix in matrices) + model.head.nbytes)
    # weight_bytes includes a head's own vocabulary; the pass reads the head it uses.
    return int(model.weight_bytes - model.vocabulary.nbytes + model.vocabulary.head.nbytes)


def pass_bytes(runner: Any, spans: "Sequence[Span]") -> int:
    """Bytes of a pass: every matrix and the keys and values of each context once."""
    attended = getattr(runner.model.config, "attended", lambda context: context)  # a head has no windows
    tokens = sum(attended(span.context_len + len(span.tokens)) for span in spans)
    return weight_reads(runner.model) + tokens * kv_bytes_per_token(runner)


def _layers(model: Any) -> Sequence[Any]:
    return getattr(model, "layers", ())


def _tensors(cache: Any) -> Iterator[Any]:
    for part in cache:
        if isinstance(part, tuple | list):
            yield from _tensors(part)
        else:
            yield part


CPU_BYTES = 1 << 28
GPU_BYTES = 1 << 32
REPEATS = 5


def copy_bandwidth(device: "torch.device", clock: Clock, num_bytes: int | None = None) -> float:
    """Bytes per second, read plus written, of the fastest of a few large copies."""
    import torch

    on_gpu = device.type == "cuda"
    source = torch.zeros(num_bytes or (GPU_BYTES if on_gpu else CPU_BYTES), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(REPEATS + 1):  # the first run faults the pages in
        before = clock.now()
        target.copy_(source)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(clock.now() - before)
    return 2 * source.nbytes / min(seconds[1:])
