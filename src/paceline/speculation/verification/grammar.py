"""JSON-schema grammars: the allowed tokens after the last committed token and after every node of a draft.

A `Grammar` is compiled once per schema and tokenizer and never changes; a `GrammarState` follows one sequence and can
always be rebuilt from its output ids. Masks are int32 bitmasks [ceil(V / 32)], bit t % 32 of word t // 32 for token t.
"""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from paceline.core.errors import InvalidRequest, MissingDependency

if TYPE_CHECKING:  # a gateway validates schemas and has no torch
    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor

    from paceline.speculation.drafts import Draft


class Grammar:
    """A schema as an automaton over one vocabulary."""

    def __init__(self, matcher: "LLMatcher", eos_ids: tuple[int, ...], vocab_size: int) -> None:
        self._matcher = matcher
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size

    @staticmethod
    def compile(schema: Mapping[str, Any], tokenizer_json: str, eos_ids: Iterable[int], vocab_size: int) -> "Grammar":
        """`tokenizer_json` is the text of a `tokenizer.json`; `vocab_size` is the width of the target's logits."""
        # Properties come in the order the schema lists them, so keys are not sorted
        return _compile(json.dumps(schema), tokenizer_json, tuple(sorted(eos_ids)), vocab_size)

    def start(self, output_ids: Iterable[int] = ()) -> "GrammarState":
        """The state after these output tokens."""
        state = GrammarState(self, self._matcher.deep_copy())
        state.advance(output_ids)
        return state


class GrammarState:
    """The state of one sequence in its grammar. Only `advance` changes it."""

    def __init__(self, grammar: Grammar, matcher: "LLMatcher") -> None:
        self._grammar = grammar
        self._matcher = matcher

    @property
    def is_finished(self) -> bool:
        """The JSON value is complete; only an end-of-text token may follow."""
        return self._matcher.is_stopped()

    def advance(self, tokens: Iterable[int]) -> None:
        """Advance by committed tokens. Tokens after the end of the value are ignored."""
        for token in tokens:
            if self.is_finished:
                return
            if self._matcher.try_consume_tokens([token]) != 1:
                reason = self._matcher.get_error() or f"token {token} cannot follow"
                raise InvalidRequest(f"the output left the JSON schema: {reason}", field="response_format")

    def masks(self, draft: "Draft") -> "list[Tensor]":
        """1 + len(draft) masks: after the last committed token, then after each node.

        A node the grammar forbids gets an all-ones mask, and so does everything below it: its parent's mask forbids it,
        so the row is never used.
        """
        import torch

        masks = torch.full((1 + len(draft), (self._grammar.vocab_size + 31) // 32), -1, dtype=torch.int32)
        self._fill(masks, draft, -1)
        return list(masks)

    def _fill(self, masks: "Tensor", draft: "Draft", node: int) -> None:
        """Fill the masks of `node` and of all nodes below it; the state of the matcher is restored."""
        mask = masks[node + 1]
        if self.is_finished:
            mask.copy_(self._end_mask())
        else:
            self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())
        for child in draft.children(node):
            token = draft.tokens[child]
            if self.is_finished:
                if token in self._grammar.eos_ids:
                    self._fill(masks, draft, child)
            elif self._matcher.try_consume_tokens([token]) == 1:
                self._fill(masks, draft, child)
                self._matcher.rollback(1)

    def _end_mask(self) -> "Tensor":
        import torch

        allowed = torch.zeros((self._grammar.vocab_size + 31) // 32, dtype=torch.int32)
        for token in self._grammar.eos_ids:
            allowed[token // 32] |= (1 << token % 32) - (2**32 if token % 32 == 31 else 0)
        return allowed


@lru_cache(maxsize=128)
def _compile(schema: str, tokenizer_json: str, eos_ids: tuple[int, ...], vocab_size: int) -> Grammar:
    tokenizer = _tokenizer(tokenizer_json, eos_ids, vocab_size)
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
    if matcher.is_error():
        raise InvalidRequest(f"the JSON schema cannot be used: {matcher.get_error()}", field="response_format")
    return Grammar(matcher, eos_ids, vocab_size)


@lru_cache(maxsize=4)
def _tokenizer(tokenizer_json: str, eos_ids: tuple[int, ...], vocab_size: int) -> "LLTokenizer":
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise MissingDependency("llguidance", "a JSON schema", "grammar") from error
    if not eos_ids:
        raise InvalidRequest("a JSON schema needs a tokenizer with an end-of-text token", field="response_format")
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids), slices=LLTokenizer.json_slices())
