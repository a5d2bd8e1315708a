"""A change of the traffic in an engine: logged once, counted, and the depth policy restarts."""

import logging

import pytest

from paceline.core.traffic import TrafficClass
from paceline.policy.depth.goodput import GoodputDepth
from tests.engine.harness import (
    GREEDY,
    PROMPT,
    assert_nothing_held,
    engine_of,
    oracle,
    outputs_of,
    plain_tokens,
    request,
)

TOKENS = 24
TEXT = plain_tokens(max_tokens=TOKENS, **GREEDY)
WRONG = [i for i in range(TOKENS) if i % 3]


class Restarts(GoodputDepth):
    """Always drafts two tokens, and records restarts."""

    def __init__(self) -> None:
        super().__init__(8)
        self.restarts: list[tuple[TrafficClass, float]] = []

    def restart(self, traffic: TrafficClass, alpha: float) -> None:
        super().restart(traffic, alpha)
        self.restarts.append((traffic, alpha))

    def decide(self, batch):  # type: ignore[no-untyped-def]
        return [min(2, candidate.max_depth) for candidate in batch]


def test_a_change_is_logged_once_and_depth_restarts(caplog: pytest.LogCaptureFixture) -> None:
    right, poor = oracle(TEXT), oracle(TEXT, wrong=WRONG)
    depth = Restarts()
    engine = engine_of(right, depth=depth)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        for number in range(40):
            outputs_of(engine, request(f"right-{number}", PROMPT, max_tokens=TOKENS, **GREEDY))
        assert caplog.messages == []
        assert engine.status.snapshot().traffic[0].drifts == 0
        right.guess = poor.guess
        for number in range(60):
            outputs_of(engine, request(f"poor-{number}", PROMPT, max_tokens=TOKENS, **GREEDY))
    (message,) = caplog.messages
    assert message.startswith("acceptance of fake drafts for 'default' changed from 1.00 to 0.")
    (record,) = caplog.records
    assert (record.category, record.method) == ("default", "fake")  # type: ignore[attr-defined]
    (report,) = engine.status.snapshot().traffic
    assert report.drifts == 1
    assert report.drift is not None
    assert report.drift[0] == 1.0
    assert depth.restarts == [(TrafficClass("fake", "default"), report.drift[1])]
    assert engine.speculator.traffic.drift._open == {}
    assert_nothing_held(engine)


def test_tested_and_accepted_drafts_are_counted() -> None:
    engine = engine_of(oracle(TEXT, wrong=[5]), depth=2)
    outputs = outputs_of(engine, request("r", PROMPT, max_tokens=TOKENS, **GREEDY))
    (report,) = engine.status.snapshot().traffic
    assert report.accepted == sum(output.accepted for output in outputs)
    assert report.tested == report.accepted + 1
    seconds = engine.status.snapshot().seconds
    assert seconds["verify"] > 0.0
    assert seconds["prompt"] > 0.0
