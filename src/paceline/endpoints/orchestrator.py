"""The speculative loop over two endpoints: the first drafts token ids, and the second verifies them in one call."""

import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self

from paceline.core.clock import Clock, WallClock
from paceline.core.config import SpeculationConfig
from paceline.core.errors import InvalidRequest, PromptTooLong
from paceline.core.request import draw_seed
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import FinishReason
from paceline.core.status.engine import EngineStatus
from paceline.core.traffic import TrafficClass
from paceline.endpoints.compatibility import Check, check_compatible
from paceline.endpoints.connect import find_endpoint
from paceline.endpoints.end_tokens import find_end_tokens
from paceline.endpoints.endpoint import Endpoint, EndpointRound, Message, Outcome
from paceline.endpoints.http_client import EndpointFailed, EndpointLacks, connect
from paceline.endpoints.round_control import METHOD, RoundControl
from paceline.speculation.depth.policy import RoundObservation

logger = logging.getLogger(__name__)

DRAFT_TIMEOUT = 5.0
"""Longest wait for a draft, in seconds. The round is then a plain step."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished text."""

    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Output tokens, the end token included."""
    finish_reason: FinishReason
    rounds: int
    drafted: int
    accepted: int
    seconds: float
    seed: int

    @property
    def tokens_per_round(self) -> float:
        return len(self.token_ids) / self.rounds


class Orchestrator:
    """Generates the target's text with drafts of another server. It is created by `connect`. Texts may run at the same time.

    A failure of the draft endpoint costs speed only: its rounds are plain steps. A failure of the target ends the text.
    """

    def __init__(
        self,
        draft: Endpoint,
        target: Endpoint,
        config: SpeculationConfig | None = None,
        ends: frozenset[int] = frozenset(),
        checks: tuple[Check, ...] = (),
        clock: Clock | None = None,
    ) -> None:
        """`ends` are tokens that end a text, for a target that does not report the end. `checks` are the compared parts."""
        self.draft, self.target, self.checks = draft, target, checks
        self._ends = ends
        self._control = RoundControl(config or SpeculationConfig())
        self._clock = clock or WallClock()
        self._numbers = itertools.count()

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        draft: str,
        target: str,
        *,
        draft_key: str | None = None,
        target_key: str | None = None,
        draft_model: str | None = None,
        target_model: str | None = None,
        config: SpeculationConfig | None = None,
    ) -> AsyncIterator[Self]:
        """Connects to the two URLs, and compares vocabulary and chat template. Raises `IncompatibleDraft` if they differ."""
        async with connect(target, target_key) as target_client, connect(draft, draft_key) as draft_client:
            target_end = await find_endpoint(target_client, target_model)
            draft_end = await find_endpoint(draft_client, draft_model, target_end)
            refusal = target_end.refusal(SamplingParams(temperature=0.0))
            if refusal is not None:
                raise EndpointLacks(refusal)
            checks = await check_compatible(target_end, draft_end)
            ends = frozenset() if target_end.reports_ends else await find_end_tokens(target_end)
            yield cls(draft_end, target_end, config, ends, checks)

    async def generate(
        self, prompt: str | Sequence[int] | Sequence[Message], sampling: SamplingParams, category: str = "default"
    ) -> Answer:
        """The text after a prompt: a text, token ids, or the messages of a conversation."""
        started, seed = self._clock.now(), draw_seed() if sampling.seed is None else sampling.seed
        sampling = replace(sampling, seed=seed)
        self._check(sampling)
        prompt_ids = await self._encode(prompt)
        window = self.target.max_model_len
        if window is not None:
            if len(prompt_ids) >= window:
                raise PromptTooLong(len(prompt_ids), window)
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, window - len(prompt_ids)))
        tokens: list[int] = []
        rounds, drafted, accepted, text = 0, 0, 0, None
        reason = FinishReason.LENGTH
        async for outcome, num_drafted in self.rounds(prompt_ids, sampling, category):
            tokens += outcome.tokens
            rounds, drafted, accepted = rounds + 1, drafted + num_drafted, accepted + outcome.accepted
            reason = outcome.finish_reason or reason
            if sampling.stop:
                text = await self._stopped_text(tokens, sampling)
                if text is not None:
                    reason = FinishReason.STOP
                    break
        if text is None:
            # An end token has no text
            text = await self.target.detokenize(tokens[:-1] if reason is FinishReason.STOP else tokens)
        seconds = self._clock.now() - started
        return Answer(text, prompt_ids, tuple(tokens), reason, rounds, drafted, accepted, seconds, seed)

    async def rounds(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, category: str = "default"
    ) -> AsyncIterator[tuple[Outcome, int]]:
        """The outcome of every round and the number of drafted tokens, until the text ends. `sampling` has a seed."""
        number, control = next(self._numbers), self._control
        output: tuple[int, ...] = ()
        control.open(number)
        try:
            while True:
                room = sampling.max_tokens - len(output)
                ids = prompt_ids + output
                asked = control.depth(number, category, len(ids), room, self._clock.now())
                began = self._clock.now()
                draft = await self._draft(ids, asked, sampling) if asked else ()
                drafted_at = self._clock.now()
                outcome = await self.target.verify(EndpointRound(prompt_ids, output, draft, sampling, self._ends))
                now = self._clock.now()
                accepted = min(outcome.accepted, len(draft))
                control.observe(
                    RoundObservation(number, TrafficClass(METHOD, category), len(draft), accepted, asked),
                    drafted_at - began,
                    now - drafted_at,
                    len(ids),
                    now,
                    is_first=not output,
                )
                output += outcome.tokens
                yield outcome, len(draft)
                if outcome.finish_reason is not None:
                    return
        finally:
            control.close(number)

    def status(self) -> EngineStatus:
        """Acceptance, depth, breaker and times, as an engine reports them."""
        return self._control.status()

    @property
    def counts(self) -> dict[str, int]:
        """Rounds, drafted and accepted tokens, and failed calls of the draft endpoint since the start."""
        return dict(self._control.counts)

    async def _draft(self, ids: tuple[int, ...], depth: int, sampling: SamplingParams) -> tuple[int, ...]:
        try:
            draft = await self.draft.draft(ids, depth, sampling, DRAFT_TIMEOUT)
        except EndpointFailed as error:
            logger.warning("a draft failed, and the round is a plain step: %s", error)
            self._control.record_call(True, self._clock.now())
            return ()
        self._control.record_call(False, self._clock.now())
        return draft[:depth]

    def _check(self, sampling: SamplingParams) -> None:
        if sampling.n != 1:
            raise InvalidRequest("the orchestrator generates one choice: set n to 1", field="n")
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            raise InvalidRequest("the orchestrator returns no log-probabilities: ask the target", field="logprobs")
        refusal = self.target.refusal(sampling)
        if refusal is not None:
            raise EndpointLacks(refusal)

    async def _encode(self, prompt: str | Sequence[int] | Sequence[Message]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(await self.target.tokenize_prompt(prompt))
        if prompt and isinstance(prompt[0], int):
            return tuple(prompt)  # type: ignore[arg-type]
        return tuple(await self.target.tokenize_messages(prompt))  # type: ignore[arg-type]

    async def _stopped_text(self, tokens: Sequence[int], sampling: SamplingParams) -> str | None:
        """The text up to the first stop string. None if the text has no stop string yet."""
        text = await self.target.detokenize(tokens)
        found = [at for stop in sampling.stop if (at := text.find(stop)) >= 0]
        return text[: min(found)] if found else None
