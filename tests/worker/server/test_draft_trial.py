"""A planted better draft is kept, a worse one rolled back, and no text changes at any time."""

from collections.abc import Callable

import pytest
import torch

from paceline.core.request import Request
from paceline.core.traffic import TRIAL_LABEL
from paceline.engine.engine import Engine
from paceline.models.decoder.forward import DecoderModel
from paceline.models.drafts.exchanges import AnyDraft, own_tensors
from paceline.policy.pairing.draft_trial import TrialVerdict
from paceline.speculation.proposer import Proposer
from paceline.worker.server.draft_trial import MIN_PERIODS, AlternatingDraftTrial
from tests.fakes import StepClock, draft_model, request, run, tiny_engine, tiny_model
from tests.heads import distilled, eagle, medusa, tiny_distilled, tiny_eagle, tiny_medusa

TARGET = tiny_model()
PERIOD = 0.016
"""About 8 steps: the clock of the trial moves by a millisecond with each reading."""


def good() -> DecoderModel:
    return tiny_model()


def bad() -> DecoderModel:
    return tiny_model(seed=5)


def requests(count: int, tokens: int = 12) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 40, (count, 6), generator=generator).tolist()
    return [
        request(f"r{i}", prompt, max_tokens=tokens, temperature=0.8 * (i % 2), seed=i)
        for i, prompt in enumerate(prompts)
    ]


def trial(
    proposer: Proposer, candidate: AnyDraft, period: float = PERIOD, seconds: float = 60.0
) -> tuple[Engine, AlternatingDraftTrial]:
    hook = AlternatingDraftTrial(StepClock(), seed=0)
    engine = tiny_engine(TARGET, proposer, hooks=(hook,))
    hook.begin(candidate, seconds, period)
    return engine, hook


def serve(engine: Engine, hook: AlternatingDraftTrial, asked: list[Request]) -> dict[str, list[int]]:
    """A few requests at a time until the trial ends, then the rest of those that run."""
    tokens: dict[str, list[int]] = {one.id: [] for one in asked}
    pending = list(asked)
    while engine.has_work or (hook.is_running and pending):
        while hook.is_running and pending and len(engine.scheduler.running) + len(engine.scheduler.waiting) < 4:
            engine.add(pending.pop(0))
        for output in engine.step():
            tokens[output.request_id].extend(output.tokens)
    return {name: text for name, text in tokens.items() if text}


def same(one: AnyDraft, other: AnyDraft) -> bool:
    its = own_tensors(other)
    return all(torch.equal(tensor, its[name]) for name, tensor in own_tensors(one).items())


@pytest.mark.parametrize(
    ("current", "candidate", "verdict"), [(bad, good, TrialVerdict.KEEP), (good, bad, TrialVerdict.ROLL_BACK)]
)
def test_the_better_draft_stays_and_texts_are_those_of_plain_decoding(
    current: Callable[[], DecoderModel], candidate: Callable[[], DecoderModel], verdict: TrialVerdict
) -> None:
    proposer = draft_model(current())
    engine, hook = trial(proposer, candidate())
    asked = requests(600)
    texts = serve(engine, hook, asked)
    assert hook.decision.verdict is verdict
    assert hook.decision.gain is not None
    assert (hook.decision.gain > 0.5) is (verdict is TrialVerdict.KEEP)
    assert "periods" in hook.decision.reason
    of_current, of_candidate = hook.counts
    assert min(of_current.periods, of_candidate.periods) >= MIN_PERIODS
    assert min(of_current.sequences, of_candidate.sequences) > MIN_PERIODS
    assert hook.weights is not None
    assert not hook.weights.has_spare
    assert same(hook.weights.model, good())
    plain = run(tiny_engine(TARGET), [one for one in asked if one.id in texts])
    assert texts == {name: tokens for (name, _), tokens in plain.tokens.items()}
    assert len(texts) > 20


@pytest.mark.parametrize(
    ("proposer", "candidate"),
    [
        (eagle(TARGET), tiny_eagle(TARGET, seed=3)),
        (medusa(TARGET), tiny_medusa(TARGET, seed=3)),
        (distilled(TARGET), tiny_distilled(TARGET, seed=3)),
    ],
)
def test_sequences_in_flight_keep_their_text_through_many_exchanges(proposer: Proposer, candidate: AnyDraft) -> None:
    """Periods of about two steps: every sequence is drafted for by both drafts."""
    engine, hook = trial(proposer, candidate, period=0.004)
    asked = requests(10, tokens=40)
    assert run(engine, asked, arrivals=2).tokens == run(tiny_engine(TARGET), asked).tokens
    assert hook.is_running


def test_only_sequences_that_begin_in_a_period_count() -> None:
    hook = AlternatingDraftTrial(StepClock(), seed=0)
    engine = tiny_engine(TARGET, draft_model(good()), hooks=(hook,))
    engine.add(requests(1, tokens=100)[0])
    for _ in range(3):
        engine.step()
    hook.begin(bad(), 60.0, 10.0)
    while engine.has_work:  # it began before the trial
        engine.step()
    assert hook._period.tokens == 0
    engine.add(request("new", [1, 2, 3], max_tokens=9, temperature=0.0))
    while engine.has_work:
        engine.step()
    assert hook._period.tokens == 8, "the first token ends the prompt's step"
    assert hook._period.seconds > 0.0
    engine.add(request("plain", [1, 2, 3], {"enabled": False}, max_tokens=9))
    while engine.has_work:
        engine.step()
    assert hook._period.tokens == 8, "requests without drafts do not count"


def test_a_trial_without_traffic_ends_in_time() -> None:
    _, hook = trial(draft_model(good()), bad(), seconds=0.02)
    while not hook.is_overdue:
        assert hook.is_running
    hook.expire()
    assert not hook.is_running
    assert hook.decision.verdict is TrialVerdict.ROLL_BACK
    assert "only 0 periods against 0" in hook.decision.reason
    assert hook.weights is not None
    assert same(hook.weights.model, good())


def test_stop_rolls_back_whatever_is_in_use() -> None:
    for steps in (1, 30, 60):
        engine, hook = trial(draft_model(good()), bad())
        for one in requests(8):
            engine.add(one)
        for _ in range(steps):
            engine.step()
        hook.stop("the trial was interrupted")
        assert (hook.decision.verdict, hook.decision.reason) == (TrialVerdict.ROLL_BACK, "the trial was interrupted")
        assert hook.weights is not None
        assert same(hook.weights.model, good())


def test_acceptance_is_learned_apart_and_adopted_by_a_draft_that_is_kept() -> None:
    engine, hook = trial(draft_model(bad()), good())
    serve(engine, hook, requests(600))
    assert hook.decision.verdict is TrialVerdict.KEEP
    alphas = {status.category: status.alphas[0] for status in engine.speculator.traffic.report()}
    assert alphas["default"] < 0.5 < alphas[f"default{TRIAL_LABEL}"]
    before = engine.speculator.traffic.report()
    run(engine, requests(4))
    after = {status.category: status.tested for status in engine.speculator.traffic.report()}
    assert after[f"default{TRIAL_LABEL}"] == next(
        one.tested for one in before if one.category == f"default{TRIAL_LABEL}"
    )


def test_an_engine_without_a_draft_has_nothing_to_exchange() -> None:
    hook = AlternatingDraftTrial()
    tiny_engine(TARGET, hooks=(hook,))
    assert hook.weights is None
    assert hook.method == ""
