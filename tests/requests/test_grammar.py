"""JSON schemas and grammars: whatever is picked under the masks parses, and a tree's masks are those of a fresh replay."""

import json
import random
import re
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.core.errors import InvalidRequest, MissingDependency
from paceline.core.request import Constraint, SamplingParams
from paceline.requests import grammar as grammar_module
from paceline.requests.grammar import Grammar, GrammarState
from paceline.speculation.distribution.distribution import pick
from paceline.speculation.drafts.drafts import Draft
from paceline.speculation.rows.rows import RowContext, allowed

EOS = (0, 31)
MERGES = [("t", "r"), ("u", "e"), ("tr", "ue"), ('"', ":"), ("{", '"'), ("1", "2")]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "ok": {"type": "boolean"},
        "size": {"enum": ["small", "large"]},
        "tags": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 20}, "maxItems": 3},
    },
    "required": ["name", "ok", "size", "tags"],
    "additionalProperties": False,
}


def _tokenizer() -> Tokenizer:
    """Bytes and a few merges, two end-of-text tokens among them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<eos>", *alphabet[:30], "<end>", *alphabet[30:], *(a + b for a, b in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<end>"])
    return tokenizer


TOKENIZER = _tokenizer()
TEXT = TOKENIZER.to_str()
VOCAB = TOKENIZER.get_vocab_size() + 5  # logits are often wider than the tokenizer


def compiled(constraint: Constraint = SCHEMA) -> Grammar:
    return Grammar.compile(constraint, TEXT, EOS, VOCAB)


def permitted(mask: torch.Tensor) -> list[int]:
    return allowed(mask, VOCAB).nonzero().flatten().tolist()


def random_text(state: GrammarState, seed: int, limit: int = 400) -> list[int]:
    """Random picks under the masks, until an end-of-text token."""
    ids: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    while len(ids) < limit:
        (mask,) = state.masks()
        context = RowContext(SamplingParams(), seed, 0, len(ids), ids, 0, mask=mask)
        token = int(pick(torch.randn(1, VOCAB, generator=generator), [context]).item())
        assert token in permitted(mask)
        ids.append(token)
        if token in EOS:
            return ids
        state.advance([token])
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", range(5))
def test_random_picks_satisfy_the_schema(seed: int) -> None:
    value = json.loads(TOKENIZER.decode(random_text(compiled().start(), seed)[:-1]))
    assert sorted(value) == ["name", "ok", "size", "tags"]
    assert len(value["name"]) <= 5
    assert value["size"] in ("small", "large")
    assert all(0 <= tag <= 20 for tag in value["tags"])


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (r"start: /[0-9]+\/[a-f]{3}\n/", r"[0-9]+/[a-f]{3}\n"),
        (r'start: "yes" | "n\"o" | "é\n"', r'yes|n"o|é\n'),
        ('root ::= "a" [0-9] (";" [x-z])*', "a[0-9](;[x-z])*"),
    ],
)
def test_random_picks_satisfy_a_grammar(grammar: str, pattern: str) -> None:
    for seed in range(5):
        text = TOKENIZER.decode(random_text(compiled(grammar).start(), seed)[:-1])
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("grammar", ["", "start: /(/", 'root ::= ("a"', "start: nothing"])
def test_an_invalid_grammar_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used"):
        compiled(grammar)


def test_tree_masks_are_those_of_a_fresh_replay() -> None:
    rng = random.Random(0)
    ids = random_text(compiled().start(), seed=3)
    some_forbidden = 0
    for cut in range(0, len(ids), 3):
        state = compiled().start(ids[:cut])
        tokens: list[int] = []
        parents: list[int] = []
        for _ in range(12):
            parent = rng.randrange(-1, len(tokens))
            path = [tokens[node] for node in Draft(tuple(tokens), tuple(parents)).path(parent)]
            likely = ids[cut + len(path)] if path == ids[cut : cut + len(path)] and cut + len(path) < len(ids) else 0
            token = rng.choice([likely, rng.randrange(VOCAB)])
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
        draft = Draft(tuple(tokens), tuple(parents))
        masks = state.masks(tokens, parents)
        for node, mask in enumerate(masks, start=-1):
            path = [tokens[i] for i in draft.path(node)]
            fresh = compiled().start(ids[:cut])
            try:
                for token in path:
                    if token not in permitted(fresh.masks()[0]):
                        raise InvalidRequest("forbidden")
                    fresh.advance([token])
            except InvalidRequest:
                some_forbidden += 1
                assert (mask == -1).all()
            else:
                assert torch.equal(mask, fresh.masks()[0])
        assert torch.equal(state.masks()[0], masks[0])  # the state did not move
    assert some_forbidden > 10


def test_only_the_end_may_follow_a_complete_value() -> None:
    state = compiled({"type": "boolean"}).start(TOKENIZER.encode("true").ids)
    assert state.is_finished
    masks = state.masks((31, 0, 40), (-1, 0, -1))
    assert [permitted(mask) for mask in masks[:3]] == [list(EOS)] * 3
    assert (masks[3] == -1).all()
    state.advance([31, 31])
    assert state.is_finished


def test_a_number_may_end_or_go_on() -> None:
    state = compiled({"type": "integer"}).start(TOKENIZER.encode("12").ids)
    assert not state.is_finished
    digit = TOKENIZER.encode("7").ids[0]
    after_end, after_digit = state.masks((0, digit), (-1, -1))[1:]
    assert permitted(after_end) == list(EOS)
    assert digit in permitted(after_digit)
    assert set(EOS) <= set(permitted(state.masks()[0]))
    state.advance([0])
    assert state.is_finished


def test_states_of_one_grammar_are_independent_and_rebuildable() -> None:
    ids = random_text(compiled().start(), seed=1)
    stepwise = compiled().start()
    for token in ids[:9]:
        stepwise.advance([token])
    assert torch.equal(stepwise.masks()[0], compiled().start(ids[:9]).masks()[0])
    assert permitted(compiled().start().masks()[0]) != permitted(stepwise.masks()[0])


def test_compilation_is_cached_by_schema() -> None:
    assert compiled() is compiled(dict(SCHEMA))
    assert compiled({}) is not compiled()


def test_any_json() -> None:
    json.loads(TOKENIZER.decode(random_text(compiled({"type": ["object", "array"], "maxItems": 2}).start(), 0)[:-1]))
    assert len(permitted(compiled({}).start().masks()[0])) > 10


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"allOf": 3}, {"type": "string", "pattern": "("}])
def test_a_bad_schema_is_an_invalid_request(schema: Constraint) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiled(schema)
    assert caught.value.field == "response_format"


@pytest.mark.parametrize(
    "constraint",
    [
        {"x-guidance": {"lenient": True}, "type": "object"},
        '%llguidance {"no_forcing": true}\nstart: "a"',
        'start: "a"\n  %llguidance {"no_forcing": true}',
        'start: %json {"x-guidance": {"lenient": true}}',
        'start: %json {"\\u0078-guidance": {"lenient": true}}',
    ],
)
def test_options_of_the_library_are_refused(constraint: Constraint) -> None:
    with pytest.raises(InvalidRequest, match="remove the options"):
        compiled(constraint)
    compiled({"type": "object", "properties": {"x-guidance": {"type": "string"}}})
    compiled('start: "%llguidance"')


def test_tokens_that_left_the_grammar_are_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest):
        compiled().start([40])


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar_module._tokenizer.cache_clear()
    grammar_module._compile.cache_clear()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependency, match="grammar"):
        compiled()
