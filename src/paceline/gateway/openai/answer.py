"""The parts of responses and stream chunks that the two generation endpoints share: ids, usage, metrics and token origins."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from paceline.core.output import StepOutput, TokenLogprobs
from paceline.core.request import Request, ValidatedRequest
from paceline.core.sequence import Origin, SpeculationCounts
from paceline.gateway.api.bodies import GenerationBody, StreamOptions
from paceline.gateway.api.errors import ApiError
from paceline.gateway.openai.resumption import LastEvent, StreamPosition
from paceline.model_files.tokenizer import TextStream, Tokenizer
from paceline.requests import speculation_metrics

DONE = b"data: [DONE]\n\n"
END = b"}\n\n"
"""End of a server-sent event."""
MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""
_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The parts of a server that answers need."""

    model: str
    max_depth: int
    tokenizer: Tokenizer


class Answer(ABC):
    """Converts step outputs to one OpenAI response or to stream chunks.

    A stream has one chunk per step of a choice. With `include_usage` a usage chunk follows. The very last chunk has the
    metrics. With `include_origins` every chunk has the origins of its tokens.
    """

    prefix: str
    """Start of the ids."""
    object: str
    chunk_object: str
    content_type = b"text/event-stream; charset=utf-8"
    continues_prompt = True
    """Whether the text follows the prompt's text. If not, it does not begin with the space of a SentencePiece token."""

    def __init__(
        self, answer_id: str, requests: Sequence[Request], context: AnswerContext, body: GenerationBody
    ) -> None:
        """The ids of the requests begin with `answer_id`."""
        options = body.stream_options or StreamOptions()
        self._tokenizer = tokenizer = context.tokenizer
        self._has_token_ids = body.return_token_ids
        self._first_choice = {request.id: i * request.sampling.n for i, request in enumerate(requests)}
        self._num_unfinished = sum(request.sampling.n for request in requests)
        self._usage = UsageCounter(requests, context.max_depth)
        has_no_space = self.continues_prompt or tokenizer.is_byte_level
        self._untouched = set() if has_no_space else set(range(self._num_unfinished))
        """Choices without text, whose text may begin with the space of its first token."""
        self._include_usage = options.include_usage
        self._is_usage_continuous = options.include_usage and options.continuous_usage_stats
        self._origins = (
            [
                OriginSplitter(
                    tokenizer,
                    request.sampling.skip_special_tokens,
                    request.prompt_ids[-1] if self.continues_prompt else None,
                )
                for request in requests
                for _ in range(request.sampling.n)
            ]
            if options.include_origins
            else None
        )
        self._head = {
            "object": self.object,
            "created": int(time.time()),
            "model": context.model,
            "system_fingerprint": None,
        }
        self._fingerprints: set[str] = set()
        """Those of the workers that generated the choices."""
        self._position = StreamPosition(self._num_unfinished) if options.resumable else None
        self._is_first_chunk = True
        self._set_id(answer_id)
        self._chunk_tail = b'],"usage":null' if self._include_usage and not self._is_usage_continuous else b"]"

    def _set_id(self, answer_id: str) -> None:
        self._head = {"id": answer_id, **self._head}
        self._head["id"] = answer_id
        self._encode_head()

    def _set_fingerprint(self, fingerprint: str) -> None:
        """Choices of one response may come from workers with different fingerprints: it has none then."""
        self._fingerprints.add(fingerprint)
        self._head["system_fingerprint"] = fingerprint if fingerprint and len(self._fingerprints) == 1 else None
        self._encode_head()

    def _encode_head(self) -> None:
        # The constant start of every chunk is encoded once: a stream sends many chunks a second.
        head = _json({**self._head, "object": self.chunk_object})
        self._chunk_head = b"data: " + head[:-1] + b',"choices":['

    def begin(self, request: ValidatedRequest) -> None:
        """The answer is a resumable stream of this request, which has its resume key."""
        assert self._position is not None
        self._position.begin(request, None)

    def resume(self, request: ValidatedRequest, event: LastEvent, outputs: Sequence[StepOutput]) -> None:
        """Become the answer of `event`, the last one that the client has. `outputs` are those up to there, if a worker has kept
        them. The chunks of later outputs up to `event` are dropped."""
        assert self._position is not None
        self._set_id(event.answer_id)
        self._position.begin(request, event)
        for output in outputs:
            self.chunks([output])
        self._is_first_chunk = False
        self._fingerprints.clear()  # that of these outputs is not known

    def split(self, outputs: Sequence[StepOutput]) -> list[StepOutput]:
        """The outputs, divided where the part ends that the client of a resumed stream has."""
        assert self._position is not None
        return self._position.split(outputs)

    @property
    def is_before_event(self) -> bool:
        """Whether the stream is generated again, and has not reached the last event that the client has."""
        return self._position is not None and self._position.is_before_event

    @property
    def is_resumable(self) -> bool:
        return self._position is not None

    @property
    def id(self) -> str:
        return str(self._head["id"])

    @abstractmethod
    def add_to_choice(self, index: int, output: StepOutput) -> dict[str, Any] | None:
        """Adds the step to choice `index`. Returns the choice object of its chunk, None if it has no content."""

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """All choices, finished."""

    def root_fields(self) -> dict[str, Any]:
        """Fields in addition to `choices`, in a response or in the first chunk of a stream."""
        return {}

    def add(self, output: StepOutput) -> dict[str, Any] | None:
        """Adds one step output. Returns the choice object of its chunk, None if it has no content."""
        self._usage.add(output)
        if output.fingerprint not in self._fingerprints:
            self._set_fingerprint(output.fingerprint)
        index = self._first_choice[output.request_id] + output.choice
        if index in self._untouched and output.text:
            self._untouched.remove(index)
            output = replace(output, text=output.text.removeprefix(" "))
        choice = self.add_to_choice(index, output)
        if self._origins is not None:
            origins = self._origins[index].split(output)
            if choice is not None:
                choice["origins"] = origins
        return choice

    def chunks(self, outputs: Sequence[StepOutput]) -> bytes:
        """Server-sent events for these outputs."""
        parts: list[bytes] = []
        for output in outputs:
            choice = self.add(output)
            self._num_unfinished -= output.finish_reason is not None
            if self._position is not None:
                self._position.add(output)
                if self._position.is_seen(output.choice):
                    continue
            if choice is None:
                continue
            parts += (self._chunk_head, _json(choice), self._chunk_tail)
            if self._is_first_chunk:
                self._is_first_chunk = False
                parts += (part for name, value in self.root_fields().items() for part in (b",", _member(name, value)))
            if self._is_usage_continuous:
                parts += (b",", _member("usage", self._usage.usage()))
            if self._num_unfinished == 0 and not self._include_usage:
                parts += (b",", _member("metrics", self._usage.metrics()))
            parts.append(self._end())
        if self._num_unfinished == 0 and self._include_usage:
            usage, metrics = _json(self._usage.usage()), _json(self._usage.metrics())
            parts += (self._chunk_head, b'],"usage":', usage, b',"metrics":', metrics, self._end())
        return b"".join(parts)

    def _end(self) -> bytes:
        """End of an event, with its id in a resumable stream."""
        return END if self._position is None else b"}\nid: %s\n\n" % self._position.event_id(self.id).encode()

    def failure(self, error: ApiError) -> bytes:
        """The event of an error after the start of the stream."""
        return b"data: %s\n\n" % _json(error.body())

    @property
    def end(self) -> bytes:
        """The end of a stream."""
        return DONE

    def response(self) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        return {
            **self._head,
            **self.root_fields(),
            "choices": self.choices(),
            "usage": self._usage.usage(),
            "metrics": self._usage.metrics(),
        }


def _member(name: str, value: Any) -> bytes:
    """A member of a JSON object."""
    return b'"%s":' % name.encode() + _json(value)


class UsageCounter:
    """Tokens and speculation counts of one HTTP request, over all its prompts and choices."""

    def __init__(self, requests: Iterable[Request], max_depth: int) -> None:
        self._prompt_tokens = 0
        self._max_depth = 0
        for request in requests:
            self._prompt_tokens += len(request.prompt_ids)
            depth = request.speculation.max_depth if request.speculation.enabled else 0
            self._max_depth = max(self._max_depth, max_depth if depth is None else min(depth, max_depth))
        self._completion_tokens = self._num_rounds = 0
        self._cached: dict[str, int] = {}
        self._counts = SpeculationCounts()

    def add(self, output: StepOutput) -> None:
        self._completion_tokens += len(output.tokens)
        self._num_rounds += 1
        if output.choice == 0:  # the other choices share the first choice's prompt, which is no cache hit
            self._cached[output.request_id] = output.num_cached
        if output.drafted:
            self._counts.add(output.drafted, output.accepted)

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    def metrics(self) -> dict[str, Any]:
        speculation = asdict(speculation_metrics(self._counts, self._max_depth))
        return {"speculative_decoding": speculation, "num_rounds": self._num_rounds}


class OriginSplitter:
    """Splits the text of one choice by token, with the origin of each token.

    The pieces of all steps join to the whole text. A step may hold back the text of a token: an incomplete character, or the
    start of a stop string. The token's piece then comes with the step that releases its text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, before: int | None = None) -> None:
        """`before` is the token in front of the text, if it continues another one."""
        self._stream = TextStream(tokenizer, skip_special, before)
        self._eos_ids = tokenizer.eos_ids
        self._pending: deque[tuple[int, Origin]] = deque()
        """Text lengths and origins of tokens whose text no step has released."""
        self._last = Origin.PLAIN

    def split(self, output: StepOutput) -> list[dict[str, Any]]:
        """The pieces of this step, in order."""
        for token, origin in zip(output.tokens, output.origins, strict=True):
            if token not in self._eos_ids:
                self._pending.append((len(self._stream.push(token)), origin))
        text, pieces = output.text, []
        while text and self._pending and self._pending[0][0] <= len(text):
            length, self._last = self._pending.popleft()
            pieces.append({"text": text[:length], "origin": self._last.value})
            text = text[length:]
        if text:  # the step ends inside a token, or releases the rest of an incomplete character
            if self._pending:
                length, self._last = self._pending.popleft()
                self._pending.appendleft((length - len(text), self._last))
            pieces.append({"text": text, "origin": self._last.value})
        return pieces


def prompt_logprobs(
    scores: Sequence[TokenLogprobs], tokenizer: Tokenizer, top_n: int | None = None
) -> list[dict[int, Any] | None]:
    """One entry per prompt token: its own log-probability and those of the likeliest tokens, by token id. The first is None.
    `top_n` limits the likeliest tokens."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_bytes(token).decode("utf-8", "replace")
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text}

    entries: list[dict[int, Any] | None] = [None]
    for score in scores:
        values = {score.token: entry(score.token, score.logprob, score.rank)}
        for rank, (token, logprob) in enumerate(score.top[:top_n], 1):
            values.setdefault(token, entry(token, logprob, rank))
        entries.append(values)
    return entries
