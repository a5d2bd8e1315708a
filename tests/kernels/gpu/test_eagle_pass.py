"""A pass of an EAGLE head on a GPU against the pass on the CPU."""

from dataclasses import replace

import pytest
import torch

from paceline.kernels.cpu import native
from paceline.models.heads.eagle.eagle import EagleModel
from paceline.models.heads.eagle.eagle_gpu import gpu_eagle_forward, gpu_eagle_norm
from paceline.models.heads.eagle.eagle_weights import EagleConfig
from paceline.models.runner.runner import Span, build_inputs
from tests.fakes import tiny_model
from tests.heads import TensorWeights, draft_config, draft_tensors
from tests.kernels.gpu.cases import DEVICE

pytestmark = pytest.mark.usefixtures("unrounded_drafts")

# One sequence has 18 slots and adds three, the other starts with one slot
SPANS = [Span([3, 1], 18, [5, 9, 2], 0, [20, 21, 22]), Span([2], 0, [7], 0)]


def head(device: torch.device, normed: bool) -> EagleModel:
    target = tiny_model(device=device.type)
    config = draft_config(target, "eagle")
    shape = replace(EagleConfig.read(config, target.config), norm_before_residual=normed)
    return EagleModel(shape, TensorWeights(draft_tensors(config, reduced=24)), target)


@pytest.mark.parametrize("normed", [False, True])
def test_gpu_and_cpu_passes_are_equal(monkeypatch: pytest.MonkeyPatch, normed: bool) -> None:
    states = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    cache = [torch.randn(4, 16, 2, 16, generator=torch.Generator().manual_seed(i)) for i in (2, 3)]
    model, device = head(torch.device("cpu"), normed), torch.device("cpu")
    rows = build_inputs(SPANS, device)
    ours = [values.clone() for values in cache]
    with torch.inference_mode():
        expected = model.forward(states, rows.tokens, rows.positions, rows.layout, tuple(ours))
        expected_logits = model.logits(expected)

    if DEVICE.type == "cpu":
        monkeypatch.setattr(native, "library", lambda: None)  # dense weights, as on a GPU
    model, rows = head(DEVICE, normed), build_inputs(SPANS, DEVICE)
    theirs = [values.to(DEVICE, copy=True) for values in cache]
    with torch.inference_mode():
        out = gpu_eagle_forward(model, states.to(DEVICE), rows.tokens, rows.positions, rows.layout, tuple(theirs))
        logits = model.vocabulary.logits(gpu_eagle_norm(model, out))
    for found, wanted in zip((out, logits, *theirs), (expected, expected_logits, *ours), strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-3, atol=1e-3)
