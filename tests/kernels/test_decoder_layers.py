"""All layers in one native call have the bits of one call per kernel."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.kernels.cpu import native
from paceline.models.decoder.decoder import ForwardOutput
from paceline.models.decoder.forward import DecoderModel
from paceline.models.decoder.ops import native_calls
from paceline.models.loading.load import build_model, open_checkpoint
from paceline.models.runner.runner import ModelRunner, Span, early_exit
from tests.kernels.cases import needs_native
from tests.models.tiny import FAMILIES, build

pytestmark = needs_native


def load(family: str, folder: Path) -> DecoderModel:
    build(family).save_pretrained(folder)
    return build_model(open_checkpoint(folder), torch.device("cpu"), torch.float32, "int8")


def spans() -> list[Span]:
    """A prompt, a decoded token, and a tree."""
    tree = Span([3, 4], 17, [5, 6, 7], 3, positions=[17, 18, 18], ancestors=[1, 3, 5])
    return [Span([1], 0, [3, 4, 5, 6, 7], 1), Span([2], 3, [9], 1), tree]


def outputs(runner: ModelRunner, *, whole: bool) -> tuple[ForwardOutput, list[Tensor]]:
    layers = tuple(range(runner.model.config.num_layers + 1))
    for cache in runner.cache:
        for values in cache:
            values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(0)))
    after_layer = None if whole else lambda _: None
    out = runner.forward(spans(), layers, last_hidden=True, after_layer=after_layer)
    return out, [values.clone() for cache in runner.cache for values in cache]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_has_the_bits_of_many(family: str, tmp_path: Path) -> None:
    runner = ModelRunner(load(family, tmp_path), 8)
    for one in (runner, early_exit(runner, 1)):
        (whole, whole_cache), (parts, parts_cache) = outputs(one, whole=True), outputs(one, whole=False)
        assert whole.logits is not None
        assert parts.logits is not None
        assert torch.equal(whole.logits, parts.logits)
        assert whole.last_hidden is not None
        assert parts.last_hidden is not None
        assert torch.equal(whole.last_hidden, parts.last_hidden)
        assert whole.hidden_by_layer.keys() == parts.hidden_by_layer.keys()
        assert all(
            torch.equal(whole.hidden_by_layer[layer], parts.hidden_by_layer[layer]) for layer in whole.hidden_by_layer
        )
        assert all(torch.equal(a, b) for a, b in zip(whole_cache, parts_cache, strict=True))


NATIVE_PARTS = {
    **dict.fromkeys(("ministral3", "deepseek-v3", "gemma4"), (False, False)),
    **dict.fromkeys(("gemma2", "gemma3", "granite", "granite4"), (True, False)),
}
"""Whether all layers, and a whole pass, are a native call, where not both are."""


@pytest.mark.parametrize("family", ["llama", "olmo3", *NATIVE_PARTS])
def test_what_native_calls_lack_is_computed_in_parts(family: str, tmp_path: Path) -> None:
    model = load(family, tmp_path)
    calls = native_calls(model, ModelRunner(model, 2).cache)
    assert (calls.layers is not None, calls.whole is not None) == NATIVE_PARTS.get(family, (True, True))


def test_bits_do_not_depend_on_blocks_of_rows_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of several tiles, and rows of several blocks. Kernels that follow a product run in its threads."""
    wide = FAMILIES["qwen3"]()
    wide.head_dim = 64
    monkeypatch.setitem(FAMILIES, "qwen3", lambda: wide)
    runner, tokens = ModelRunner(load("qwen3", tmp_path), 8), [3 + 7 * i % 150 for i in range(70)]
    span = Span([1, 2, 3, 4, 5], 0, tokens, len(tokens))
    expected = runner.forward([span], after_layer=lambda _: None).logits
    assert expected is not None
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        for count in (1, 2, 9, 16, 33, 70):
            logits = runner.forward([Span([1, 2, 3, 4, 5], 0, tokens[:count], count)]).logits
            assert logits is not None
            assert torch.equal(logits, expected[:count]), (threads, count)


def test_another_cache_of_the_same_model_is_used(tmp_path: Path) -> None:
    model = load("llama", tmp_path)
    first, second = ModelRunner(model, 8), ModelRunner(model, 8)
    expected, _ = outputs(first, whole=True)
    found, _ = outputs(second, whole=True)
    assert torch.equal(expected.logits, found.logits)  # type: ignore[arg-type]  # all spans have logits
    assert first.cache[0][0].any()
    assert second.cache[0][0].any()
