"""Tiny models with GPU weights, on the GPU or the interpreter, and the same models on the CPU."""

import torch
from torch import Tensor

from paceline.models.decoder.decoder import ForwardOutput
from paceline.models.decoder.forward import DecoderModel
from paceline.models.families.spec import DecoderSpec
from paceline.models.runner.runner import Span
from paceline.speculation.drafts.drafts import depths
from paceline.speculation.verification.tree import ancestors
from tests.fakes import TINY, RandomWeights
from tests.kernels.gpu.cases import DEVICE
from tests.specs import changed

SHAPE = changed(TINY, hidden_size=40, num_heads=3, num_kv_heads=1, ffn_size=56, max_position=128, tie_embeddings=False)
PARENTS = [-1, 0, 0, -1]


class UnevenWeights(RandomWeights):
    """Weights with random norms and biases: norms of one and biases of zero would hide errors."""

    def vector(self, name: str) -> Tensor:
        drawn = 0.3 * self._draw(name, self._config.weight_shape(name))
        return drawn if name.endswith(("bias", "sinks")) else 1 + drawn


def models(config: DecoderSpec) -> tuple[DecoderModel, DecoderModel]:
    """(model on the GPU or the interpreter, model on the CPU)."""
    weights, cpu = UnevenWeights(config, seed=3), torch.device("cpu")
    return DecoderModel(config, weights, DEVICE, torch.float32), DecoderModel(config, weights, cpu, torch.float32)


def tokens(count: int, start: int = 0) -> list[int]:
    return [(start + i) * 7 % SHAPE.vocab_size for i in range(count)]


def tree(blocks: list[int], start: int) -> Span:
    positions = [start, *(start + depth for depth in depths(PARENTS))]
    rows = 1 + len(PARENTS)
    return Span(blocks, start, tokens(rows, start), rows, positions, ancestors(PARENTS))


def same(ours: ForwardOutput, theirs: ForwardOutput) -> None:
    """Check that logits and hidden states are equal, and that the same ones are returned."""
    for mine, other in ((ours.logits, theirs.logits), (ours.last_hidden, theirs.last_hidden)):
        assert (mine is None) == (other is None)
        if mine is not None:
            close(mine, other)
    assert set(ours.hidden_by_layer) == set(theirs.hidden_by_layer)
    for layer, states in theirs.hidden_by_layer.items():
        close(ours.hidden_by_layer[layer], states)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-4, atol=1e-4)
