"""JSON schemas and grammars: the allowed tokens after the last committed token and after every node of a draft.

A `Grammar` is compiled once for each constraint and tokenizer and never changes; a `GrammarState` follows one sequence and can
always be rebuilt from its output ids. Masks are int32 bitmasks [ceil(V / 32)], bit t % 32 of word t // 32 for token t.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from paceline.core.errors import InvalidRequest, MissingDependency
from paceline.core.request import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor


MAX_SCHEMA_CHARS = 1_000_000
SCHEMA_OPTIONS = "x-guidance"
OPTIONS = re.compile(rf"^\s*%llguidance|{SCHEMA_OPTIONS}", re.MULTILINE)
"""Options of llguidance in a schema, and in a grammar, which may contain schemas."""
MAX_REASON = 300
"""Characters of an error of llguidance that a client receives."""
LIMITS = {
    "initial_lexer_fuel": 250_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""Limits of llguidance. One mask takes at most some tens of milliseconds; a grammar that needs more fails."""


class Grammar:
    """A schema or grammar as an automaton over one vocabulary."""

    def __init__(self, matcher: "LLMatcher", eos_ids: tuple[int, ...], vocab_size: int) -> None:
        self._matcher = matcher
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size

    @staticmethod
    def compile(constraint: Constraint, tokenizer_json: str, eos_ids: Iterable[int], vocab_size: int) -> "Grammar":
        """`tokenizer_json` is the text of a `tokenizer.json`; `vocab_size` is the width of the target's logits."""
        return _compile(constraint_text(constraint), tokenizer_json, tuple(sorted(eos_ids)), vocab_size)

    @staticmethod
    def prepare(tokenizer_json: str, eos_ids: Iterable[int], vocab_size: int) -> None:
        """Read the tokenizer, which takes most of a second and holds the interpreter's lock, before the first schema."""
        _tokenizer(tokenizer_json, tuple(sorted(eos_ids)), vocab_size)

    def start(self, output_ids: Iterable[int] = ()) -> "GrammarState":
        """The state after these output tokens."""
        state = GrammarState(self, self.matcher())
        state.advance(output_ids)
        return state

    def matcher(self) -> "LLMatcher":
        """A matcher at the start of the value."""
        return self._matcher.deep_copy()


class GrammarState:
    """The state of one sequence in its grammar. Only `advance` changes it. A grammar that exceeds `LIMITS` raises
    `InvalidRequest`."""

    def __init__(self, grammar: Grammar, matcher: "LLMatcher") -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._tokens: list[int] = []

    @property
    def is_finished(self) -> bool:
        """The JSON value is complete; only an end-of-text token may follow."""
        if not self._matcher.is_stopped():
            return False
        if self._matcher.is_error():
            raise too_complex(self._matcher.get_error())
        return True

    def advance(self, tokens: Iterable[int]) -> None:
        """Advance by committed tokens. Tokens after the end of the value are ignored."""
        for token in tokens:
            if self.is_finished:
                return
            if self._matcher.try_consume_tokens([token]) != 1:
                if self._matcher.is_error():
                    raise too_complex(self._matcher.get_error())
                raise InvalidRequest(
                    f"the output left the JSON schema or grammar: token {token} cannot follow", field="response_format"
                )
            self._tokens.append(token)

    def masks(self, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> "list[Tensor]":
        """The masks after the last committed token and after each node of a draft: 1 + len(tokens). `parents` has the node
        before each token, -1 for the last committed token.

        A node the grammar forbids gets an all-ones mask, and so does everything below it: its parent's mask forbids it,
        so the row is never used.
        """
        import torch

        masks = torch.full((1 + len(tokens), (self._grammar.vocab_size + 31) // 32), -1, dtype=torch.int32)
        self._fill(masks, tokens, parents, -1)
        return list(masks)

    def _fill(self, masks: "Tensor", tokens: Sequence[int], parents: Sequence[int], node: int) -> None:
        """Fill the masks of `node` and of all nodes below it; the state of the matcher is restored."""
        mask = masks[node + 1]
        if self.is_finished:
            mask.copy_(self._end_mask())
        else:
            self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())
            if self._matcher.is_error():
                raise too_complex(self._matcher.get_error())
        for child, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent != node:
                continue
            if self.is_finished:
                if token in self._grammar.eos_ids:
                    self._fill(masks, tokens, parents, child)
            elif self._matcher.try_consume_tokens([token]) == 1:
                self._fill(masks, tokens, parents, child)
                self._matcher.rollback(1)
            elif self._matcher.is_error():  # a draft must not end a sequence that may never reach this token
                path, ancestor = list[int](), node
                while ancestor >= 0:
                    path.append(tokens[ancestor])
                    ancestor = parents[ancestor]
                self._matcher = self._grammar.start([*self._tokens, *reversed(path)])._matcher

    def _end_mask(self) -> "Tensor":
        import torch

        allowed = torch.zeros((self._grammar.vocab_size + 31) // 32, dtype=torch.int32)
        for token in self._grammar.eos_ids:
            allowed[token // 32] |= (1 << token % 32) - (2**32 if token % 32 == 31 else 0)
        return allowed


def constraint_text(constraint: Constraint) -> str:
    """The schema as a JSON object, or the grammar as a JSON string, of bounded length. Properties come in the order the schema
    lists them: keys are not sorted. Raises `InvalidRequest` for one that sets options of llguidance."""
    _check_options(constraint)
    try:
        text = json.dumps(constraint)
    except (RecursionError, ValueError, TypeError) as error:
        raise InvalidRequest(f"the JSON schema cannot be used: {error}", field="response_format") from None
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidRequest(
            f"the JSON schema or grammar has {len(text)} characters: use at most {MAX_SCHEMA_CHARS}",
            field="response_format",
        )
    return text


def _check_options(constraint: Constraint) -> None:
    """Options of the library are not the client's: they change its limits, and what else of the text is checked."""
    if isinstance(constraint, str):
        plain = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), constraint)
        found = OPTIONS.search(plain)
        name = found[0].strip() if found else ""
    else:
        name = SCHEMA_OPTIONS if SCHEMA_OPTIONS in constraint else ""
    if name:
        raise InvalidRequest(
            f"the JSON schema or grammar cannot be used: remove the options {name!r}", field="response_format"
        )


def too_complex(reason: str) -> InvalidRequest:
    """The error of a schema or grammar that exceeds `LIMITS`."""
    lines = [line for line in reason.splitlines() if not line.startswith("<")]
    return InvalidRequest(
        "the JSON schema or grammar is too complex: use fewer optional properties and shorter patterns "
        f"({' '.join(lines)[:MAX_REASON]})",
        field="response_format",
    )


@lru_cache(maxsize=128)
def _compile(constraint: str, tokenizer_json: str, eos_ids: tuple[int, ...], vocab_size: int) -> Grammar:
    tokenizer = _tokenizer(tokenizer_json, eos_ids, vocab_size)
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
    matcher = LLMatcher(tokenizer, _source(constraint), log_level=0, limits=limits)
    if matcher.is_error():
        reason = matcher.get_error()[:MAX_REASON]
        raise InvalidRequest(f"the JSON schema or grammar cannot be used: {reason}", field="response_format")
    return Grammar(matcher, eos_ids, vocab_size)


def _source(constraint: str) -> str:
    """The grammar as llguidance reads it, of the text of a constraint."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    value = json.loads(constraint)
    if not isinstance(value, str):
        return LLMatcher.grammar_from_json_schema(constraint)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(value))
    except Exception as error:  # of the converter: GBNF is read by a program of its own
        raise InvalidRequest(f"the grammar cannot be used: {error!s:.{MAX_REASON}}", field="response_format") from None


@lru_cache(maxsize=4)
def _tokenizer(tokenizer_json: str, eos_ids: tuple[int, ...], vocab_size: int) -> "LLTokenizer":
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise MissingDependency("llguidance", "a JSON schema", "grammar") from error
    if not eos_ids:
        raise InvalidRequest("a JSON schema needs a tokenizer with an end-of-text token", field="response_format")
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids), slices=LLTokenizer.json_slices())
