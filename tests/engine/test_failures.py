"""A request that fails in the engine ends alone; the others have the same text as without it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.core.errors import EngineClosed, GenerationFailed, InvalidRequest, PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.core.sequence import Sequence as EngineSequence
from paceline.engine.failures import owner_error
from paceline.engine.hook import StepHook
from paceline.engine.loop import EngineLoop
from paceline.engine.start.build import engine_of_parts
from paceline.models.runner.runner import ModelRunner, Span
from paceline.requests.grammar import Grammar
from tests.engine.harness import MODEL, PROMPT, engine_of, request
from tests.engine.test_loop import Inbox, assert_idle, on_engine_thread, running
from tests.exactness.suite import plain_text
from tests.fakes import TINY, draft_model, random_chain, tiny_engine, tiny_model

MARK = (39, 39, 39, 39)
"""End of the poisoned prompt."""
GOOD = [request(f"good{i}", PROMPT[: 2 + i % 3], max_tokens=16, seed=i) for i in range(7)]
POISON = request("poison", (*PROMPT, *MARK), max_tokens=16, seed=9)
WIDE = {"type": "object", "properties": {f"{chr(97 + i % 26)}{i}": {"type": "string"} for i in range(500)}}
"""A schema that llguidance accepts and whose second token exceeds the limits of its parser."""


class PoisonedRunner(ModelRunner):
    """Fails for a pass with the poisoned prompt."""

    def forward(self, spans: Sequence[Span], *arguments: Any) -> Any:
        if any(tuple(span.tokens)[-4:] == MARK for span in spans):
            raise RuntimeError("secret of the poisoned request")
        return super().forward(spans, *arguments)


def outcomes(loop: EngineLoop, requests: Sequence[Request]) -> dict[str, Any]:
    """The tokens of each request, or its error."""
    inboxes = {one.id: Inbox() for one in requests}
    for one in requests:
        loop.submit(one, inboxes[one.id])
    results: dict[str, Any] = {}
    for name, inbox in inboxes.items():
        try:
            results[name] = inbox.tokens()[0]
        except PacelineError as error:
            results[name] = error
    return results


def check_others(loop: EngineLoop, poison: Request, kind: type[PacelineError], *others: Request) -> PacelineError:
    """Runs the poison among good requests; returns its error."""
    results = outcomes(loop, [*GOOD[:3], poison, *GOOD[3:]])
    error = results.pop(poison.id)
    assert type(error) is kind
    assert {(name, 0): tokens for name, tokens in results.items()} == plain_text(MODEL, GOOD)
    on_engine_thread(loop, lambda: assert_idle(loop))
    return error


@pytest.mark.parametrize("is_drafted", [False, True])
def test_a_request_that_makes_the_pass_fail_ends_alone(is_drafted: bool) -> None:
    proposer = draft_model(tiny_model(perturb=0.2)) if is_drafted else None
    with running(tiny_engine(MODEL, proposer, runner_kind=PoisonedRunner, max_num_seqs=8)) as loop:
        error = check_others(loop, POISON, GenerationFailed)
        assert "secret" not in str(error)
        assert loop.is_running


def test_a_lone_request_that_makes_the_pass_fail_does_not_end_the_engine() -> None:
    with running(tiny_engine(MODEL, runner_kind=PoisonedRunner)) as loop:
        assert isinstance(outcomes(loop, [POISON])[POISON.id], GenerationFailed)
        assert outcomes(loop, GOOD[:1])[GOOD[0].id] == plain_text(MODEL, GOOD[:1])[GOOD[0].id, 0]


def test_a_poisoned_request_that_waits_for_a_place_ends_alone_too() -> None:
    with running(tiny_engine(MODEL, runner_kind=PoisonedRunner, max_num_seqs=2)) as loop:
        check_others(loop, POISON, GenerationFailed)


def test_a_device_that_fails_for_every_request_ends_the_engine() -> None:
    """Another worker continues the requests; no request is blamed."""
    engine = tiny_engine(MODEL)

    def failing(*arguments: Any) -> Any:
        raise RuntimeError("the device fell off")

    engine.runner.forward = failing  # type: ignore[method-assign]
    with running(engine) as loop:
        results = outcomes(loop, [*GOOD[:3], POISON])
        assert {type(error) for error in results.values()} == {EngineClosed}
        assert not any("fell off" in str(error) for error in results.values())


def test_a_failure_that_passes_ends_no_request() -> None:
    engine = tiny_engine(MODEL)
    forward, passes = engine.runner.forward, []

    def failing(*arguments: Any) -> Any:
        passes.append(1)
        if len(passes) % 5 == 0:
            raise RuntimeError("out of memory")
        return forward(*arguments)

    engine.runner.forward = failing  # type: ignore[method-assign]
    with running(engine) as loop:
        results = outcomes(loop, GOOD)
        assert {(name, 0): tokens for name, tokens in results.items()} == plain_text(MODEL, GOOD)


@pytest.mark.parametrize("is_drafted", [False, True])
def test_a_schema_beyond_the_limits_of_llguidance_ends_its_own_request(is_drafted: bool) -> None:
    proposer = random_chain(TINY.vocab_size) if is_drafted else None
    poison = request("poison", PROMPT, max_tokens=40, json_schema=WIDE)
    with running(engine_of(proposer, tokenizer=True)) as loop:
        error = check_others_with_text(loop, poison)
        assert "too complex" in str(error)


def check_others_with_text(loop: EngineLoop, poison: Request) -> PacelineError:
    results = outcomes(loop, [*GOOD[:3], poison, *GOOD[3:]])
    error = results.pop(poison.id)
    assert type(error) is InvalidRequest
    with running(engine_of(tokenizer=True)) as plain:
        assert results == outcomes(plain, GOOD)
    on_engine_thread(loop, lambda: assert_idle(loop))
    return error


def test_all_choices_of_a_failed_request_end() -> None:
    poison = request("poison", (*PROMPT, *MARK), max_tokens=16, n=3)
    with running(tiny_engine(MODEL, runner_kind=PoisonedRunner)) as loop:
        inbox = Inbox(choices=3)
        loop.submit(poison, inbox)
        with pytest.raises(GenerationFailed):
            inbox.tokens()
        assert inbox.events.empty()
        on_engine_thread(loop, lambda: assert_idle(loop))


class FailingHook(StepHook):
    """Raises in one method, for the poisoned request if the method has a sequence."""

    def __init__(self, where: str) -> None:
        setattr(self, where, self._fail)

    def _fail(self, *arguments: Any) -> None:
        if not arguments or not isinstance(arguments[0], EngineSequence) or arguments[0].request_id == POISON.id:
            raise ValueError("secret of a hook")


def test_a_hook_that_fails_for_a_new_sequence_ends_it() -> None:
    engine = tiny_engine(MODEL, hooks=[FailingHook("sequence_added")])
    with running(engine) as loop:
        check_others(loop, POISON, GenerationFailed)


@pytest.mark.parametrize("where", ["sequence_finished", "committed", "after_step", "request_cancelled"])
def test_a_hook_that_fails_after_the_commit_loses_no_token(where: str) -> None:
    engine = tiny_engine(MODEL, random_chain(TINY.vocab_size), hooks=[FailingHook(where)])
    with running(engine) as loop:
        results = outcomes(loop, [*GOOD, POISON])
        expected = plain_text(MODEL, [*GOOD, POISON])
        assert {(name, 0): tokens for name, tokens in results.items()} == expected


def test_a_failure_while_text_is_made_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as loop:
        append: Callable[..., StepOutput] = loop.engine.requests.output.append

        def failing(sequence: EngineSequence, *arguments: Any) -> StepOutput:
            if sequence.request_id == POISON.id and sequence.num_output >= 5:
                raise KeyError("secret of the tokenizer")
            return append(sequence, *arguments)

        monkeypatch.setattr(loop.engine.requests.output, "append", failing)
        assert "secret" not in str(check_others(loop, POISON, GenerationFailed))


def test_a_panic_of_a_rust_library_is_a_failure_of_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(self: Grammar, *arguments: Any) -> Any:
        raise PanicException("index out of bounds")

    with running(engine_of(tokenizer=True)) as loop:
        monkeypatch.setattr(Grammar, "start", panic)
        inbox, poison = Inbox(), request("poison", PROMPT, json_schema={"type": "object"})
        loop.submit(poison, inbox)
        assert isinstance(inbox.next(), GenerationFailed)
        assert outcomes(loop, GOOD[:1])[GOOD[0].id]


def test_a_typed_error_reaches_the_owner_as_it_is() -> None:
    error = InvalidRequest("no", field="n")
    assert owner_error(error) is error


def test_a_poisoned_request_in_graph_steps_ends_alone() -> None:
    built = tiny_engine(MODEL, runner_kind=PoisonedRunner)
    calls: list[str] = []

    class Graph:
        """What the engine uses of a graph executor whose steps fail."""

        num_inflight, is_loaded, seconds_to_spare = 0, False, 0.0

        def schedule(self, can_prefill: bool) -> Any:
            calls.append("schedule")
            raise RuntimeError("a captured step failed")

        def release(self) -> None:
            calls.append("release")

    graph: Any = Graph()
    engine = engine_of_parts(
        built.runner, built.scheduler, built.speculator, built.validator, clock=built.clock, graph=graph
    )
    with running(engine) as loop:
        check_others(loop, POISON, GenerationFailed)
    assert calls[:2] == ["schedule", "release"]
