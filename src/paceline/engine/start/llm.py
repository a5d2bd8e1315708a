"""The Python API: `LLM(model, draft=…)`, blocking, streaming and async."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import cached_property
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline.core.config import EngineConfig, from_mapping
from paceline.core.errors import EngineClosed, InvalidConfig, InvalidRequest, PacelineError, WeightsChanged
from paceline.core.output import Generation, OutputListener, StepOutput
from paceline.core.request import Request, SamplingParams, SpeculationFlags, SpeculationParams, ValidatedRequest
from paceline.core.status import EngineStatus
from paceline.model_files import recommended_sampling
from paceline.model_files.tokenizer import ChatTemplate, check_pair
from paceline.requests import RequestText, Transcript

if TYPE_CHECKING:
    from paceline.engine import StepHook
    from paceline.speculation import Proposer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a conversation of `{"role": …, "content": …}` messages."""


class LLM:
    """A model, optionally with a draft.

    >>> with LLM("smollm2") as llm:
    ...     print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)

    Keyword options are the fields of `EngineConfig`; `speculation` takes a mapping of the fields of `SpeculationConfig`.
    Methods may be called from any number of threads and event loops: their requests share one batch.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        draft: str | None = "auto",
        speculative_model: str | None = None,
        num_speculative_tokens: int | None = None,
        hooks: "Sequence[StepHook]" = (),
        proposers: "Mapping[str, Proposer] | None" = None,
        **options: Any,
    ) -> None:
        """`speculative_model` is another name of `draft`, and `num_speculative_tokens` of `speculation.max_depth`, as in vLLM.
        `hooks` listen to every step of the engine. `proposers` join the built-in ones; requests choose them by name. Without a
        `draft` it drafts as `paceline serve` does."""
        if speculative_model is not None:
            if draft != "auto":
                raise InvalidConfig("draft and speculative_model are two names of one option: give one of them")
            draft = speculative_model
        if num_speculative_tokens is not None:
            speculation = options.get("speculation", {})
            options["speculation"] = {**speculation, "max_depth": num_speculative_tokens}
        self.config = from_mapping(EngineConfig, {"model": model, "draft": draft, **options})
        check_pair(self.config.model, self.config.draft)
        from paceline.engine import EngineLoop  # imports torch, which takes seconds
        from paceline.engine.start.build import build_engine

        self._loop = EngineLoop(build_engine(self.config, hooks=hooks, extra_proposers=proposers))
        self.engine = self._loop.engine
        assert self.engine.tokenizer is not None
        self.tokenizer = self.engine.tokenizer
        self._numbers = itertools.count()

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of(self.tokenizer)

    def warm_up(self) -> None:
        """Compile kernels and capture graphs on a GPU. Call it before the first request; with requests it does nothing."""
        self._loop.run(self.engine.warm_up)

    def finish_idle_work(self) -> None:
        """Do now what waits for an idle moment, such as writes to the disk tier, so that none of it falls into a
        measurement."""
        self._loop.run(self.engine.hooks.finish_idle_work)

    def default_sampling(self, **fields: Any) -> SamplingParams:
        """The sampling parameters of calls without any: those that the model's generation_config.json, or our card of it,
        recommends. `fields` replace single ones."""
        return SamplingParams(**(recommended_sampling(self.config.model) | fields))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Generate for one prompt or for many in one batch; a list either way, in order.

        `options` are those of every method here: `speculation` (what this request chooses, a `SpeculationParams` or a
        mapping of its fields), `category`, `priority`, `cache_salt`. Without `sampling`, `default_sampling` applies.
        """
        return self._wait(self._requests(prompts, sampling, **options))

    def chat(self, messages: Sequence[Message], sampling: SamplingParams | None = None, **options: Any) -> Generation:
        """Answer a conversation, through the model's chat template."""
        return self._wait([self._request(messages, sampling, **options)])[0]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> Generator[StepOutput, None, None]:
        """Yield what each step adds. Leaving the loop early cancels the request."""
        request = self._request(prompt, sampling, **options)
        events: SimpleQueue[StepOutput | PacelineError] = SimpleQueue()
        self._loop.submit(request, events.put)
        text, unfinished = RequestText(self.tokenizer, request), request.sampling.n
        try:
            while unfinished:
                event = events.get()
                if isinstance(event, PacelineError):
                    raise event
                unfinished -= event.finish_reason is not None
                yield text.add(event)
        finally:
            if unfinished:
                self.cancel(request.id)

    async def astream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[StepOutput, None]:
        """Like `stream`, for an event loop."""
        async with aclosing(self._astream(self._request(prompt, sampling, **options))) as outputs:
            async for output in outputs:
                yield output

    async def _astream(self, request: ValidatedRequest) -> AsyncGenerator[StepOutput, None]:
        events: asyncio.Queue[StepOutput | PacelineError] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def receive(event: StepOutput | PacelineError) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        self._loop.submit(request, receive)
        text, unfinished = RequestText(self.tokenizer, request), request.sampling.n
        try:
            while unfinished:
                event = await events.get()
                if isinstance(event, PacelineError):
                    raise event
                unfinished -= event.finish_reason is not None
                yield text.add(event)
        finally:
            if unfinished:
                self.cancel(request.id)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Like `generate`, for an event loop."""

        async def generate_one(request: ValidatedRequest) -> Generation:
            transcript = Transcript(request, self.engine.validator.limits.max_depth)
            async for output in self._astream(request):
                transcript.add(output)
            return transcript.generation()

        return list(await asyncio.gather(*map(generate_one, self._requests(prompts, sampling, **options))))

    async def achat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, **options: Any
    ) -> Generation:
        """Like `chat`, for an event loop."""
        return (await self.agenerate([messages], sampling, **options))[0]

    def submit(self, request: Request, listener: OutputListener) -> None:
        """Start a request; `listener` receives its outputs, without text, on the engine's thread. Raises `InvalidRequest`."""
        self._loop.submit(self.engine.validate(request), listener)

    def cancel(self, request_id: str) -> None:
        """Free everything a request holds before the next step. A finished or unknown request is not an error."""
        with suppress(EngineClosed):  # a closed engine has no requests
            self._loop.cancel(request_id)

    @property
    def is_running(self) -> bool:
        """False after the engine was closed or has failed."""
        return self._loop.is_running

    @property
    def max_model_len(self) -> int:
        """Largest number of prompt and output tokens of one sequence."""
        return self.engine.validator.limits.max_model_len

    @property
    def system_fingerprint(self) -> str:
        """What its texts depend on, apart from request and seed, as responses of a server show it."""
        return "" if self.engine.fingerprint is None else self.engine.fingerprint.digest

    def snapshot(self) -> EngineStatus:
        """The engine's counts and traffic; never blocks."""
        return self.engine.status.snapshot()

    def set_speculation(self, enabled: bool) -> None:
        """Switch speculation off or on for all requests, between two steps; running requests continue."""
        self._loop.call(lambda: self.engine.flags.apply(replace(self.engine.validator.flags, enabled=enabled)))

    def set_flags(self, flags: SpeculationFlags) -> None:
        """Change the speculation flags for all requests, between two steps; running requests continue."""
        self.engine.flags.validate(flags)  # raises in the caller's thread
        self._loop.call(lambda: self.engine.flags.apply(flags))

    def change_weights(self, folder: str, seconds: float = 600.0) -> None:
        """Use other weights of the same architecture: a folder, or another name of a model. Requests that were submitted before
        are finished first; those that are not after `seconds` end with `WeightsChanged`. Later ones get the new weights. The
        prefix cache is cleared, and `system_fingerprint` changes."""
        from paceline.engine.start.build import load_weights

        loaded = load_weights(self.config, self.engine, folder)
        with self._loop.alone(seconds, WeightsChanged()):
            self._loop.run(lambda: self.engine.use_weights(loaded.model, loaded.checksum))

    def close(self) -> None:
        """Cancel all requests and stop. Safe to call twice."""
        self._loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        **options: Any,
    ) -> list[ValidatedRequest]:
        if isinstance(prompts, str) or (prompts and all(isinstance(part, int | Mapping) for part in prompts)):
            prompts = [prompts]  # type: ignore[assignment]
        many = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(many) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts and {len(many)} sampling parameters", field="sampling")
        return [self._request(prompt, params, **options) for prompt, params in zip(prompts, many, strict=True)]  # type: ignore[arg-type]

    def _request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        *,
        speculation: SpeculationParams | Mapping[str, Any] | None = None,
        category: str = "default",
        priority: int = 0,
        cache_salt: str = "",
    ) -> ValidatedRequest:
        if not isinstance(speculation, SpeculationParams):
            speculation = from_mapping(SpeculationParams, speculation or {}, "speculation.", InvalidRequest)
        sampling = sampling or self.default_sampling()
        ids = self._encode(prompt)
        request = Request(f"request-{next(self._numbers)}", ids, sampling, speculation, category, priority, cache_salt)
        return self.engine.validate(request)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        if all(isinstance(token, int) for token in prompt):
            return tuple(prompt)  # type: ignore[arg-type]
        if all(isinstance(message, Mapping) for message in prompt):
            return tuple(self.tokenizer.encode(self._template.render(prompt), add_special=False))  # type: ignore[arg-type]
        raise InvalidRequest("a prompt is a string, a list of token ids, or a list of chat messages", field="prompt")

    def _wait(self, requests: list[ValidatedRequest]) -> list[Generation]:
        events: SimpleQueue[StepOutput | PacelineError] = SimpleQueue()
        transcripts = {request.id: Transcript(request, self.engine.validator.limits.max_depth) for request in requests}
        texts = {request.id: RequestText(self.tokenizer, request) for request in requests}
        unfinished = set(transcripts)
        try:
            for request in requests:
                self._loop.submit(request, events.put)
            while unfinished:
                event = events.get()
                if isinstance(event, PacelineError):
                    raise event
                transcripts[event.request_id].add(texts[event.request_id].add(event))
                if transcripts[event.request_id].is_finished:
                    unfinished.discard(event.request_id)
        finally:
            for request_id in unfinished:
                self.cancel(request_id)
        return [transcripts[request.id].generation() for request in requests]
