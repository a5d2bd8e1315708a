"""Shapes of large models, and models with random weights that are made on the device."""

import copy
from dataclasses import dataclass, replace

import torch
from gpu_runs import BANDWIDTH

from paceline.kernels.formats.four_bit import FourBitWeight, Kind
from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.models.families.config import ModelConfig
from paceline.models.loading.streamed import StreamedModel, StreamedWeights
from paceline.models.manifest.parts import Parts, Piece

DRAFT_LAYERS = 2
PARTS = 8
"""Processes that share the families, or the tiles, to compile their kernels."""
LLAMA_8B = ModelConfig(
    "llama", vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336,
    rms_eps=1e-5, rope_theta=500000.0, max_position=2048,
)  # fmt: skip
QWEN3_30B = ModelConfig(
    "qwen3_moe", vocab_size=151936, hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, ffn_size=768,
    rms_eps=1e-6, rope_theta=1e6, max_position=2048, qk_norm=True, num_experts=128, experts_per_token=8,
)  # fmt: skip
GPT_OSS_20B = ModelConfig(
    "gpt_oss", vocab_size=201088, hidden_size=2880, num_layers=24, num_heads=64, num_kv_heads=8, head_dim=64, ffn_size=2880,
    rms_eps=1e-5, rope_theta=150000.0, max_position=2048, attention_bias=True, output_bias=True, has_sinks=True,
    sliding_window=128, full_layers=tuple(range(1, 24, 2)), activation="clamped_swiglu", num_experts=32, experts_per_token=4,
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    config: ModelConfig
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
        config = shape.config if layers is None else replace(shape.config, num_layers=layers)
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
        self.draft.config = replace(config, num_layers=count)
        self.draft.layers = self.model.layers[:count]
        self.draft.norms_after = [*self.model.norms_after[: count - 1], self.model.norms_after[-1]]

    def floor_seconds(self, rows: int) -> float:
        """Time to read the weights that a step over `rows` tokens needs."""
        config, total = self._config, self.model.head.nbytes
        for layer in self.model.layers:
            total += layer.qkv.nbytes + layer.output.nbytes
            inner = layer.gate_up.nbytes + layer.down.nbytes
            if config.num_experts:
                used = 1 - (1 - config.experts_per_token / config.num_experts) ** rows
                inner = int(inner * used) + layer.router.nbytes
            total += inner
        return total / BANDWIDTH

    def _tables(self) -> dict[str, Piece]:
        c, vectors = self._config, dict[str, Piece]()
        ones = {"input_norm": c.hidden_size, "post_attention_norm": c.hidden_size}
        ones |= {"q_norm": c.head_dim, "k_norm": c.head_dim} if c.qk_norm else {}
        drawn = {"qkv_bias": c.q_size + 2 * c.kv_size} if c.attention_bias else {}
        drawn |= {"sinks": c.num_heads} if c.has_sinks else {}
        if c.output_bias:
            drawn |= {"output_bias": c.hidden_size, "router_bias": c.num_experts}
            drawn |= {"gate_up_bias": 2 * c.ffn_size * c.num_experts, "down_bias": c.hidden_size * c.num_experts}
        for i in range(c.num_layers):
            vectors |= {f"layers.{i}.{name}": self._ones(size) for name, size in ones.items()}
            vectors |= {f"layers.{i}.{name}": self._randn(size) * 0.01 for name, size in drawn.items()}
        embedding, head = (DenseWeight(self._randn(c.vocab_size, c.hidden_size)) for _ in range(2))
        return {"embedding": embedding, "head": head, "final_norm": self._ones(c.hidden_size), **vectors}

    def _matrices(self, layer: int) -> dict[str, LinearWeight]:
        c, shape = self._config, self._shape
        size = self._noise if layer >= DRAFT_LAYERS else 1.0
        count, kind = (c.num_experts, shape.experts) if c.num_experts else (1, shape.attention)
        matrices = {
            "qkv": self._matrix(c.q_size + 2 * c.kv_size, c.hidden_size, shape.attention, 1.0),
            "output": self._matrix(c.hidden_size, c.q_size, shape.attention, size),
            "gate_up": self._matrix(count * 2 * c.ffn_size, c.hidden_size, kind, 1.0),
            "down": self._matrix(count * c.hidden_size, c.ffn_size, kind, size),
        }
        if c.num_experts:
            matrices["router"] = self._matrix(c.num_experts, c.hidden_size, None, 1.0)
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
