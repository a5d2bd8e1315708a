"""The graph executor drafts with the new weights after an exchange: captured graphs read the tensors that were copied to."""

import pytest

from paceline.engine.engine import Engine
from paceline.models.drafts.exchanges import AnyDraft, exchange_in_place
from paceline.models.runner.gpu.runner import GpuRunner
from paceline.speculation import draft_weights
from paceline.speculation.proposer import Proposer
from paceline.worker.server.draft_trial import AlternatingDraftTrial
from tests.engine.graph.test_tree_steps import DEVICE, SAMPLINGS, SMALL, check, requests
from tests.exactness.suite import plain_text
from tests.fakes import StepClock, draft_model, run, tiny_engine, tiny_model
from tests.heads import eagle, tiny_eagle

pytestmark = pytest.mark.slow  # interpreted kernels; tests/models/heads/test_exchange.py covers the copies
ASKED = requests(SAMPLINGS[1:2], max_tokens=12)


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange as on a GPU, also where kernels are interpreted."""
    monkeypatch.setattr(draft_weights, "exchange", exchange_in_place)


def engine_of(proposer: Proposer, *hooks: AlternatingDraftTrial) -> Engine:
    model = tiny_model(config=SMALL, device=DEVICE)
    few = {"max_num_seqs": 1, "max_batched_tokens": 12, "max_model_len": 32}
    return tiny_engine(
        model, proposer, 7, runner_kind=GpuRunner, graph_depth=7, hooks=hooks, prefix_caching=False, **few
    )  # type: ignore[arg-type]


def made(kind: str, seed: int) -> tuple[Proposer, AnyDraft]:
    """A proposer with the draft of a seed, and that draft alone."""
    target = tiny_model(config=SMALL, device=DEVICE)
    if kind == "eagle":
        return eagle(target, seed=seed), tiny_eagle(target, seed=seed)
    draft = tiny_model(seed=0, perturb=0.02 * seed, config=SMALL, device=DEVICE)
    other = tiny_model(seed=0, perturb=0.02 * seed, config=SMALL, device=DEVICE)
    return draft_model(draft, runner=GpuRunner), other


@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
def test_captured_steps_use_the_new_weights(kind: str) -> None:
    proposer, _ = made(kind, 0)
    engine = engine_of(proposer)
    before = run(engine, ASKED)  # captures
    assert engine.graph is not None
    assert engine.graph.num_steps > 0
    weights = proposer.traits.weights
    assert weights is not None
    weights.set_spare(made(kind, 4)[1])
    weights.exchange()
    after = run(engine, ASKED)
    fresh = run(engine_of(made(kind, 4)[0]), ASKED)
    assert (after.drafted, after.accepted) == (fresh.drafted, fresh.accepted)
    weights.exchange()
    again = run(engine, ASKED)
    assert (again.drafted, again.accepted) == (before.drafted, before.accepted)
    assert (after.drafted, after.accepted) != (before.drafted, before.accepted)


def test_a_trial_within_graph_steps_keeps_every_text() -> None:
    hook = AlternatingDraftTrial(StepClock(), seed=0)
    proposer, _ = made("eagle", 0)
    engine = engine_of(proposer, hook)
    hook.begin(made("eagle", 4)[1], 600.0, 0.006)
    asked = requests(SAMPLINGS[:3], max_tokens=9)
    check(engine, asked, plain_text(tiny_model(config=SMALL, device=DEVICE), asked))
    assert hook.is_running
