"""The speculative loop over two endpoints: the first drafts token ids, and the second verifies them in one call.

`RoundControl` decides how deep to draft in each round of each text: the engine's depth rules and circuit breakers over calls of
two servers. `find_endpoint` finds out what kind of server is at a URL.
"""

import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self

from paceline.core.clock import Clock, WallClock
from paceline.core.config import SpeculationConfig
from paceline.core.errors import InvalidRequest, PromptTooLong
from paceline.core.request import MAX_DEPTH, SamplingParams, SpeculationFlags, draw_seed
from paceline.core.sequence import FinishReason
from paceline.core.status import EngineStatus
from paceline.core.traffic import TrafficClass
from paceline.engine import StepTotals, TrafficStatistics
from paceline.policy.depth.breaker import Breaker, BreakerRule
from paceline.policy.depth.drift import AcceptanceChange
from paceline.policy.depth.observation import DepthCandidate, DraftingObservation, RoundObservation, StepObservation
from paceline.policy.depth.rules import make_breaker, make_depth
from paceline.tools.orchestrate.compatibility import Check, check_compatible, find_end_tokens
from paceline.tools.orchestrate.endpoint import (
    Endpoint,
    EndpointFailed,
    EndpointLacks,
    EndpointRound,
    HttpClient,
    Message,
    Outcome,
    connect,
)
from paceline.tools.orchestrate.servers import (
    LlamaCppEndpoint,
    LlamaCppPythonEndpoint,
    OpenAIEndpoint,
    PacelineEndpoint,
    VllmEndpoint,
)

logger = logging.getLogger(__name__)

METHOD = "endpoint"
_CALLS = TrafficClass(METHOD, "")
"""The key of the breaker of calls, which are not told apart by category."""
DEFAULT_DEPTH = 8


class RoundControl:
    """Every round is a step of one sequence. Time is passed in, and nothing here does I/O."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.max_depth = min(MAX_DEPTH, DEFAULT_DEPTH if config.max_depth is None else config.max_depth)
        self._is_enabled = config.enabled
        self._policy = make_depth(config, self.max_depth)
        self._traffic = TrafficStatistics(make_breaker(config))
        self._calls = Breaker(BreakerRule(trips=1, window=1))
        """Opens when a call of the draft endpoint fails."""
        self._totals = StepTotals()
        self._running: set[int] = set()
        self.counts: Counter[str] = Counter()
        """`rounds`, `drafted` and `accepted` tokens, and `failed_drafts`."""

    def open(self, sequence_id: int) -> None:
        self._running.add(sequence_id)

    def close(self, sequence_id: int) -> None:
        self._running.discard(sequence_id)
        self._restart(self._traffic.close([sequence_id]))

    def depth(self, sequence_id: int, category: str, num_tokens: int, remaining: int, now: float) -> int:
        """Tokens to draft for the next round of this text, which may still have `remaining` tokens."""
        most = min(self.max_depth, remaining - 1)
        if most <= 0 or not self._is_enabled:
            return 0
        traffic = TrafficClass(METHOD, category)
        if self._calls.allow(_CALLS, now) == 0:
            self._traffic.count_decision(traffic, 0, False)
            return 0
        if self._policy.skip_step(1):
            self._traffic.count_declined([traffic])
            return 0
        is_allowed = self._traffic.breaker.allow(traffic, now) > 0
        candidate = DepthCandidate(sequence_id, traffic, most if is_allowed else 0, num_tokens, remaining)
        depth = self._policy.decide([candidate])[0]
        self._traffic.count_decision(traffic, depth, is_allowed)
        return depth

    def record_call(self, has_failed: bool, now: float) -> None:
        """Report a call of the draft endpoint. After a failure the next calls wait for the breaker's cool-down."""
        self.counts["failed_drafts"] += has_failed
        self._calls.record(_CALLS, 0, 0, now, gain=0.0 if has_failed else 2.0)

    def observe(
        self,
        round_: RoundObservation,
        draft_seconds: float,
        verify_seconds: float,
        context: int,
        now: float,
        is_first: bool,
    ) -> None:
        """Learn from a round. `is_first` says that its calls also computed the prompt."""
        self.counts.update(rounds=1, drafted=round_.drafted, accepted=round_.accepted)
        asked = round_.requested > 0
        self._totals.add(int(is_first), asked, draft_seconds, 0.0, verify_seconds)
        if asked:
            self._restart(self._traffic.observe([round_], now, self._policy.advantage))
        self._policy.observe(
            StepObservation(
                batch=1,
                rows=1 + round_.drafted,
                prefill_rows=int(is_first),
                drafting=(DraftingObservation(METHOD, round_.requested, draft_seconds),) if asked else (),
                verify_seconds=verify_seconds,
                network_seconds=0.0,
                rounds=(round_,) if asked else (),
                context=context,
                is_timed=not is_first,
            )
        )

    def status(self) -> EngineStatus:
        """Counts in the format of an engine, for the metrics that every server has."""
        return EngineStatus(
            running=len(self._running),
            waiting=0,
            kv_used=0,
            kv_total=1,
            preemptions=0,
            invalid_drafts=0,
            flags=SpeculationFlags(self._is_enabled, METHOD, self.max_depth),
            traffic=self._traffic.report(),
            advantage=self._policy.advantage,
            seconds=self._totals.seconds,
        )

    def _restart(self, changes: Iterable[AcceptanceChange]) -> None:
        for change in changes:
            self._policy.restart(change.traffic, change.after)


OWNERS: dict[str, type[Endpoint]] = {
    "paceline": PacelineEndpoint,
    "vllm": VllmEndpoint,
    "llamacpp": LlamaCppEndpoint,
    "me": LlamaCppPythonEndpoint,
}
"""Kinds of servers by `owned_by` in their list of models."""


async def find_endpoint(client: HttpClient, model: str | None = None, tokenizer: Endpoint | None = None) -> Endpoint:
    """The endpoint at the client's URL. `model` is the model to use. If it is None, the first that the server lists is used.
    `tokenizer` is the endpoint that makes tokens of the text of a server without routes for them."""
    listed = await client.get("/v1/models")
    try:
        models = {entry["id"]: entry for entry in listed["data"]}
    except (KeyError, TypeError):
        raise EndpointFailed(f"{client.url}/v1/models is not OpenAI's API: {str(listed)[:200]}") from None
    name = model or next(iter(models), None)
    if name not in models:
        served = ", ".join(models) or "none"
        raise EndpointFailed(f"{client.url} does not serve the model {name!r}; it serves: {served}")
    assert name is not None
    entry = models[name]
    kind = OWNERS.get(str(entry.get("owned_by")))
    if kind is not None:
        return kind(client, name, entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx"))
    if tokenizer is None:
        raise EndpointFailed(
            f"{client.url} is no server whose drafts can be verified: the target must be Paceline or vLLM"
        )
    return OpenAIEndpoint(client, name, tokenizer)


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
