"""Requests of one gateway on a target worker, and the messages to be sent to it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.errors import GenerationFailed, InvalidRequest, PacelineError
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request
from paceline.runtime.target_worker.kept_streams import ResumableStream
from paceline.runtime.wire.messages import MAX_OUTPUTS
from paceline.runtime.wire.target_messages import FailureKind, Output, Outputs, RequestFailed
from paceline.runtime.wire.transport import Peer

MAX_REASON = 2000
"""Characters of an error message."""


class Submission:
    """A running submission."""

    __slots__ = ("attempt", "kept", "num_tokens", "num_unfinished", "peer", "request_id")

    def __init__(self, peer: Peer, attempt: int, request: Request) -> None:
        self.peer, self.attempt, self.request_id = peer, attempt, request.id
        committed = request.committed or ((),) * request.sampling.n
        self.num_tokens = [len(tokens or ()) for tokens in committed]
        """Output tokens by choice, including those that another worker committed."""
        self.num_unfinished = len(request.unfinished)
        self.kept: ResumableStream | None = None
        """Tokens of a resumable stream."""


@dataclass(slots=True)
class GatewaySession:
    last_message: float = 0.0
    """Time of the gateway's last message."""
    jobs: dict[int, Submission] = field(default_factory=dict)
    """Running submissions, by attempt."""
    outbox: deque[Outputs | RequestFailed] = field(default_factory=deque)
    """Messages that the send queue has not accepted yet. The tokens of the admitted requests bound its size."""
    _outputs: list[Output] = field(default_factory=list)
    """Outputs that are not in the outbox yet."""

    def add(self, job: Submission, event: OutputEvent) -> None:
        """Queue the event, unless its job ended or was cancelled. Outputs leave together, with the next `flush`."""
        if self.jobs.get(job.attempt) is not job:
            return
        if not isinstance(event, StepOutput):
            del self.jobs[job.attempt]
            self.fail(job.attempt, event)
            return
        choice, count = event.choice, len(event.tokens)
        start = job.num_tokens[choice]
        job.num_tokens[choice] = start + count
        if job.kept is not None:
            job.kept.add(choice, event.tokens)
        if event.finish_reason is not None:
            job.num_unfinished -= 1
            if job.num_unfinished == 0:
                del self.jobs[job.attempt]
        self._outputs.append(
            Output(
                job.attempt,
                choice,
                start,
                event.tokens,
                event.origins,
                event.drafted,
                event.accepted,
                event.num_cached,
                event.waited,
                event.finish_reason,
                event.logprobs,
                event.prompt_logprobs,
            )
        )

    def fail(self, attempt: int, error: PacelineError) -> None:
        """Queue a `RequestFailed` for the attempt."""
        self._collect()
        field = error.field if isinstance(error, InvalidRequest) else None
        text = str(error)[:MAX_REASON].encode(errors="replace").decode()  # it may quote lone surrogates
        kind = FailureKind.LOST
        if isinstance(error, InvalidRequest | GenerationFailed):
            kind = FailureKind.INVALID if isinstance(error, InvalidRequest) else FailureKind.FAILED
        self.outbox.append(RequestFailed(attempt, kind, text, field))

    @property
    def attempts(self) -> list[int]:
        """Submissions that run, and those whose last message is not sent yet."""
        self._collect()
        unsent: set[int] = set()
        for message in self.outbox:
            unsent.update(
                [message.attempt] if isinstance(message, RequestFailed) else [o.attempt for o in message.outputs]
            )
        return sorted(unsent.union(self.jobs))

    def flush(self, send: Callable[[Outputs | RequestFailed], bool]) -> None:
        """Send queued messages in order, until `send` returns False."""
        self._collect()
        while self.outbox and send(self.outbox[0]):
            self.outbox.popleft()

    def _collect(self) -> None:
        """Put the outputs into the outbox, as one message."""
        outputs = self._outputs
        if outputs:
            self.outbox.extend(Outputs(outputs[i : i + MAX_OUTPUTS]) for i in range(0, len(outputs), MAX_OUTPUTS))
            self._outputs = []
