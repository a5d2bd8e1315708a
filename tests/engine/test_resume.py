"""A request that goes on from committed ids says exactly what it would have said, and nothing twice."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import InvalidRequest
from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.engine.engine import Engine
from tests.engine.harness import (
    GREEDY,
    PROMPT,
    SAMPLED,
    assert_nothing_held,
    engine_of,
    oracle,
    outputs_of,
    plain_tokens,
    request,
    text_of,
    tokens_of,
)

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}}, "required": ["a"]}


def interrupted(make: Any, one: Request, steps: int) -> tuple[list[StepOutput], list[StepOutput]]:
    """What one engine says in `steps` steps, and what another says that goes on from the ids of the first."""
    first: Engine = make()
    first.add(one)
    before = [output for _ in range(steps) for output in first.step()]
    first.cancel(one.id)
    second: Engine = make()
    return before, outputs_of(second, resumed(one, before))


def resumed(one: Request, before: Sequence[StepOutput]) -> Request:
    ended = {output.choice for output in before if output.finish_reason is not None}
    return replace(
        one,
        committed=tuple(
            None if choice in ended else tuple(tokens_of(before, one.id, choice)) for choice in range(one.sampling.n)
        ),
    )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, {**SAMPLED, **PENALTIES}, {**GREEDY, **PENALTIES}])
@pytest.mark.parametrize("steps", [1, 5, 17])
def test_tokens_are_those_of_an_undisturbed_run(sampling: dict[str, Any], steps: int) -> None:
    one = request("r", PROMPT, max_tokens=24, **sampling)
    before, after = interrupted(engine_of, one, steps)
    expected = plain_tokens(max_tokens=24, **sampling)
    assert tokens_of(before) == expected[:steps]
    assert tokens_of(after) == expected[steps:]
    assert after[-1].finish_reason is not None


def test_drafts_ride_on_after_the_interruption() -> None:
    expected = plain_tokens(max_tokens=24, **SAMPLED)
    one = request("r", PROMPT, max_tokens=24, **SAMPLED)
    before, after = interrupted(lambda: engine_of(oracle(expected)), one, 3)
    assert tokens_of([*before, *after]) == expected
    assert sum(output.accepted for output in after) > 0


def test_text_and_stop_strings_span_the_interruption() -> None:
    one = request("r", PROMPT, max_tokens=40, **SAMPLED)
    whole = text_of(outputs_of(engine_of(tokenizer=True), one), one)
    stop = whole[9:13]  # the first ends between its second and third character
    one = request("r", PROMPT, max_tokens=40, stop=(stop,), **SAMPLED)
    undisturbed = outputs_of(engine_of(tokenizer=True), one)
    for steps in range(1, len(undisturbed)):
        before, after = interrupted(lambda: engine_of(tokenizer=True), one, steps)
        assert text_of([*before, *after], one) == text_of(undisturbed, one) == whole[: whole.index(stop)]


def test_a_grammar_goes_on_where_it_was() -> None:
    one = request("r", PROMPT, max_tokens=60, json_schema=SCHEMA, **SAMPLED)
    undisturbed = text_of(outputs_of(engine_of(tokenizer=True), one), one)
    before, after = interrupted(lambda: engine_of(tokenizer=True), one, 6)
    assert text_of([*before, *after], one) == undisturbed


def test_a_grammar_that_the_ids_contradict_is_refused_and_nothing_is_kept() -> None:
    engine = engine_of(tokenizer=True)
    with pytest.raises(InvalidRequest, match="schema"):
        engine.add(replace(request("r", PROMPT, json_schema=SCHEMA), committed=((0, 0, 0),)))
    assert_nothing_held(engine)


def test_only_unfinished_choices_run_again() -> None:
    one = request("r", PROMPT, max_tokens=12, n=3, **SAMPLED)
    whole = outputs_of(engine_of(), one)
    committed = (tuple(tokens_of(whole, choice=0)[:4]), None, tuple(tokens_of(whole, choice=2)[:7]))
    after = outputs_of(engine_of(), replace(one, committed=committed))
    assert {output.choice for output in after} == {0, 2}
    assert tokens_of(after, choice=0) == tokens_of(whole, choice=0)[4:]
    assert tokens_of(after, choice=2) == tokens_of(whole, choice=2)[7:]


def test_cached_tokens_stay_prompt_tokens() -> None:
    engine = engine_of()
    one = request("r", tuple(range(20)), max_tokens=40, **GREEDY)
    whole = outputs_of(engine, one)
    again = outputs_of(engine, replace(one, committed=(tuple(tokens_of(whole)[:30]),)))
    assert again[0].num_cached == 20


@pytest.mark.parametrize(
    ("committed", "message"),
    [
        (((1,), (2,)), "one entry for each of 1"),
        ((None,), "one of them unfinished"),
        (((1, 4000),), "outside the vocabulary"),
        ((tuple(range(24)),), "nothing is left"),
    ],
)
def test_what_cannot_be_continued_is_refused(committed: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        engine_of().validate(replace(request("r", PROMPT, max_tokens=24), committed=committed))
    assert error.value.field == "committed"
