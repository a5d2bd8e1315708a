"""For gpu_families.py: logits of tiny models of every family, on the device and on the host."""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from gpu_families_models import PARTS

from paceline.kernels.weights import Dense, FourBit, Weight
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.llama import DecoderModel
from paceline.models.loading.checkpoint import Float32Activations
from paceline.models.loading.formats.mxfp4 import unpack_mxfp4
from paceline.models.loading.weight_shapes import weight_shape
from paceline.models.runner import ModelRunner, Span

TINY = ModelConfig(
    "llama", vocab_size=160, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=128,
    rms_eps=1e-6, rope_theta=10000.0, max_position=512,
)  # fmt: skip
EXPERTS = replace(TINY, ffn_size=64, num_experts=8, experts_per_token=3)
GPT_OSS = replace(
    EXPERTS, architecture="gpt_oss", attention_bias=True, output_bias=True, has_sinks=True, sliding_window=7,
    full_layers=(1,), activation="clamped_swiglu",
)  # fmt: skip
GEMMA = replace(
    TINY, architecture="gemma3_text", sliding_window=7, full_layers=(1,), qk_norm=True, local_rope_theta=1000.0,
    attention_scale=0.3, has_output_norms=True, embedding_scale=11.0, activation="gelu_tanh", tie_embeddings=True,
)  # fmt: skip
FAMILIES: dict[str, tuple[ModelConfig, str]] = {
    "llama": (TINY, "dense"),
    "llama, 4-bit groups of 128": (TINY, "float16 128"),
    "llama, 4-bit groups of 32": (TINY, "bfloat16 32"),
    "qwen2": (replace(TINY, attention_bias=True), "dense"),
    "qwen3": (replace(TINY, qk_norm=True), "dense"),
    "qwen3_moe": (replace(EXPERTS, architecture="qwen3_moe", qk_norm=True), "dense"),
    "qwen3_moe, 4-bit": (replace(EXPERTS, architecture="qwen3_moe", qk_norm=True, ffn_size=128), "float16 128"),
    "gemma3_text": (GEMMA, "dense"),
    "gpt_oss": (GPT_OSS, "dense"),
    "gpt_oss, MXFP4": (GPT_OSS, "mxfp4"),
}


class TinyWeights:
    """Random weights on the host, equal for equal names."""

    def __init__(self, config: ModelConfig, form: str) -> None:
        self._config, self._form = config, form

    def names(self) -> frozenset[str]:
        return frozenset()

    def matrix(self, name: str) -> Weight:
        outputs, inputs = weight_shape(self._config, name)
        draw = self._draw(name)
        is_coded = name.startswith("model.layers.") and not name.endswith(".mlp.gate.weight")
        if not is_coded or self._form == "dense" or (self._form == "mxfp4" and ".experts." not in name):
            return Dense(torch.randn(outputs, inputs, generator=draw) * 0.1)
        if self._form == "mxfp4":
            blocks = torch.randint(0, 256, (outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
            return unpack_mxfp4(
                blocks, torch.randint(121, 124, (outputs, inputs // 32), generator=draw, dtype=torch.uint8)
            )
        kind, group = self._form.split()[0], min(int(self._form.split()[1]), inputs)
        dtype = torch.float16 if kind == "float16" else torch.bfloat16
        codes = torch.randint(0, 16, (outputs, inputs), generator=draw, dtype=torch.uint8)
        scales = (0.02 + 0.01 * torch.rand(outputs, inputs // group, generator=draw)).to(dtype).float()
        zeros = torch.randint(6, 11, scales.shape, generator=draw).float()
        fine, offsets = (one.repeat_interleave(group // 32, 1) for one in (scales, -zeros * scales))
        return FourBit(codes, fine, offsets, 32, stored_group=group, scale_dtype=dtype)

    def vector(self, name: str) -> torch.Tensor:
        drawn = 0.3 * torch.randn(weight_shape(self._config, name), generator=self._draw(name))
        return drawn if name.endswith(("bias", "sinks")) else 1 + drawn

    def _draw(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(sum(byte * (i + 1) for i, byte in enumerate(name.encode())))


def logits_of(model: DecoderModel, make: Callable[[DecoderModel, int], ModelRunner], prompt: int) -> torch.Tensor:
    """Logits of a prompt, of a decoded token, and of a verification of five."""
    runner, ids = make(model, 16), [(7 * i + 3) % TINY.vocab_size for i in range(prompt + 6)]
    blocks = [3, 1, 4, 2, 5, 9, 8]
    parts = (0, prompt, 3), (prompt, prompt + 1, 1), (prompt + 1, prompt + 6, 5)
    found = []
    for begin, end, count in parts:
        logits = runner.forward([Span(blocks, begin, ids[begin:end], count)]).logits
        assert logits is not None
        found.append(logits.float().cpu().clone())  # the next pass overwrites them
    return torch.cat(found)


def family_lines(device: torch.device, part: int | None) -> Iterator[str]:
    """One line of the table for each family; of every eighth, with a part."""
    from paceline.models.gpu.runner import GpuRunner

    yield "| family | float32: largest difference | bfloat16: largest difference | largest logit |"
    chosen = list(FAMILIES.items())
    for name, (config, form) in chosen if part is None else chosen[part::PARTS]:
        try:
            weights = TinyWeights(config, form)
            reference = DecoderModel(config, Float32Activations(weights), torch.device("cpu"), torch.float32)
            found = []
            for dtype, prompt in ((torch.float32, 16), (torch.bfloat16, 100)):  # float32 takes long to compile
                expected = logits_of(reference, ModelRunner, prompt)
                ours = logits_of(DecoderModel(config, weights, device, dtype), GpuRunner, prompt)
                found.append(float((ours - expected).abs().max()))
            yield f"| {name} | {found[0]:.1e} | {found[1]:.1e} | {float(expected.abs().max()):.2f} |"
        except Exception as error:
            traceback.print_exc()
            yield f"| {name} | failed: {error!r:.200} |"
