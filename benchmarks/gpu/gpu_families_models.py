"""Shapes of large models, and models with random weights that are made on the device."""

import copy
from dataclasses import dataclass

import torch
from gpu_runs import BANDWIDTH
from tests.specs import changed

from paceline.kernels.formats.four_bit import FourBitWeight, Kind
from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.models.families.flat import flat_spec
from paceline.models.families.spec import DecoderSpec
from paceline.models.loading.streamed import StreamedModel, StreamedWeights
from paceline.models.manifest.parts import Parts, Piece

DRAFT_LAYERS = 2
PARTS = 8
"""Processes that share the families, or the tiles, to compile their kernels."""
LLAMA_8B = flat_spec(
    "llama", vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336,
    rms_eps=1e-5, rope_theta=500000.0, max_position=2048,
)  # fmt: skip
QWEN3_30B = flat_spec(
    "qwen3_moe", vocab_size=151936, hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, ffn_size=768,
    rms_eps=1e-6, rope_theta=1e6, max_position=2048, qk_norm=True, num_experts=128, experts_per_token=8,
)  # fmt: skip
GPT_OSS_20B = flat_spec(
    "gpt_oss", vocab_size=201088, hidden_size=2880, num_layers=24, num_heads=64, num_kv_heads=8, head_dim=64, ffn_size=2880,
    rms_eps=1e-5, rope_theta=150000.0, max_position=2048, attention_bias=True, output_bias=True, has_sinks=True,
    sliding_window=128, full_layers=tuple(range(1, 24, 2)), activation="clamped_swiglu", num_experts=32, experts_per_token=4,
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    config: DecoderSpec
    attention: Kind | None
    """4-bit format of the matrices of attention, and of one dense feed-forward layer. None stands for bfloat16."""
    experts: Kind | None = None


SHAPES = {
    "8b-4bit": Shape(LLAMA_8B, "float16"),
    "moe-bf16": Shape(QWEN3_30B, None),
    "moe-4bit": Shape(QWEN3_30B, "float16", "float16"),
    "gpt-oss": Shape(GPT_OSS_20B, None, "mxfp4"),
}


class RandomModel:
    """A model with random weights on the device, and a draft that shares its first layers."""

    def __init__(self, shape: Shape, layers: int | None, noise: float, device: torch.device) -> None:
        config = shape.config if layers is None else changed(shape.config, num_layers=layers)
        self._shape, self._config, self._noise, self._device = shape, config, noise, device
        self._generator = torch.Generator(device).manual_seed(0)
        streamed = StreamedWeights(Parts.of(config))
        streamed.put(streamed.parts.tokenizer, {})
        streamed.put(streamed.parts.tables, self._tables())
        total = 0
        for layer in range(config.num_layers):
            matrices = self._matrices(layer)
            total += sum(matrix.nbytes for matrix in matrices.values())
            streamed.put(streamed.parts.layer(layer), matrices)
        self.model = StreamedModel(config, device, torch.bfloat16, streamed, total)
        self.draft = copy.copy(self.model)
        count = min(DRAFT_LAYERS, config.num_layers)
        self.draft.config = changed(config, num_layers=count)
        self.draft.layers = self.model.layers[:count]
        self.draft.norms_after = [*self.model.norms_after[: count - 1], self.model.norms_after[-1]]

    def floor_seconds(self, rows: int) -> float:
        """Time to read the weights that a step over `rows` tokens needs."""
        config, total = self._config, self.model.head.nbytes
        for layer in self.model.layers:
            total += layer.qkv.nbytes + layer.output.nbytes
            inner = layer.gate_up.nbytes + layer.down.nbytes
            if config.experts is not None:
                used = 1 - (1 - config.experts.per_token / config.experts.num) ** rows
                inner = int(inner * used) + layer.router.nbytes
            total += inner
        return total / BANDWIDTH

    def _tables(self) -> dict[str, Piece]:
        c, vectors = self._config, dict[str, Piece]()
        for i in range(c.num_layers):
            for piece in c.pieces(i):
                size = sum(tensor.shape[0] for tensor in piece.tensors)
                if not piece.is_matrix:
                    vectors[f"layers.{i}.{piece.attribute}"] = (
                        self._ones(size) if piece.is_norm else self._randn(size) * 0.01
                    )
        embedding, head = (DenseWeight(self._randn(c.vocab_size, c.hidden_size)) for _ in range(2))
        return {"embedding": embedding, "head": head, "final_norm": self._ones(c.hidden_size), **vectors}

    def _matrices(self, layer: int) -> dict[str, LinearWeight]:
        c, shape = self._config, self._shape
        size = self._noise if layer >= DRAFT_LAYERS else 1.0
        inner = shape.attention if c.experts is None else shape.experts
        kinds = {"qkv": shape.attention, "output": shape.attention, "gate_up": inner, "down": inner, "router": None}
        matrices = {}
        for piece in c.pieces(layer):
            if piece.is_matrix:
                outputs, inputs = sum(tensor.shape[0] for tensor in piece.tensors), piece.tensors[0].shape[1]
                scale = size if piece.attribute in ("output", "down") else 1.0
                matrices[piece.attribute] = self._matrix(outputs, inputs, kinds[piece.attribute], scale)
        return matrices

    def _matrix(self, outputs: int, inputs: int, kind: Kind | None, size: float) -> LinearWeight:
        size *= inputs**-0.5
        if kind is None:
            return DenseWeight(self._randn(outputs, inputs) * size)
        return random_four_bit(outputs, inputs, kind, size, self._generator)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=torch.bfloat16)

    def _ones(self, size: int) -> torch.Tensor:
        return torch.ones(size, device=self._device, dtype=torch.bfloat16)


def random_four_bit(outputs: int, inputs: int, kind: Kind, size: float, generator: torch.Generator) -> FourBitWeight:
    """Random codes, with scales so that values have the standard deviation `size`."""
    group, padded = (64 if kind == "mxfp4" else 128), -(-inputs // 128) * 128
    shape = outputs // 16, padded // group, 16, group // 2
    codes = torch.randint(0, 256, shape, generator=generator, device=generator.device, dtype=torch.uint8)
    if kind == "mxfp4":  # the values of random codes have a deviation of 2.9
        exponent = round(torch.tensor(size / 2.9).log2().item()) + 127 + 126
        word = int.from_bytes(bytes([exponent] * 4), "little", signed=True)
    else:
        scale = torch.tensor(size / 4.6, dtype=torch.float16).view(torch.int16).item()
        word = int(torch.tensor(128.0 + 8.0, dtype=torch.bfloat16).view(torch.int16).item()) << 16 | int(scale) & 0xFFFF
    words = torch.full((padded // 128, outputs), word, dtype=torch.int32, device=generator.device)
    return FourBitWeight(codes, words, (outputs, inputs), group, kind)
