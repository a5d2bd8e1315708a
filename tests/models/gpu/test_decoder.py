"""A pass with the GPU kernels equals the pass on the CPU."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from paceline.kernels.formats.layout import LongPrompt
from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.gpu import linear
from paceline.models.decoder import gpu_ops as gpu_decoder
from paceline.models.decoder.gpu_ops import gpu_forward
from paceline.models.families.layers import DenseFeedForward, Heads, Latent, LayerSpec, OwnHeads, QueryScale
from paceline.models.families.spec import DecoderSpec
from paceline.models.runner import runner as runner_module
from paceline.models.runner.runner import BatchInputs, ModelRunner, Span, build_inputs
from tests.kernels.gpu.cases import DEVICE
from tests.kernels.gpu.test_four_bit import packed
from tests.models.gpu.cases import SHAPE, close, models, same, tokens, tree
from tests.models.tiny import ROW_OF, spec
from tests.specs import changed, resized, with_heads, with_layers, with_scored_experts

SHALLOW = changed(SHAPE, num_layers=1)
CAPPED = with_heads(changed(SHALLOW, attention_scale=1.0), score_cap=2.0)
FAMILIES: dict[str, DecoderSpec] = {
    "llama": SHAPE,
    "tied": changed(SHALLOW, tie_embeddings=True, num_heads=2, num_kv_heads=2),
    "qwen2": changed(SHALLOW, attention_bias=True),
    "qwen3": changed(SHALLOW, qk_norm=True),
    "mistral": changed(SHALLOW, sliding_window=5),
    "qwen3_moe": changed(
        SHALLOW, hidden_size=64, ffn_size=32, qk_norm=True, num_experts=4, experts_per_token=2, normalizes_experts=False
    ),
    "gemma2": replace(CAPPED, logit_cap=0.5),
    "olmo3": with_layers(with_heads(SHAPE, has_joined_qk_norm=True), norms="post"),
    "ministral3": with_heads(SHALLOW, query_scale=QueryScale(0.5, 8)),
    "granite": replace(SHALLOW, embedding_scale=6.0, residual_scale=0.3, logit_scale=0.2),
    "gemma3_text": changed(
        SHAPE,
        sliding_window=5,
        full_layers=(1,),
        qk_norm=True,
        local_rope_theta=1000.0,
        attention_scale=0.3,
        has_output_norms=True,
        embedding_scale=6.0,
        activation="gelu_tanh",
    ),
    "glm4_moe": with_scored_experts(changed(SHAPE, hidden_size=64, num_layers=2)),
    "gpt_oss": changed(
        SHAPE,
        hidden_size=64,
        ffn_size=32,
        sliding_window=5,
        full_layers=(1,),
        attention_bias=True,
        output_bias=True,
        has_sinks=True,
        activation="clamped_swiglu",
        num_experts=4,
        experts_per_token=2,
    ),
}


def check(
    config: DecoderSpec, *passes: list[Span], state_layers: tuple[int, ...] = (), last_hidden: bool = False
) -> None:
    """Run all passes on both models and compare outputs and caches."""
    model, reference = models(config)
    ours, theirs = ModelRunner(model, 12), ModelRunner(reference, 12)
    with torch.inference_mode():
        for spans in passes:
            rows: BatchInputs = build_inputs(spans, DEVICE)
            found = gpu_forward(
                model, rows.tokens, rows.positions, rows.layout, ours.cache, rows.logit_rows, state_layers, last_hidden
            )
            same(found, theirs.forward(spans, state_layers, last_hidden))
    for mine, other in zip(ours.cache, theirs.cache, strict=True):
        for part in range(2):
            close(mine[part], other[part])


FAMILIES |= {
    name: resized(spec(row), SHAPE.vocab_size, hidden_size=32, head_dim=16, ffn_size=32).first_layers(2)
    for name, row in ROW_OF.items()
    if row is not None and name not in FAMILIES
}
_OF_HEADS = {
    "num": 4,
    "num_kv": 3,
    "head_dim": 32,
    "score_scale": 0.3,
    "has_bias": True,
    "has_output_bias": True,
    "has_qk_norm": True,
    "has_sinks": True,
    "score_cap": 2.0,
    "has_joined_qk_norm": True,
    "query_scale": QueryScale(0.5, 8),
    "latent": Latent(None, 32, 8, 16),
    "own": OwnHeads(1, 8, True),
}
_FUSED = {"num", "num_kv", "head_dim", "score_scale", "has_bias", "has_sinks", "score_cap"}
"""What the fused kernels compute, or leave to the kernel of attention, which all models have."""
_OF_MODEL = {
    "tie_embeddings": True,
    "embedding_scale": 6.0,
    "residual_scale": 0.3,
    "logit_scale": 0.2,
    "logit_cap": 3.0,
}


def test_features_that_fused_kernels_lack_go_to_the_general_ones() -> None:
    """Every field of a description is in this test, so that a new one cannot be left out of a fused pass unseen."""
    assert _OF_HEADS.keys() == {field.name for field in fields(Heads)}
    sizes = {"architecture", "vocab_size", "hidden_size", "rms_eps", "max_position", "bos_id", "eos_ids"}
    assert _OF_MODEL.keys() | sizes | {"rotary", "layers"} == {field.name for field in fields(DecoderSpec)}
    assert {field.name for field in fields(LayerSpec)} == {"attention", "ffn", "norms", "window", "rotary", "has_scale"}
    is_plain = gpu_decoder.is_plain
    assert is_plain(SHALLOW)
    for name, value in _OF_HEADS.items():
        config = with_heads(SHALLOW, **{"num": 3, "num_kv": 1, name: value} if name != "num" else {"num": 4})
        assert is_plain(config) == (name in _FUSED), name
    for name, value in _OF_MODEL.items():  # embedding and logits are computed outside the layers
        assert is_plain(replace(SHALLOW, **{name: value})) == (name != "residual_scale"), name
    assert not is_plain(with_layers(SHALLOW, norms="post"))
    assert not is_plain(with_layers(SHALLOW, has_scale=True))
    assert not is_plain(with_layers(SHALLOW, ffn=DenseFeedForward(56, "gelu_tanh")))
    assert is_plain(with_layers(SHALLOW, window=5))
    assert not is_plain(replace(SHALLOW, rotary=2 * SHALLOW.rotary))


@pytest.fixture(params=["few rows", "many rows"])
def _either_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for few rows or for many rows. The test has few rows in both cases, because the interpreter is slow."""
    if request.param == "many rows":
        monkeypatch.setattr(linear, "MAX_ROWS", 0)


@pytest.mark.usefixtures("_either_path")
@pytest.mark.parametrize("family", FAMILIES)
def test_spans_of_different_lengths(family: str) -> None:
    prompts = [Span([7, 2], 0, tokens(18), 1), Span([5], 0, tokens(2), 0)]
    check(FAMILIES[family], prompts, [Span([7, 2], 18, tokens(2, 18), 2), Span([5], 2, tokens(1, 2), 1)])


@pytest.mark.usefixtures("_either_path")
@pytest.mark.parametrize("config", [SHALLOW, CAPPED], ids=["plain", "capped"])
def test_a_tree_and_a_chain_in_one_batch(config: DecoderSpec) -> None:
    check(config, [Span([2], 0, tokens(5), 0)], [tree([2], 5), Span([8, 1], 0, tokens(3), 1)])


@pytest.mark.interpreted
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="float32 is multiplied as TF32; tests/kernels has the kernel in bf16"
)
def test_long_prompts_have_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside sequences of few rows, in chunks, and not in layers with a window."""
    attended = list[LongPrompt]()
    monkeypatch.setattr(linear, "MAX_ROWS", 0)
    for module in (gpu_decoder, runner_module):
        monkeypatch.setattr(module, "LONG_ROWS", 10)
    monkeypatch.setattr(gpu_decoder, "supports_prompts", lambda dtype, cache: True)
    attend = gpu_decoder.attend_long_prompt

    def recorded(*arguments: Any) -> None:
        attended.append(arguments[4])
        attend(*arguments)

    monkeypatch.setattr(gpu_decoder, "attend_long_prompt", recorded)
    chunks = [
        [Span([5], 0, tokens(10), 1), Span([7, 2, 4], 0, tokens(18), 1)],
        [Span([5], 10, tokens(1), 1), Span([7, 2, 4], 18, tokens(20), 1)],
    ]
    check(SHALLOW, *chunks)
    assert attended == [LongPrompt(1, 10, 18, 0), LongPrompt(1, 1, 20, 18)]
    check(FAMILIES["mistral"], *chunks)
    assert len(attended) == 2


@pytest.mark.parametrize("num_logits", [0, 1, 3, 20])
def test_the_last_layer_computes_only_rows_with_logits(num_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it has stored the keys and values of all rows."""
    monkeypatch.setattr(linear, "MAX_ROWS", 0)
    rows_fed = list[int]()
    activate = gpu_decoder.gated

    def recorded(gate_up: torch.Tensor, *arguments: Any) -> torch.Tensor:
        rows_fed.append(len(gate_up))
        return activate(gate_up, *arguments)

    monkeypatch.setattr(gpu_decoder, "gated", recorded)
    check(SHAPE, [Span([7, 2], 0, tokens(20), num_logits)])
    assert rows_fed == [20] * (SHAPE.num_layers - 1) + [num_logits] * (num_logits > 0)
    rows_fed.clear()
    check(SHAPE, [Span([7, 2], 0, tokens(20), num_logits)], last_hidden=True)
    assert rows_fed == [20] * SHAPE.num_layers


@pytest.mark.parametrize("count", [5, linear.MAX_ROWS + 1])
def test_hidden_states_on_request(count: int) -> None:
    span = Span([3, 9, 0, 11, 5], 0, tokens(count), 1)
    check(SHALLOW, [span], state_layers=(0, 1), last_hidden=True)


def test_a_pass_without_logits() -> None:
    check(SHALLOW, [Span([3], 0, tokens(4), 0)], last_hidden=True)


@pytest.mark.usefixtures("_either_path")
def test_after_layer_is_called_when_keys_and_values_are_stored() -> None:
    model, _ = models(SHAPE)
    runner, calls = ModelRunner(model, 4), list[tuple[int, list[bool]]]()
    rows = build_inputs([Span([2], 0, tokens(4), 1)], DEVICE)

    def after_layer(layer: int) -> None:
        calls.append((layer, [bool(keys[2].any()) for keys, _ in runner.cache]))

    with torch.inference_mode():
        gpu_forward(
            model,
            rows.tokens,
            rows.positions,
            rows.layout,
            runner.cache,
            rows.logit_rows,
            after_layer=after_layer,
        )
    layers = range(SHAPE.num_layers)
    assert calls == [(layer, [i <= layer for i in layers]) for layer in layers]


@pytest.mark.usefixtures("_either_path")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_4_bit_matrices(family: str) -> None:
    """The same pass with the codes of a checkpoint, and with the dense matrices that they stand for."""
    config = changed(
        FAMILIES[family], num_layers=1, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=32
    )
    model, reference = models(config)
    for seed, name in enumerate(("qkv", "output", "gate_up", "down")):
        weight = packed(*getattr(model.layers[0], name).shape, "float16 32", seed)
        setattr(model.layers[0], name, weight)
        setattr(reference.layers[0], name, DenseWeight(weight.dequantize().cpu()))
    spans = [Span([3, 1], 0, tokens(18), 2)]
    rows, cache = build_inputs(spans, DEVICE), ModelRunner(model, 4).cache
    with torch.inference_mode():
        found = gpu_forward(model, rows.tokens, rows.positions, rows.layout, cache, rows.logit_rows)
        same(found, ModelRunner(reference, 4).forward(spans))
