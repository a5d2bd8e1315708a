"""A request that brings its draft: one round, which commits what plain decoding would."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import InvalidRequest
from paceline.core.output import StepOutput
from paceline.core.request import MAX_DEPTH
from paceline.core.sequence import FinishReason
from paceline.engine.engine import Engine
from tests.engine.harness import GREEDY, LONG, PROMPT, SAMPLED, engine_of, outputs_of, plain_tokens, request

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}


def verify(
    engine: Engine, output: Sequence[int], draft: Sequence[int], prompt: Any = PROMPT, **sampling: Any
) -> StepOutput:
    one = request("r", prompt, speculation={"enabled": False}, **sampling)
    committed = (tuple(output),) if output else ()
    (found,) = outputs_of(engine, replace(one, committed=committed, draft=tuple(draft)))
    return found


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, {**SAMPLED, **PENALTIES}, {**SAMPLED, "top_k": 5, "top_p": 0.9}])
def test_rounds_commit_the_tokens_of_plain_decoding(sampling: dict[str, Any]) -> None:
    text = plain_tokens(max_tokens=24, **sampling)
    engine, tokens, rounds = engine_of(), [], 0
    while len(tokens) < len(text):
        draft = text[len(tokens) : len(tokens) + 4]
        if rounds % 2 and len(draft) == 4:
            draft[2] = (draft[2] + 1) % 40
        found = verify(engine, tokens, draft, max_tokens=24, **sampling)
        assert found.finish_reason is FinishReason.LENGTH
        if len(draft) == 4 and len(tokens) < 19:
            assert found.accepted == (2 if rounds % 2 else 4)
        tokens += found.tokens
        rounds += 1
    assert tokens == text
    assert rounds < 10


def test_an_empty_draft_is_a_plain_step() -> None:
    assert verify(engine_of(), (), (), max_tokens=8, **GREEDY).tokens == (plain_tokens(max_tokens=1, **GREEDY)[0],)


def test_a_round_computes_only_what_is_not_cached() -> None:
    engine = engine_of()
    text = plain_tokens(LONG, max_tokens=4, **GREEDY)
    assert verify(engine, (), text[:3], LONG, max_tokens=4, **GREEDY).num_cached == 0
    assert verify(engine, text[:1], text[1:3], LONG, max_tokens=4, **GREEDY).num_cached == 48


def test_a_draft_ends_at_the_last_token_of_the_text() -> None:
    text = plain_tokens(max_tokens=3, **GREEDY)
    found = verify(engine_of(), text[:1], [*text[1:], 1, 2, 3], max_tokens=3, **GREEDY)
    assert list(found.tokens) == text[1:]


def test_long_prompts_are_computed_in_parts_first() -> None:
    engine = engine_of(max_batched_tokens=20)
    text = plain_tokens(LONG, max_tokens=6, **GREEDY)
    assert list(verify(engine, (), text[:3], LONG, max_tokens=6, **GREEDY).tokens) == text[:4]


@pytest.mark.parametrize("draft", [(40_000,), (-1,), (1,) * (MAX_DEPTH + 1)])
def test_invalid_drafts_are_refused(draft: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest) as error:
        engine_of().validate(replace(request("r", PROMPT), draft=draft))
    assert error.value.field == "draft"


def test_a_draft_needs_a_single_choice() -> None:
    with pytest.raises(InvalidRequest, match="n to 1"):
        engine_of().validate(replace(request("r", PROMPT, n=2), draft=(1,)))


def test_a_full_batch_leaves_no_room_for_the_draft() -> None:
    engine = engine_of(max_batched_tokens=16)
    found = verify(engine, (), (1, 2, 3), LONG, max_tokens=6, **GREEDY)
    assert (list(found.tokens), found.drafted) == (plain_tokens(LONG, max_tokens=1, **GREEDY), 0)
