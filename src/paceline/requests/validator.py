"""Validates requests, and turns a validated request into sequences."""

import itertools
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from paceline.core.errors import InvalidRequest, MissingDependency, PromptTooLong
from paceline.core.request import (
    MAX_DEPTH,
    Categories,
    Constraint,
    Request,
    SpeculationFlags,
    SpeculationParams,
    ValidatedRequest,
    Verification,
)
from paceline.core.sequence import Sequence
from paceline.model_files.tokenizer import Tokenizer
from paceline.requests.grammar import Grammar
from paceline.requests.text import end_tokens

MAX_PROMPT_SCORES = 250_000
"""Log-probabilities of one prompt: they travel in one message."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every request."""

    vocab_size: int
    max_model_len: int
    max_depth: int
    """Most tokens drafted per round."""


class RequestValidator:
    """Checks requests against the model and the loaded proposers. `validate` and `validate_flags` are safe from any thread."""

    def __init__(
        self,
        limits: Limits,
        verification: Verification,
        default_method: str,
        methods: Collection[str],
        tokenizer: Tokenizer | None = None,
        check_schema: Callable[[Constraint], None] | None = None,
    ) -> None:
        """`check_schema` raises if a JSON schema or a grammar cannot be used. If None, validation compiles it, as the engine
        does."""
        self.limits = limits
        self._check_schema = check_schema
        self._verification: Verification = verification
        self._default_method = default_method
        self._methods = methods
        self._tokenizer = tokenizer
        self._numbers = itertools.count()
        self._categories = Categories()
        self._flags = SpeculationFlags()

    @property
    def flags(self) -> SpeculationFlags:
        """The operator's flags; they decide what a request leaves open."""
        return self._flags

    def set_flags(self, flags: SpeculationFlags) -> None:
        self.validate_flags(flags)
        self._flags = flags

    @property
    def methods(self) -> Collection[str]:
        """Methods that a request or a flag may name."""
        return self._methods

    def validate(self, request: Request) -> ValidatedRequest:
        """The request with its seed, or `InvalidRequest`."""
        self._check(request)
        sampling = request.sampling
        if sampling.min_tokens:
            blocked = tuple(sorted(end_tokens(sampling, self._eos_ids)))
            request = replace(request, sampling=replace(sampling, blocked_ids=blocked))
        return ValidatedRequest.of(request)

    def prepare_grammars(self) -> None:
        """Read the tokenizer for grammars now: later it would hold the interpreter's lock for most of a second."""
        with suppress(InvalidRequest, MissingDependency):  # a request with a schema gets this error
            Grammar.prepare(self._tokenizer_json, self._eos_ids, self.limits.vocab_size)

    def grammar(self, request: Request) -> Grammar | None:
        """The grammar of the request, or of its JSON schema, compiled once for each. None if it has neither."""
        if request.sampling.constraint is None:
            return None
        return Grammar.compile(request.sampling.constraint, self._tokenizer_json, self._eos_ids, self.limits.vocab_size)

    def _check(self, request: Request) -> None:
        limits, sampling = self.limits, request.sampling
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty: give at least one token", field="prompt")
        if len(request.prompt_ids) >= limits.max_model_len:
            raise PromptTooLong(len(request.prompt_ids), limits.max_model_len)
        if not 0.001 <= request.weight <= 1000.0:
            raise InvalidRequest(f"weight must be in [0.001, 1000], got {request.weight}", field="weight")
        bad = next((token for token in request.prompt_ids if not 0 <= token < limits.vocab_size), None)
        if bad is not None:
            raise InvalidRequest(f"token {bad} is outside the vocabulary of {limits.vocab_size}", field="prompt")
        for name, tokens in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            bad = next((token for token in tokens if not 0 <= token < limits.vocab_size), None)
            if bad is not None:
                raise InvalidRequest(
                    f"{name}: token {bad} is outside the vocabulary of {limits.vocab_size}", field=name
                )
        num_scores = len(request.prompt_ids) * (1 + (sampling.prompt_logprobs or 0))
        if sampling.prompt_logprobs is not None and num_scores > MAX_PROMPT_SCORES:
            raise InvalidRequest(
                f"prompt_logprobs has {num_scores} values for this prompt, and at most {MAX_PROMPT_SCORES} are returned: "
                "lower it or shorten the prompt",
                field="prompt_logprobs",
            )
        self._check_method(request.speculation.method, "speculation.method")
        self._check_committed(request)
        self._check_draft(request)
        if sampling.constraint is not None and self._check_schema is not None:
            self._check_schema(sampling.constraint)
        else:
            self.grammar(request)

    def _check_committed(self, request: Request) -> None:
        """A request that continues from another engine must have tokens left to generate."""
        if not request.committed:
            return
        if len(request.committed) != request.sampling.n or not request.unfinished:
            raise InvalidRequest(
                f"committed needs one entry for each of {request.sampling.n} choices, one of them unfinished",
                field="committed",
            )
        for tokens in filter(None, request.committed):
            if not all(0 <= token < self.limits.vocab_size for token in tokens):
                raise InvalidRequest("committed holds tokens outside the vocabulary", field="committed")
            room = min(request.sampling.max_tokens, self.limits.max_model_len - len(request.prompt_ids))
            if len(tokens) >= room:
                raise InvalidRequest(
                    f"{len(tokens)} tokens are committed and there is room for {room}: nothing is left to generate",
                    field="committed",
                )

    def _check_draft(self, request: Request) -> None:
        if request.draft is None:
            return
        if request.sampling.n != 1:
            raise InvalidRequest("a draft is verified for one choice: set n to 1", field="n")
        if len(request.draft) > MAX_DEPTH:
            raise InvalidRequest(f"a draft has at most {MAX_DEPTH} tokens, got {len(request.draft)}", field="draft")
        bad = next((token for token in request.draft if not 0 <= token < self.limits.vocab_size), None)
        if bad is not None:
            raise InvalidRequest(f"token {bad} is outside the vocabulary of {self.limits.vocab_size}", field="draft")

    def validate_flags(self, flags: SpeculationFlags) -> None:
        self._check_method(flags.method, "method")

    def _check_method(self, method: str | None, field: str) -> None:
        if method is not None and method not in self._methods:
            raise InvalidRequest(
                f"speculation method {method!r} is not loaded here; choose from: {', '.join(sorted(self._methods)) or 'none'}",
                field=field,
            )

    def sequences(self, request: ValidatedRequest, now: float) -> list[Sequence]:
        """The unfinished sequences of the request, with their committed tokens. The first computes the prompt for all."""
        speculation = request.speculation
        sequences: list[Sequence] = []
        category = self._categories.fold(request.category)
        for choice in request.unfinished:
            committed = request.committed[choice] or () if request.committed else ()
            sequences.append(
                Sequence(
                    id=next(self._numbers),
                    request_id=request.id,
                    ids=[*request.prompt_ids, *committed],
                    num_prompt=len(request.prompt_ids),
                    sampling=request.sampling,
                    speculation=speculation,
                    seed=request.seed,
                    choice=choice,
                    category=category,
                    priority=request.priority,
                    arrival=now,
                    tenant=request.tenant,
                    weight=request.weight,
                    cache_salt=request.cache_salt,
                    method=self.method(speculation),
                    verification=speculation.verification or self._verification,
                    eos_ids=frozenset() if request.sampling.ignore_eos else self._eos_ids,
                    leader=sequences[0] if sequences else None,
                    # The cache holds no log-probabilities; other choices may use what the first has computed
                    max_cached_tokens=0
                    if choice == 0 and request.sampling.prompt_logprobs is not None
                    else request.max_cached_tokens,
                    draft=None if request.draft is None else self._fitting_draft(request, len(committed)),
                )
            )
        return sequences

    def _fitting_draft(self, request: Request, num_committed: int) -> tuple[int, ...]:
        """The part of the request's draft that leaves room for the token after it."""
        room = min(request.sampling.max_tokens, self.limits.max_model_len - len(request.prompt_ids)) - num_committed
        return (request.draft or ())[: room - 1]

    @cached_property
    def _tokenizer_json(self) -> str:
        if self._tokenizer is None:
            raise InvalidRequest("a JSON schema needs a tokenizer, and this engine has none", field="response_format")
        return self._tokenizer.to_json()

    @property
    def _eos_ids(self) -> frozenset[int]:
        return frozenset() if self._tokenizer is None else self._tokenizer.eos_ids

    def named_method(self, speculation: SpeculationParams) -> str | None:
        """The method that the request or else a flag names."""
        return speculation.method or self._flags.method

    def method(self, speculation: SpeculationParams) -> str:
        """The method of a request with these parameters, if the engine does not choose it."""
        return self.named_method(speculation) or self._default_method

    @property
    def offered_method(self) -> str:
        """The method of a request that names none."""
        return self.method(SpeculationParams())

    @property
    def offered_depth(self) -> int:
        """The largest depth that a request may have."""
        configured, flag = self.limits.max_depth, self._flags.max_depth
        return configured if flag is None else min(configured, flag)

    def max_depth(self, sequence: Sequence, is_tree: bool = False) -> int:
        """Tokens that may be drafted for this sequence now. A chain ends before the last token that the sequence may
        generate. A tree keeps its size, because most of its nodes are siblings, but must fit into the window."""
        remaining = self.remaining(sequence)
        if not sequence.speculation.enabled or remaining <= 1:
            return 0
        wanted = sequence.speculation.max_depth
        depth = self.offered_depth if wanted is None else min(wanted, self.offered_depth)
        return min(depth, (self.limits.max_model_len - len(sequence.ids) if is_tree else remaining) - 1)

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that the sequence may still generate."""
        longest = min(sequence.num_prompt + sequence.sampling.max_tokens, self.limits.max_model_len)
        return longest - len(sequence.ids)
