from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.kernels.formats.quantized import Quantization, QuantizedWeight, quantize
from paceline.kernels.formats.weights import Dense, Grouped
from paceline.models.decoder.forward import DecoderModel
from paceline.models.loading.load import open_checkpoint
from paceline.models.runner.runner import ModelRunner, Span
from paceline.models.weights.checkpoint import QuantizedWeights
from paceline.models.weights.safetensors import open_folder
from tests.fakes import TINY, RandomWeights, random_tree, request, run, tiny_engine, tiny_model
from tests.models.paged import PagedRunner, relative_error
from tests.models.tiny import build
from tests.models.weights.test_gguf_file import write_gguf

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_layers_are_quantised_and_tables_are_kept(kind: Quantization, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    exact = open_folder(tmp_path)
    weights = QuantizedWeights(exact.weights, kind, CPU)
    assert weights.names() == exact.weights.names()
    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        assert isinstance(weights.matrix(table), Dense)
    down = weights.matrix("model.layers.1.mlp.down_proj.weight")
    assert isinstance(down, QuantizedWeight)
    original = exact.weights.matrix("model.layers.1.mlp.down_proj.weight")
    assert torch.equal(down.dequantize(), quantize(original.dequantize(), kind).dequantize())
    logits = [
        PagedRunner(DecoderModel(exact.config, source, CPU, torch.float32)).step({0: [5, 9, 14, 3]}).logits
        for source in (weights, exact.weights)
    ]
    assert logits[0] is not None
    assert logits[1] is not None
    # a weight has an error of about 0.7% of its deviation (int8) or 2.5% of itself (fp8), over seven matrices
    difference = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert 1e-4 < difference < (0.03 if kind == "int8" else 0.12)


def test_weight_bytes_are_those_stored(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    exact = open_folder(tmp_path)
    tables = 2 * 160 * 64
    layers = exact.config.num_parameters - tables - 64 * (2 * 3 + 1)
    dense = DecoderModel(exact.config, exact.weights, CPU, torch.bfloat16)
    small = DecoderModel(exact.config, QuantizedWeights(exact.weights, "fp8", CPU), CPU, torch.bfloat16)
    outputs = 3 * (64 + 2 * 32 + 64 + 2 * 96 + 64)  # one scale each
    assert dense.weight_bytes == 2 * (tables + layers)
    assert small.weight_bytes == 2 * tables + layers + 4 * outputs


def test_quantised_weights_are_kept_on_a_cpu(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", build("llama"))
    source = open_checkpoint(tmp_path / "m.gguf").weights
    names = [name for name in source.names() if name.endswith("_proj.weight")]
    for name in names:
        weight = QuantizedWeights(source, "int8", CPU).matrix(name)
        assert isinstance(weight, Grouped | QuantizedWeight)
        if isinstance(source.matrix(name), Grouped):
            assert isinstance(weight, Grouped)


def test_an_8_bit_cache_is_close_and_slots_can_be_moved() -> None:
    model = tiny_model()
    tokens = [3, 14, 15, 9, 26, 5, 35, 8]
    runners = [ModelRunner(model, 4, dtype) for dtype in (None, torch.float8_e4m3fn)]
    spans = [Span([2, 1], 0, tokens, len(tokens))]
    exact, quantised = (runner.forward(spans).logits for runner in runners)
    assert exact is not None
    assert quantised is not None
    assert 1e-4 < relative_error(quantised, exact) < 0.5
    runner = runners[1]
    assert runner.cache[0][0].dtype is torch.float8_e4m3fn
    before = runner.cache[1][1].view(torch.uint8).flatten(0, 1)[33].clone()
    runner.move([33], [50])
    assert torch.equal(runner.cache[1][1].view(torch.uint8).flatten(0, 1)[50], before)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_speculation_is_exact_with_8_bit_weights_and_cache(kind: Quantization) -> None:
    """8 bits change the model, but its text is the same with and without drafts."""
    weights = QuantizedWeights(RandomWeights(TINY, 0), kind, CPU)
    model = DecoderModel(TINY, weights, CPU, torch.float32)
    requests = [request("greedy", [1, 2, 3], temperature=0.0), request("seeded", [4, 5], temperature=0.8, seed=7)]
    texts = []
    for proposer in (None, random_tree(TINY.vocab_size)):
        engine = tiny_engine(model, proposer, runner_kind=partial(ModelRunner, kv_dtype=torch.float8_e4m3fn))
        result = run(engine, requests)
        texts.append(result.tokens)
        assert (result.accepted > 0) is (proposer is not None)
    assert texts[0] == texts[1]
