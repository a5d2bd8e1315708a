"""Where a text ends, with and without drafts: stop tokens, stop strings, limits, and the end of a JSON value."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.core.sequence import FinishReason
from paceline.speculation.proposer import Proposer
from paceline.speculation.proposers.suffix import NgramProposer
from tests.engine.harness import (
    CHARACTERS,
    EOS,
    GREEDY,
    MODEL,
    PROMPT,
    SAMPLED,
    engine_of,
    letters,
    oracle,
    outputs_of,
    plain_tokens,
    request,
    text_of,
    tokens_of,
)
from tests.fakes import (
    TINY,
    draft_model,
    random_chain,
    random_tree,
    tiny_model,
)


@pytest.mark.parametrize("at", [1, 3, 4, 5])
def test_a_stop_token_inside_an_accepted_draft_cuts_the_rest(at: int) -> None:
    text = plain_tokens(max_tokens=12, **SAMPLED)
    stop = text[at]
    assert stop not in text[:at]
    sampling = {**SAMPLED, "max_tokens": 12, "stop_token_ids": (stop,)}
    outputs = outputs_of(engine_of(oracle(text), depth=4), request("r", PROMPT, **sampling))
    assert tokens_of(outputs) == text[: at + 1] == plain_tokens(**sampling)
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert all(len(o.tokens) == len(o.origins) for o in outputs)
    if at < 5:  # cut inside the first round: what was verified still counts
        assert (outputs[-1].drafted, outputs[-1].accepted, len(outputs[-1].tokens)) == (4, 4, at)


def test_an_end_token_ends_a_text_and_is_not_part_of_it() -> None:
    prompt, sampling = ending_prompt()
    text = plain_tokens(prompt, **sampling)
    end = text.index(EOS)
    for proposer in (None, oracle(text)):
        one = request("r", prompt, **sampling)
        outputs = outputs_of(engine_of(proposer, tokenizer=True), one)
        assert tokens_of(outputs) == text[: end + 1]
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert text_of(outputs, one) == "".join(CHARACTERS[t] for t in text[:end])


def test_end_tokens_can_be_ignored() -> None:
    prompt, sampling = ending_prompt()
    text = plain_tokens(prompt, **sampling)
    one = request("r", prompt, ignore_eos=True, **sampling)
    outputs = outputs_of(engine_of(oracle(text), tokenizer=True), one)
    assert tokens_of(outputs) == text
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert text_of(outputs, one) == "".join(CHARACTERS[t] for t in text if t != EOS)


def ending_prompt() -> tuple[Sequence[int], dict[str, Any]]:
    """A request whose text has its first end token inside the first rounds, not at a round's end."""
    for seed in range(200):
        sampling = {"temperature": 1.0, "seed": seed, "max_tokens": 16}
        text = plain_tokens(**sampling)
        if EOS in text[2:4] and EOS not in text[:2]:
            return PROMPT, sampling
    raise AssertionError("no such text")


@pytest.mark.parametrize(("start", "length"), [(2, 1), (3, 2), (4, 3), (9, 2)])
def test_a_stop_string_ends_a_text_before_it(start: int, length: int) -> None:
    sampling = {"max_tokens": 16, "seed": 3, "ignore_eos": True}
    tokens = plain_tokens(**sampling)
    text = letters().decode(tokens)
    stop = text[start : start + length]
    cut = text.index(stop)
    for proposer in (None, oracle(tokens)):
        one = request("r", PROMPT, stop=(stop, "zzzz"), **sampling)
        outputs = outputs_of(engine_of(proposer, tokenizer=True), one)
        assert text_of(outputs, one) == text[:cut]
        assert tokens_of(outputs) == tokens[: cut + length]
        assert outputs[-1].finish_reason is FinishReason.STOP


def test_text_that_only_began_a_stop_string_is_given_out_at_the_end() -> None:
    sampling = {"max_tokens": 8, "seed": 3, "ignore_eos": True}
    tokens = plain_tokens(**sampling)
    text = letters().decode(tokens)
    one = request("r", PROMPT, stop=(text[-2:] + "\n",), **sampling)
    outputs = outputs_of(engine_of(oracle(tokens), tokenizer=True), one)
    assert text_of(outputs, one) == text
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6])
def test_drafts_never_reach_past_max_tokens(max_tokens: int) -> None:
    text = plain_tokens(max_tokens=max_tokens, **SAMPLED)
    assert len(text) == max_tokens
    engine = engine_of(oracle([*text, 1, 1, 1, 1]), depth=4)
    outputs = outputs_of(engine, request("r", PROMPT, max_tokens=max_tokens, **SAMPLED))
    assert tokens_of(outputs) == text
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert sum(o.drafted for o in outputs) <= max(0, max_tokens - 2)  # one is plain, one the last round's own


@pytest.mark.parametrize("depth", [0, 4])
def test_the_window_ends_a_text(depth: int) -> None:
    engine = engine_of(draft_model(MODEL), depth=depth, max_model_len=32)
    outputs = outputs_of(engine, request("r", PROMPT * 4, max_tokens=100, **SAMPLED))
    assert len(tokens_of(outputs)) == 32 - 20
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert tokens_of(outputs) == plain_tokens(PROMPT * 4, max_tokens=12, **SAMPLED)


# --- grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", 3]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["ok", "tags"],
    "additionalProperties": False,
}
DRAFTS: dict[str, Callable[[], Proposer]] = {
    "right": lambda: draft_model(MODEL),
    "sometimes": lambda: draft_model(tiny_model(perturb=0.3)),
    "wrong": lambda: random_chain(TINY.vocab_size),
    "tree": lambda: random_tree(TINY.vocab_size),
    "ngram": NgramProposer,
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_json_is_valid_and_the_same_with_any_drafts(draft: str) -> None:
    sampling = {"json_schema": SCHEMA, "max_tokens": 80}
    for own in (GREEDY, SAMPLED, {"temperature": 1.0, "seed": 8, "n": 2}):
        one = request("r", PROMPT, **sampling, **own)
        plain = outputs_of(engine_of(tokenizer=True), one)
        engine = engine_of(DRAFTS[draft](), depth=6, tokenizer=True)
        drafted = outputs_of(engine, one)
        for choice in range(int(own.get("n", 1))):
            assert tokens_of(drafted, choice=choice) == tokens_of(plain, choice=choice)
            value = json.loads(text_of(drafted, one, choice))
            assert set(value) == {"ok", "tags"}
            assert set(value["tags"]) <= {"a", "bc", 3}
        assert {o.finish_reason for o in drafted} == {None, FinishReason.STOP}


def test_accepted_drafts_follow_the_grammar_too() -> None:
    """Not only the recovered tokens: a draft that knows the text gets through the grammar whole."""
    sampling = {"json_schema": SCHEMA, "max_tokens": 80, **SAMPLED}
    text = tokens_of(outputs_of(engine_of(tokenizer=True), request("r", PROMPT, **sampling)))
    outputs = outputs_of(engine_of(oracle(text), depth=6, tokenizer=True), request("r", PROMPT, **sampling))
    assert tokens_of(outputs) == text
    assert sum(o.drafted for o in outputs) == sum(o.accepted for o in outputs) > 10


@pytest.mark.parametrize("draft", ["sometimes", "tree"])
def test_json_is_valid_under_rejection(draft: str) -> None:
    for seed in range(6):
        engine = engine_of(DRAFTS[draft](), depth=5, tokenizer=True)
        sampling = {"json_schema": SCHEMA, "max_tokens": 80, "seed": seed}
        one = request("r", PROMPT, {"verification": "rejection"}, **sampling)
        assert set(json.loads(text_of(outputs_of(engine, one), one))) == {"ok", "tags"}


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_text_does_not_end_before_min_tokens(greedy: bool, rule: str) -> None:
    prompt, sampling = ending_prompt()
    end = plain_tokens(prompt, **sampling).index(EOS)
    sampling |= {"min_tokens": 10, **(GREEDY if greedy else {})}
    texts = []
    for proposer in (None, random_chain(TINY.vocab_size), random_tree(TINY.vocab_size)):
        one = request("r", prompt, speculation={"verification": rule}, **sampling)
        outputs = outputs_of(engine_of(proposer, tokenizer=True), one)
        texts.append(tokens_of(outputs))
        assert len(texts[-1]) >= 10 > end
        assert EOS not in texts[-1][:9]
    if rule == "coupled" or greedy:
        assert texts[0] == texts[1] == texts[2]


def test_a_stop_string_does_not_end_a_text_before_min_tokens() -> None:
    text = plain_tokens(max_tokens=12, **SAMPLED)
    stop = CHARACTERS[text[3]]
    one = request("r", PROMPT, max_tokens=12, min_tokens=6, stop=(stop,), **SAMPLED)
    for proposer in (None, oracle(text)):
        outputs = outputs_of(engine_of(proposer, tokenizer=True), one)
        assert len(tokens_of(outputs)) >= 6
        assert text_of(outputs, one).startswith("".join(CHARACTERS[t] for t in text[:5]))


def test_a_grammar_that_allows_the_end_alone_ends_a_text_before_min_tokens() -> None:
    pytest.importorskip("llguidance")
    one = request("r", PROMPT, max_tokens=64, min_tokens=60, json_schema={"const": 1}, **SAMPLED)
    outputs = outputs_of(engine_of(tokenizer=True), one)
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert text_of(outputs, one) == "1"
