"""A request at the gateway: its committed tokens, whichever workers generated them."""

from dataclasses import dataclass, field, replace

from msgspec import Raw

from paceline.core.output import OutputListener, StepOutput
from paceline.core.request import ValidatedRequest
from paceline.model_files import SystemFingerprint
from paceline.policy.routing.kv_index import PeerHint
from paceline.wire.gateway_messages import EncodedSubmit, Output, Submit


class StreamGap(Exception):
    """An output does not start where the previous one ended: a message was lost."""


@dataclass(slots=True)
class _Choice:
    tokens: list[int] = field(default_factory=list)
    is_finished: bool = False


class Stream:
    """Collects the outputs of a request, so that another worker can continue it."""

    def __init__(
        self,
        request: ValidatedRequest,
        listener: OutputListener,
        pinned: str | None = None,
        encoded: Raw | None = None,
    ) -> None:
        """`pinned` is the only worker that may serve it. If it is None, any worker may. `encoded` is the request as
        `check_size` returns it. If it is None, the request is encoded when it is sent."""
        self.request = request
        self._encoded = encoded
        self.listener = listener
        self.pinned = pinned
        self.worker: str | None = None
        """Worker that generates it now."""
        self.peer: PeerHint | None = None
        """Another worker that has its prompt in cache."""
        self.attempt = 0
        """Number of the current submission."""
        self.started_attempt = 0
        """Last attempt with an output."""
        self.num_lost = 0
        """Workers lost since the last output."""
        self.fingerprint: SystemFingerprint | None = None
        """That of the worker that generated its first token. None if it is not known. Another worker continues the stream only
        with the same one."""
        self._digest = ""
        self.num_deaths = 0
        """Workers that died since the last output, each before the first output of its attempt."""
        committed = request.committed or ((),) * request.sampling.n
        self._choices = [_Choice(list(tokens or ()), tokens is None) for tokens in committed]
        self._num_cached: int | None = None

    @property
    def is_finished(self) -> bool:
        return all(choice.is_finished for choice in self._choices)

    @property
    def num_unfinished(self) -> int:
        return sum(not choice.is_finished for choice in self._choices)

    def generated_by(self, fingerprint: SystemFingerprint | None) -> None:
        """The first output of an attempt comes from a worker with this fingerprint. The first one of the stream counts."""
        if self.fingerprint is None and fingerprint is not None:
            self.fingerprint, self._digest = fingerprint, fingerprint.digest

    def add(self, output: Output) -> StepOutput:
        """Commit `output` and return it for the listener. Raises `StreamGap` if it does not continue the stream."""
        if output.choice >= len(self._choices):
            raise StreamGap(f"there is no choice {output.choice}")
        choice = self._choices[output.choice]
        if choice.is_finished or output.start != len(choice.tokens):
            raise StreamGap(
                f"choice {output.choice} has {len(choice.tokens)} tokens, the output starts at {output.start}"
            )
        tokens = output.tokens
        if len(output.origins) != len(tokens):
            raise StreamGap(f"{len(output.origins)} origins for {len(tokens)} tokens")
        self.num_lost = self.num_deaths = 0
        self._encoded = None  # another worker would get the request with these tokens
        choice.tokens.extend(tokens)
        choice.is_finished = output.finish_reason is not None
        if self._num_cached is None:  # a second worker would also count the output of the first
            self._num_cached = output.num_cached
        return StepOutput(
            self.request.id,
            output.choice,
            output.choice,
            tokens,
            output.origins,
            "",
            output.drafted,
            output.accepted,
            self._num_cached,
            output.logprobs,
            output.prompt_logprobs,
            output.finish_reason,
            "",
            output.waited,
            None,
            self._digest,
        )

    @property
    def is_suspect(self) -> bool:
        """Whether a worker died while it started this request."""
        return self.num_deaths > 0

    @property
    def has_started(self) -> bool:
        """Whether the current attempt has an output."""
        return self.started_attempt == self.attempt

    def submission(self, epoch: int) -> Submit | EncodedSubmit:
        """The message that submits the stream, as the current attempt, to a worker of this epoch."""
        if self._encoded is not None:
            return EncodedSubmit(epoch, self.attempt, self._encoded, self.peer)
        return Submit(epoch, self.attempt, self.remaining(), self.peer)

    def remaining(self) -> ValidatedRequest:
        """The request with its committed tokens, for the next worker."""
        if not any(choice.tokens or choice.is_finished for choice in self._choices):
            return self.request
        committed = tuple(None if choice.is_finished else tuple(choice.tokens) for choice in self._choices)
        return replace(self.request, committed=committed)
