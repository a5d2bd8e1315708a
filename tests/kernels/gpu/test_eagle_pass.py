"""A pass of an EAGLE head on a GPU against the pass on the CPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.kernels.cpu import native
from paceline.kernels.formats.layout import AttentionLayout
from paceline.models.heads.block.block import BlockModel, BlockRunner
from paceline.models.heads.eagle.eagle import EagleModel
from paceline.models.heads.eagle.eagle_forms import read_eagle
from paceline.models.heads.eagle.eagle_gpu import HeadOps, gpu_eagle_forward, gpu_eagle_norm, gpu_eagle_states
from paceline.models.runner.runner import Span, build_inputs
from tests.fakes import tiny_model
from tests.heads import TensorWeights, draft_config, draft_tensors
from tests.kernels.gpu.cases import DEVICE
from tests.public_heads import public_block, public_eagle, target

pytestmark = pytest.mark.usefixtures("unrounded_drafts")

# One sequence has 18 slots and adds three, the other starts with one slot
SPANS = [Span([3, 1], 18, [5, 9, 2], 0, [20, 21, 22]), Span([2], 0, [7], 0)]


def head(device: torch.device, normed: bool) -> EagleModel:
    tiny = tiny_model(device=device.type)
    config = draft_config(tiny, "eagle")
    tensors = TensorWeights(draft_tensors(config, reduced=24))
    shape, weights = read_eagle("the head", "paceline", config, tensors, tiny.config)
    return EagleModel(replace(shape, norm_before_residual=normed), weights, tiny)


@pytest.mark.parametrize("normed", [False, True])
def test_gpu_and_cpu_passes_are_equal(monkeypatch: pytest.MonkeyPatch, normed: bool) -> None:
    states = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    cache = [torch.randn(4, 16, 2, 16, generator=torch.Generator().manual_seed(i)) for i in (2, 3)]
    model, device = head(torch.device("cpu"), normed), torch.device("cpu")
    rows = build_inputs(SPANS, device)
    ours = [values.clone() for values in cache]
    with torch.inference_mode():
        expected = model.forward(states, rows.tokens, rows.positions, rows.layout, [tuple(ours)])
        expected_logits = model.logits(expected)

    if DEVICE.type == "cpu":
        monkeypatch.setattr(native, "library", lambda: None)  # dense weights, as on a GPU
    model, rows = head(DEVICE, normed), build_inputs(SPANS, DEVICE)
    theirs = [values.to(DEVICE, copy=True) for values in cache]
    with torch.inference_mode():
        out = gpu_eagle_forward(model, states.to(DEVICE), rows.tokens, rows.positions, rows.layout, [tuple(theirs)])
        logits = model.vocabulary.logits(gpu_eagle_norm(model, out))
    for found, wanted in zip((out, logits, *theirs), (expected, expected_logits, *ours), strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name",
    ["speculators qwen3 three layers", "speculators norm_before_fc", "sglang old norms", "eagle1 qkv bias", "deepspec"],
)
def test_passes_of_published_heads_are_equal(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Committed rows from the target's states, then a row after them from the state that the pass returned."""
    expected = two_passes(name, torch.device("cpu"), EagleModel.fuse_joined, EagleModel.forward, EagleModel.logits)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(native, "library", lambda: None)  # dense weights, as on a GPU
    found = two_passes(
        name,
        DEVICE,
        gpu_eagle_states,
        gpu_eagle_forward,
        lambda model, states: model.vocabulary.logits(gpu_eagle_norm(model, states)),
    )
    for computed, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(computed.cpu(), wanted, rtol=2e-3, atol=2e-3)


@torch.inference_mode()
def two_passes(
    name: str,
    device: torch.device,
    fuse: Callable[[EagleModel, Tensor], Tensor],
    forward: Callable[..., Tensor],
    logits: Callable[[EagleModel, Tensor], Tensor],
) -> list[Tensor]:
    model, draw = public_eagle(name, target(device.type)), torch.Generator().manual_seed(1)
    joined = torch.randn(4, 32 * len(model.config.state_layers), generator=draw).to(device)
    cache = [tuple(torch.randn(2, 4, 16, 2, 16, generator=draw).to(device).unbind()) for _ in model.layers]
    rows, after = build_inputs(SPANS, device), build_inputs([Span([3, 1], 21, [4], 0, [23])], device)
    states = forward(model, fuse(model, joined), rows.tokens, rows.positions, rows.layout, cache)
    last = forward(model, states[2:3], after.tokens, after.positions, after.layout, cache)
    return [states, last, logits(model, last), *(values for layer in cache for values in layer)]


@pytest.mark.parametrize("name", ["dflash", "speculators dspark"])
def test_blocks_are_equal(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Context of two sequences, then a block of each."""
    expected = block_pass(name, torch.device("cpu"))
    if DEVICE.type == "cpu":
        monkeypatch.setattr(native, "library", lambda: None)  # dense weights, as on a GPU
        monkeypatch.setattr(BlockModel, "_ops", gpu_ops)
    for computed, wanted in zip(block_pass(name, DEVICE), expected, strict=True):
        torch.testing.assert_close(computed.cpu(), wanted, rtol=2e-3, atol=2e-3)


def gpu_ops(model: BlockModel, positions: Tensor, layout: AttentionLayout) -> HeadOps:
    return HeadOps.of(model.config.decoder, [(model.cos, model.sin)], positions, layout, model.device)


def block_pass(name: str, device: torch.device) -> list[Tensor]:
    model, draw = public_block(name, target(device.type)), torch.Generator().manual_seed(1)
    runner, rows = BlockRunner(model, 5), model.config.block_size
    states = {layer: torch.randn(24, 32, generator=draw).to(device) for layer in model.config.state_layers}
    context = runner.forward([Span([3, 1], 0, [0] * 18, 0), Span([2], 0, [0] * 6, 0, range(4, 10))], states)
    blocks = [
        Span([3, 1], 18, [7] + [3] * (rows - 1), 0),
        Span([2], 6, [5] + [3] * (rows - 1), 0, range(10, 10 + rows)),
    ]
    drafted = runner.draft(blocks)
    return [context, drafted, *(values for layer in runner.cache for values in layer)]
