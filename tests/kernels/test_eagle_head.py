"""The native calls of an EAGLE head have the bits of one call per kernel."""

import pytest
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.kernels.cpu.eagle_head import EagleHead, TreeRoot
from paceline.models.heads.eagle.eagle import EagleModel, EagleRunner
from paceline.models.runner.runner import Span
from tests.fakes import tiny_model
from tests.heads import draft_config, draft_tensors, eagle_model
from tests.kernels.cases import needs_native

pytestmark = needs_native

TARGET = tiny_model()
CONFIG = draft_config(TARGET, "eagle")
LAYERS = tuple(CONFIG["capture"])


def runner(reduced: int | None = 24) -> EagleRunner:
    return EagleRunner(eagle_model(CONFIG, draft_tensors(CONFIG, reduced=reduced), TARGET), num_blocks=8, num_lanes=8)


def states(rows: int, width: int = 32) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


def spans() -> list[Span]:
    return [Span([1, 2], 0, list(range(18)), 0), Span([3], 0, [5, 4, 3], 0, positions=[2, 7, 9])]


@torch.inference_mode()
def test_a_pass_has_the_bits_of_one_call_per_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    head = runner()
    inner = {layer: states(21, 40)[:, :32] + layer for layer in LAYERS}
    wide = {layer: torch.nn.functional.pad(values, (0, 8))[:, :32] for layer, values in inner.items()}
    given = states(21)
    native = [head.forward(spans(), one) for one in (given, inner, wide)]
    stored = [values.clone() for values in head.cache[0]]
    monkeypatch.setattr(EagleModel, "native", lambda _model, _cache: None)
    parts = [head.forward(spans(), one) for one in (given, inner)]
    assert torch.equal(native[0], parts[0])
    assert torch.equal(native[1], parts[1])
    assert torch.equal(native[2], parts[1])
    assert all(torch.equal(a, b) for a, b in zip(stored, head.cache[0], strict=True))
    assert torch.equal(given, states(21))


def native_head(head: EagleRunner) -> EagleHead:
    native = head.model.native(head.cache)
    assert native is not None
    return native


def root(head: EagleRunner, number: int, **sampling: float) -> TreeRoot:
    blocks = [[1, 2], [3]][number]
    cached = [18, 3][number]
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]  # numbers only
    return TreeRoot([*blocks, *head.lane(number), *head.lane(number + 2)], cached, cached, 20, 12, 10, params, 7, True)


@torch.inference_mode()
def test_a_tree_does_not_depend_on_the_other_trees() -> None:
    head = runner()
    head.forward(spans(), states(21))
    roots = [root(head, 0), root(head, 1, temperature=0.8, top_p=0.9)]
    together = native_head(head).grow(states(2), roots, 4, 8)
    alone = [native_head(head).grow(states(2)[i : i + 1].contiguous(), [roots[i]], 4, 8)[0] for i in range(2)]
    assert together == alone
    assert all(len(tokens) > 3 and min(parents) == -1 for tokens, parents in together)


@torch.inference_mode()
def test_values_beyond_a_table_are_refused() -> None:
    head = runner()
    for span in (Span([1], 0, [40], 0), Span([1], 0, [-1], 0), Span([1], 0, [3], 0, positions=[1 << 20])):
        with pytest.raises(IndexError):
            head.forward([span], states(1))
