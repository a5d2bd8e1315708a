"""Requests that name no method get the faster one of two; the text does not depend on it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.request import SpeculationFlags
from paceline.core.sequence import Sequence as Generation
from paceline.engine.engine import Engine
from paceline.engine.hook import StepHook
from paceline.engine.hooks.method_assignment import DefaultMethodTrial
from paceline.speculation.drafts.drafts import DraftBatch
from paceline.speculation.proposer import ProposerTraits, SequenceProgress
from tests.exactness.suite import check_identical, mixed_requests
from tests.fakes import TINY, FakeProposer, draft_model, random_chain, request, run, tiny_engine, tiny_model

MODEL = tiny_model()
PROMPT = (5, 11, 2, 30, 7) * 3


@dataclass
class Timed:
    """A perfect draft that takes `seconds` a step, and may be lost."""

    clock: VirtualClock
    seconds: float
    inner: Any = field(default_factory=lambda: draft_model(MODEL))
    is_lost: bool = False

    @property
    def traits(self) -> ProposerTraits:
        return ProposerTraits(can_miss_steps=True, is_available=lambda: not self.is_lost)

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        self.inner.observe(batch)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        self.clock.advance(self.seconds)
        return self.inner.collect(sequence_ids, deadline)

    def close(self, sequence_ids: Sequence[int]) -> None:
        self.inner.close(sequence_ids)


class Methods(StepHook):
    """The method of every sequence at its end, and time that a pass takes."""

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.seen: list[str] = []
        self._clock = clock

    def after_pass(self, schedule: Any, drafts: Any, output: Any) -> None:
        if self._clock is not None:
            self._clock.advance(0.010)

    def sequence_finished(self, sequence: Generation) -> None:
        self.seen.append(sequence.method)


class Bed:
    """An engine with a pool and an in-engine draft (`fake`) that take these times."""

    def __init__(self, pool: float, model: float) -> None:
        self.clock = VirtualClock()
        self.methods = Methods(self.clock)
        self.pool, self.model = Timed(self.clock, pool), Timed(self.clock, model)
        self.engine = tiny_engine(
            MODEL, self.model, depth=1, clock=self.clock, hooks=[self.methods],
            more_proposers={"pool": self.pool}, default_methods=("pool", "fake"),
        )  # fmt: skip
        self._count = 0

    def generate(self, count: int, **speculation: object) -> list[str]:
        """The methods of `count` requests, one after the other."""
        self.methods.seen.clear()
        for _ in range(count):
            self._count += 1
            run(self.engine, [request(f"r{self._count}", PROMPT, speculation, temperature=0.0, max_tokens=60)])
            self.clock.advance(5.0)  # time without requests does not count
        return list(self.methods.seen)


def test_the_faster_method_is_used_shown_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bed = Bed(pool=0.010, model=0.002)
    with caplog.at_level(logging.INFO, logger="paceline.engine.hooks.method_assignment"):
        assert bed.engine.status.snapshot().flags.method == "pool"
        assert bed.generate(1) == ["pool"]
        bed.generate(9)
        assert bed.engine.status.snapshot().flags.method == "fake"
        assert bed.generate(20) == ["fake"] * 20
    (record,) = caplog.records
    assert record.getMessage() == (
        "requests that name no method now use fake: pool 100.0, fake 165.3 tokens per second of a sequence at a load of 1"
    )


def test_a_method_that_becomes_slow_is_left() -> None:
    bed = Bed(pool=0.002, model=0.010)
    bed.generate(12)
    assert bed.engine.status.snapshot().flags.method == "pool"
    bed.pool.seconds = 0.050
    bed.generate(16)
    assert bed.engine.status.snapshot().flags.method == "fake"


def test_a_request_or_a_flag_that_names_a_method_decides() -> None:
    bed = Bed(pool=0.002, model=0.010)
    assert bed.generate(2, method="fake") == ["fake"] * 2
    bed.engine.flags.apply(SpeculationFlags(method="fake"))
    assert bed.engine.status.snapshot().flags.method == "fake"
    assert bed.generate(8) == ["fake"] * 8
    assert bed.generate(1, method="pool") == ["pool"]
    bed.engine.flags.apply(SpeculationFlags())
    assert bed.engine.status.snapshot().flags.method == "pool"


def test_other_flags_keep_the_method_of_running_sequences() -> None:
    bed = Bed(pool=0.010, model=0.002)
    bed.generate(10)
    engine = bed.engine
    engine.add(request("r", PROMPT, max_tokens=60))
    engine.step()
    (sequence,) = engine.scheduler.running
    assert sequence.method == "fake"
    engine.flags.apply(SpeculationFlags(max_depth=1))
    assert sequence.method == "fake"
    engine.flags.apply(SpeculationFlags(method="pool"))
    assert sequence.method == "pool"
    engine.cancel("r")


def test_a_pool_without_workers_is_not_chosen() -> None:
    bed = Bed(pool=0.002, model=0.010)
    bed.generate(12)
    bed.pool.is_lost = True
    assert bed.generate(4) == ["fake"] * 4
    bed.pool.is_lost = False
    assert bed.generate(4) == ["pool"] * 4


def test_sequences_that_start_in_one_step_share_a_method() -> None:
    bed = Bed(pool=0.010, model=0.002)
    for batch in range(12):
        bed.methods.seen.clear()
        run(bed.engine, [request(f"{batch}-{i}", PROMPT[: 4 + i], max_tokens=40, seed=i) for i in range(3)])
        assert len(set(bed.methods.seen)) == 1
    assert bed.engine.status.snapshot().flags.method == "fake"


def test_prompts_and_mixed_batches_are_not_measured() -> None:
    bed = Bed(pool=0.002, model=0.002)
    observed: list[tuple[Any, ...]] = []
    bed.engine.hooks.get(DefaultMethodTrial).default.observe = lambda *step: observed.append(step)  # type: ignore[method-assign]
    run(bed.engine, [request("a", PROMPT, {"method": "fake"}, max_tokens=9), request("b", PROMPT, max_tokens=9)])
    assert observed == []
    bed.generate(1)
    assert {step[0] for step in observed} == {"pool"}
    assert {step[1] for step in observed} == {1}
    assert sum(step[2] for step in observed) == 59  # the first token is that of the prompt's step
    assert {round(step[3], 4) for step in observed} == {0.012, 0.010}  # the last token has no draft


def alternating(methods: Methods, **options: Any) -> Engine:
    """Every step that starts sequences gives them the other method, so that batches mix both."""
    engine = tiny_engine(
        MODEL, draft_model(tiny_model(perturb=0.1)), depth=4, hooks=[methods],
        more_proposers={"pool": random_chain(TINY.vocab_size)}, default_methods=("pool", "fake"), **options,
    )  # fmt: skip
    count = 0

    def assign(*_: object) -> str:
        nonlocal count
        count += 1
        return ("pool", "fake")[count % 2]

    engine.hooks.get(DefaultMethodTrial).default.assign = assign  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("arrivals", [1, 3, None])
def test_the_text_does_not_depend_on_the_choice(arrivals: int | None) -> None:
    methods = Methods()
    result = check_identical(MODEL, alternating(methods), mixed_requests(18, TINY.vocab_size), arrivals=arrivals)
    assert set(methods.seen) == ({"pool", "fake"} if arrivals else {"fake"})
    assert 0 < result.accepted < result.drafted


def test_the_text_stays_the_same_while_the_rule_tries_both() -> None:
    methods = Methods()
    perfect = draft_model(MODEL)
    engine = tiny_engine(
        MODEL, perfect, depth=2, hooks=[methods], more_proposers={"pool": random_chain(TINY.vocab_size)},
        default_methods=("pool", "fake"),
    )  # fmt: skip
    for seed in range(24):
        check_identical(MODEL, engine, mixed_requests(4, TINY.vocab_size, seed, max_tokens=60))
    assert set(methods.seen) == {"pool", "fake"}


def test_without_a_second_method_nothing_is_chosen() -> None:
    engine = tiny_engine(MODEL, FakeProposer(lambda progress: ([], [])))
    assert engine.assignment is None
    assert engine.status.snapshot().flags.method == "fake"
