"""A resumable stream: the ids of its events, and how it continues after one of them.

The text of a request is a function of its body, its seed and the fingerprint of the worker. The id of an event has what the
body lacks: the answer, which decides the seed if the body sets none; the tokens that the client has; a check of the body and
the API key; and the fingerprint. So a stream is generated again from what the client sends when no process knows it any more.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from paceline.core.output import StepOutput
from paceline.core.request import SamplingParams, SpeculationParams, ValidatedRequest, Verification
from paceline.gateway.api.errors import BadRequest, NotFound
from paceline.gateway.auth import ApiKey

HEADER = "last-event-id"
CHECK_DIGITS = 16
"""Hexadecimal digits of the resume key in the id of an event."""
PATTERN = re.compile(
    r"((?:chatcmpl-|cmpl-|resp_|msg_)[0-9a-f]{24}):((?:\d{1,9}f?\.)*\d{1,9}f?):([0-9a-f]{16}):((?:fp_[0-9a-f]{1,64})?)"
)
NOT_FOUND = "stream_not_found"
CHANGED = "stream_changed"


def resumable(request: ValidatedRequest, answer_id: str, key: ApiKey, draws_seed: bool) -> ValidatedRequest:
    """The request with its resume key, which only the same API key and the same body yield again. If the body has no seed, the
    answer's id decides it."""
    sampling = msgspec.json.encode(replace(request.sampling, seed=0), order="sorted")
    parts = (answer_id, key.id, key.digest, request.cache_salt, request.prompt_ids, sampling)
    seed = _seed(answer_id) if draws_seed else request.seed
    return replace(
        request,
        resume_key=hashlib.sha256(repr(parts).encode()).hexdigest(),
        sampling=replace(request.sampling, seed=seed),
    )


def _seed(answer_id: str) -> int:
    """A seed as `draw_seed` draws it: an answer's id has 96 random bits."""
    return int.from_bytes(hashlib.sha256(answer_id.encode()).digest()[:8]) >> 1


def is_reproducible(sampling: SamplingParams, speculation: SpeculationParams, default: Verification) -> bool:
    """Whether the seed decides the text. `default` is the server's verification."""
    is_coupled = not speculation.enabled or (speculation.verification or default) == "coupled"
    return sampling.is_greedy or is_coupled


@dataclass(frozen=True, slots=True)
class ChoicePosition:
    num_tokens: int
    is_finished: bool


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The last event that a client has seen."""

    answer_id: str
    choices: tuple[ChoicePosition, ...]
    check: str
    fingerprint: str
    """That of the worker that generated the stream. Empty if it was not known."""

    @staticmethod
    def parse(text: str) -> "LastEvent":
        match = PATTERN.fullmatch(text)
        if match is None:
            raise BadRequest(
                "Last-Event-ID is not the id of an event of a resumable stream: send the request without it",
                code="invalid_event_id",
            )
        counts = match[2].split(".")
        choices = tuple(ChoicePosition(int(count.rstrip("f")), count.endswith("f")) for count in counts)
        return LastEvent(match[1], choices, match[3], match[4])

    def check_request(self, request: ValidatedRequest) -> None:
        """Raises `NotFound` if another body or API key than that of the stream made the request."""
        if self.check != request.resume_key[:CHECK_DIGITS] or len(self.choices) != request.sampling.n:
            raise NotFound(
                "the body, the key or the server's defaults are not those of this stream: send the same request, or send it "
                "without Last-Event-ID",
                code=NOT_FOUND,
            )


class StreamPosition:
    """Counts the tokens of each choice. The id of an event is `ANSWER:COUNT.COUNT:CHECK:FINGERPRINT`; `f` marks a finished
    choice."""

    def __init__(self, num_choices: int) -> None:
        self._counts, self._finished = [0] * num_choices, [False] * num_choices
        self._check = self._fingerprint = ""
        self._seen: Sequence[ChoicePosition] = [ChoicePosition(0, False)] * num_choices

    def begin(self, request: ValidatedRequest, event: LastEvent | None) -> None:
        """The stream of this request begins, or it is generated again up to `event`."""
        self._check = request.resume_key[:CHECK_DIGITS]
        if event is not None:
            self._seen, self._fingerprint = event.choices, event.fingerprint

    def add(self, output: StepOutput) -> None:
        """Raises `NotFound` for an output that does not belong to the stream that the client has seen."""
        if self._fingerprint and output.fingerprint and output.fingerprint != self._fingerprint:
            raise NotFound(
                f"the stream cannot continue: {self._fingerprint} generated it, and {output.fingerprint} serves now, with other"
                " texts. Send the request without Last-Event-ID",
                code=CHANGED,
            )
        self._fingerprint = self._fingerprint or output.fingerprint
        self._counts[output.choice] += len(output.tokens)
        self._finished[output.choice] |= output.finish_reason is not None
        count, seen = self._counts[output.choice], self._seen[output.choice]
        is_shorter = self._finished[output.choice] and count < seen.num_tokens
        if is_shorter or (seen.is_finished and count > seen.num_tokens):
            raise NotFound(
                f"choice {output.choice} does not have {seen.num_tokens} tokens: send the request without Last-Event-ID",
                code=NOT_FOUND,
            )

    def is_seen(self, choice: int) -> bool:
        """Whether the client has all outputs of this choice so far."""
        seen = self._seen[choice]
        return self._counts[choice] <= seen.num_tokens and self._finished[choice] <= seen.is_finished

    @property
    def is_before_event(self) -> bool:
        """Whether the client has tokens that were not generated again yet."""
        return any(
            count < seen.num_tokens or is_finished < seen.is_finished
            for count, is_finished, seen in zip(self._counts, self._finished, self._seen, strict=True)
        )

    def split(self, outputs: Sequence[StepOutput]) -> list[StepOutput]:
        """The outputs that follow, each of which the client has or lacks as a whole."""
        counts, pieces = self._counts.copy(), list[StepOutput]()
        for output in outputs:
            seen, num_tokens = self._seen[output.choice], len(output.tokens)
            num_seen = seen.num_tokens - counts[output.choice]
            counts[output.choice] += num_tokens
            has_new_end = output.finish_reason is not None and not seen.is_finished
            if 0 < num_seen < num_tokens + has_new_end:
                pieces += _divided(output, num_seen)
            else:
                pieces.append(output)
        return pieces

    def event_id(self, answer_id: str) -> str:
        counts = zip(self._counts, self._finished, strict=True)
        position = ".".join(f"{count}f" if is_finished else str(count) for count, is_finished in counts)
        return f"{answer_id}:{position}:{self._check}:{self._fingerprint}"


def _divided(output: StepOutput, count: int) -> tuple[StepOutput, StepOutput]:
    """The first `count` tokens of a step as one output, and the others as another, with what belongs to the step."""
    logprobs = output.logprobs
    first = replace(
        output,
        tokens=output.tokens[:count],
        origins=output.origins[:count],
        logprobs=None if logprobs is None else logprobs[:count],
        drafted=0,
        accepted=0,
        finish_reason=None,
    )
    rest = replace(
        output,
        tokens=output.tokens[count:],
        origins=output.origins[count:],
        logprobs=None if logprobs is None else logprobs[count:],
        prompt_logprobs=None,
    )
    return first, rest
