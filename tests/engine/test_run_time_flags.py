"""Flags hold from the next step on, for what is running too, and never change the text."""

from typing import Any

import pytest

from paceline.core.errors import InvalidRequest
from paceline.core.output import StepOutput
from paceline.core.request import Request, SpeculationFlags
from paceline.engine.engine import Engine
from paceline.engine.speculator import Speculator
from paceline.engine.start.build import engine_of_parts
from paceline.requests.validator import Limits, RequestValidator
from paceline.speculation.proposers.suffix import NgramProposer
from tests.fakes import TINY, draft_model, request, run, tiny_engine, tiny_model

MODEL = tiny_model()
PROMPT = (5, 11, 2, 30, 7) * 5


def two_methods(max_depth: int = 4, enabled: bool = True) -> Engine:
    """Drafts with a perfect model or by prompt lookup."""
    engine = tiny_engine(MODEL, depth=max_depth)
    proposers = {"model": draft_model(MODEL), "ngram": NgramProposer()}
    validator = RequestValidator(Limits(TINY.vocab_size, 256, max_depth), "coupled", "model", proposers)
    speculator = Speculator(
        proposers,
        engine.speculator.depth,
        engine.speculator.traffic.breaker,
        validator,
        engine.clock,
        TINY.vocab_size,
        enabled,
    )
    return engine_of_parts(engine.runner, engine.scheduler, speculator, validator, clock=engine.clock)


def asked(name: str = "r", **speculation: object) -> Request:
    return request(name, PROMPT, speculation, max_tokens=60, seed=1)


def steps(engine: Engine, count: int) -> list[StepOutput]:
    return [output for _ in range(count) for output in engine.step()]


def depths(engine: Engine, count: int = 3) -> dict[str, int]:
    """The deepest draft of each request over a few steps."""
    deepest: dict[str, int] = {}
    for output in steps(engine, count):
        deepest[output.request_id] = max(deepest.get(output.request_id, 0), output.drafted)
    return deepest


def test_depth_is_bounded_at_once_and_a_request_may_ask_for_less() -> None:
    engine = two_methods()
    engine.add(asked("all"))
    engine.add(asked("less", max_depth=1))
    steps(engine, 1)
    assert depths(engine) == {"all": 4, "less": 1}
    engine.flags.apply(SpeculationFlags(max_depth=2))
    assert depths(engine) == {"all": 2, "less": 1}
    engine.flags.apply(SpeculationFlags(max_depth=0))
    assert depths(engine) == {"all": 0, "less": 0}
    engine.flags.apply(SpeculationFlags())
    assert depths(engine) == {"all": 4, "less": 1}


def test_a_flag_cannot_raise_the_depth_over_the_configuration() -> None:
    engine = two_methods(max_depth=3)
    engine.flags.apply(SpeculationFlags(max_depth=20))
    engine.add(asked())
    assert depths(engine, 4) == {"r": 3}
    assert engine.status.snapshot().flags.max_depth == 3


def test_the_switch_goes_both_ways_and_back_to_the_configuration() -> None:
    engine = two_methods(enabled=False)
    engine.add(asked())
    assert depths(engine) == {"r": 0}
    engine.flags.apply(SpeculationFlags(enabled=True))
    assert depths(engine) == {"r": 4}
    engine.flags.apply(SpeculationFlags(enabled=None))
    assert depths(engine) == {"r": 0}
    assert engine.status.snapshot().flags.enabled is False


def test_a_request_that_wants_none_gets_none() -> None:
    engine = two_methods()
    engine.add(asked(enabled=False))
    engine.flags.apply(SpeculationFlags(enabled=True, max_depth=4))
    assert depths(engine, 5) == {"r": 0}


def test_the_method_changes_under_running_and_waiting_requests_that_named_none() -> None:
    engine = two_methods()
    engine.scheduler.max_num_seqs = 2
    for name, wish in (("free", {}), ("own", {"method": "model"}), ("waits", {})):
        engine.add(asked(name, **wish))
    steps(engine, 2)
    free, own = engine.scheduler.running
    assert (free.method, own.method) == ("model", "model")
    draft: Any = engine.speculator.proposers["model"]
    assert len(draft._sequences) == 2
    engine.flags.apply(SpeculationFlags(method="ngram"))
    assert (free.method, own.method, engine.scheduler.waiting[0].method) == ("ngram", "model", "ngram")
    assert list(draft._sequences) == [own.id]  # what it held for the other is free
    assert engine.status.snapshot().flags.method == "ngram"
    steps(engine, 3)
    assert len(draft._sequences) == 1
    engine.flags.apply(SpeculationFlags())
    assert free.method == "model"
    while engine.has_work:
        engine.step()
    assert (draft._sequences, draft.num_free_blocks) == ({}, draft.drafter.runner.num_blocks)


def test_the_text_stays_the_same_whatever_is_flagged() -> None:
    requests = [asked("a"), asked("b", method="ngram"), request("c", PROMPT[:7], temperature=0.0, max_tokens=60)]
    expected = run(two_methods(enabled=False), requests).tokens
    engine = two_methods()
    for one in requests:
        engine.add(one)
    cycle = [
        SpeculationFlags(method="ngram"),
        SpeculationFlags(max_depth=1),
        SpeculationFlags(enabled=False, method="ngram"),
        SpeculationFlags(method="model", max_depth=3),
    ]
    tokens: dict[tuple[str, int], list[int]] = {key: [] for key in expected}
    step = drafted = 0
    while engine.has_work:
        engine.flags.apply(cycle[step % len(cycle)])
        for output in engine.step():
            tokens[output.request_id, output.choice] += output.tokens
            drafted += output.drafted
        step += 1
    assert tokens == expected
    assert drafted > 0


def test_a_method_that_is_not_loaded_is_refused_and_nothing_changes() -> None:
    engine = two_methods()
    with pytest.raises(InvalidRequest, match="'medusa' is not loaded here; choose from: model, ngram") as error:
        engine.flags.apply(SpeculationFlags(enabled=False, method="medusa"))
    assert error.value.field == "method"
    assert engine.status.snapshot().flags == SpeculationFlags(True, "model", 4)
