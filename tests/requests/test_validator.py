from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import InvalidRequest
from paceline.core.request import Request, SamplingParams, SpeculationParams, Verification
from paceline.core.sequence import Sequence
from paceline.requests.validator import Limits, RequestValidator


class EndTokens:
    """As much of a tokenizer as the validator needs without a grammar."""

    eos_ids = frozenset({2, 3})


def validator(tokenizer: Any = None, verification: Verification = "coupled", max_depth: int = 8) -> RequestValidator:
    return RequestValidator(Limits(100, 32, max_depth), verification, "ngram", ("ngram", "draft_model"), tokenizer)


def request(prompt: tuple[int, ...] = (1, 2, 3), speculation: dict[str, Any] | None = None, **sampling: Any) -> Request:
    return Request("r", prompt, SamplingParams(**sampling), SpeculationParams(**(speculation or {})))


def sequences(part: RequestValidator, asked: Request, now: float) -> list[Sequence]:
    return part.sequences(part.validate(asked), now)


@pytest.mark.parametrize(
    ("wrong", "field", "message"),
    [
        (request(prompt=()), "prompt", "empty"),
        (request(prompt=(1, 100)), "prompt", "token 100 is outside the vocabulary of 100"),
        (request(prompt=(-1,)), "prompt", "token -1 is outside"),
        (request(prompt=(1,) * 32), "prompt", "32 tokens and the context window 32"),
        (replace(request(), weight=0.0), "weight", "in .0.001, 1000., got 0.0"),
        (request(logit_bias={5: 1.0, 100: 1.0}), "logit_bias", "token 100 is outside"),
        (request(stop_token_ids=(100,)), "stop_token_ids", "token 100 is outside"),
        (request(speculation={"method": "eagle"}), "speculation.method", "choose from: draft_model, ngram"),
        (request(json_schema={}), "response_format", "needs a tokenizer"),
    ],
)
def test_what_cannot_be_served_is_refused_by_field(wrong: Request, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        validator().validate(wrong)
    assert error.value.field == field


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    part, longest = validator(), request(prompt=(1,) * 31)
    assert part.validate(longest).prompt_ids == longest.prompt_ids
    assert part.remaining(sequences(part, longest, 0.0)[0]) == 1


def test_a_request_becomes_n_sequences_led_by_the_first() -> None:
    asked = replace(request(n=3, seed=7), category="code", priority=2, cache_salt="tenant")
    first, *others = sequences(validator(), asked, 4.5)
    assert first.leader is None
    assert [one.leader for one in others] == [first, first]
    assert [one.choice for one in (first, *others)] == [0, 1, 2]
    assert len({one.id for one in (first, *others)}) == 3
    for one in (first, *others):
        assert one.ids == [1, 2, 3]
        assert (one.num_prompt, one.num_computed, one.seed, one.arrival) == (3, 0, 7, 4.5)
        assert (one.request_id, one.category, one.priority, one.cache_salt) == ("r", "code", 2, "tenant")
    others[0].ids.append(9)
    assert first.ids == [1, 2, 3]


def test_numbers_are_not_reused() -> None:
    part = validator()
    assert [one.id for _ in range(3) for one in sequences(part, request(n=2), 0.0)] == list(range(6))


def test_a_missing_seed_is_drawn_once_for_all_choices() -> None:
    part = validator()
    seeds = [{one.seed for one in sequences(part, request(n=4), 0.0)} for _ in range(3)]
    assert all(len(drawn) == 1 for drawn in seeds)
    assert len(set.union(*seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in set.union(*seeds))


def test_the_request_chooses_and_the_server_fills_in() -> None:
    part = validator(verification="rejection")
    default = sequences(part, request(), 0.0)[0]
    assert (default.method, default.verification) == ("ngram", "rejection")
    chosen = sequences(part, request(speculation={"method": "draft_model", "verification": "coupled"}), 0.0)[0]
    assert (chosen.method, chosen.verification) == ("draft_model", "coupled")


def test_end_tokens_come_from_the_tokenizer_unless_ignored() -> None:
    part = validator(EndTokens())
    assert sequences(part, request(), 0.0)[0].eos_ids == {2, 3}
    assert sequences(part, request(ignore_eos=True), 0.0)[0].eos_ids == frozenset()


@pytest.mark.parametrize(
    ("speculation", "sampling", "depth"),
    [
        ({}, {}, 8),
        ({"max_depth": 3}, {}, 3),
        ({"max_depth": 20}, {}, 8),  # never more than the server offers
        ({"max_depth": 0}, {}, 0),
        ({"enabled": False}, {}, 0),
        ({}, {"max_tokens": 5}, 4),  # the fifth token is the pass's own
        ({}, {"max_tokens": 1}, 0),
    ],
)
def test_depth_a_sequence_may_have(speculation: dict[str, Any], sampling: dict[str, Any], depth: int) -> None:
    part = validator(max_depth=8)
    assert part.max_depth(sequences(part, request(speculation=speculation, **sampling), 0.0)[0]) == depth


def test_depth_and_remaining_follow_output_and_window() -> None:
    part = validator(max_depth=8)
    one = sequences(part, request(max_tokens=100), 0.0)[0]
    assert part.remaining(one) == 29  # the window's 32, not the 100
    one.ids += [5] * 25
    assert (part.remaining(one), part.max_depth(one)) == (4, 3)
    one.ids += [5] * 4
    assert (part.remaining(one), part.max_depth(one)) == (0, 0)


def test_a_tree_keeps_its_nodes_to_the_end_of_a_text_but_not_of_the_window() -> None:
    part = validator(max_depth=8)
    one = sequences(part, request(max_tokens=3), 0.0)[0]
    assert (part.max_depth(one), part.max_depth(one, is_tree=True)) == (2, 8)
    one.ids += [5, 5]
    assert (part.remaining(one), part.max_depth(one, is_tree=True)) == (1, 0)  # the last token is the pass's own
    late = sequences(part, request(max_tokens=100), 0.0)[0]
    late.ids += [5] * 25
    assert (part.remaining(late), part.max_depth(late, is_tree=True)) == (4, 3)
