"""Requests of one gateway on a target worker, and the messages to be sent to it."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request
from paceline.runtime.wire.gateway_messages import MAX_OUTPUTS, Output, Outputs, RequestFailed
from paceline.runtime.wire.transport import Peer

MAX_REASON = 2000
"""Characters of an error message."""


@dataclass(slots=True, eq=False)
class Job:
    """A running submission."""

    peer: Peer
    attempt: int
    request_id: str
    num_tokens: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Output tokens by choice, including those that another worker committed."""
    num_unfinished: int = 0

    def start(self, request: Request) -> None:
        self.num_tokens.update({i: len(tokens) for i, tokens in enumerate(request.committed) if tokens})
        self.num_unfinished = len(request.unfinished)


@dataclass(slots=True)
class GatewayJobs:
    last_message: float = 0.0
    """Time of the gateway's last message."""
    jobs: dict[int, Job] = field(default_factory=dict)
    """Running submissions, by attempt."""
    outbox: deque[Outputs | RequestFailed] = field(default_factory=deque)
    """Messages that the send queue has not accepted yet. The tokens of the admitted requests bound its size."""

    def add_events(self, events: Iterable[tuple[Job, OutputEvent]]) -> None:
        """Queue messages for these events. Events of jobs that ended or were cancelled are dropped."""
        outputs = []
        for job, event in events:
            if self.jobs.get(job.attempt) is not job:
                continue
            if isinstance(event, StepOutput):
                outputs.append(self._output(job, event))
            else:
                del self.jobs[job.attempt]
                self.fail(job.attempt, event)
        parts = range(0, len(outputs), MAX_OUTPUTS)
        self.outbox.extend(Outputs(outputs[i : i + MAX_OUTPUTS]) for i in parts)

    def fail(self, attempt: int, error: PacelineError) -> None:
        """Queue a `RequestFailed` for the attempt."""
        field = error.field if isinstance(error, InvalidRequest) else None
        text = str(error)[:MAX_REASON].encode(errors="replace").decode()  # it may quote lone surrogates
        self.outbox.append(RequestFailed(attempt, isinstance(error, InvalidRequest), text, field))

    def flush(self, send: Callable[[Outputs | RequestFailed], bool]) -> None:
        """Send queued messages in order, until `send` returns False."""
        while self.outbox and send(self.outbox[0]):
            self.outbox.popleft()

    def _output(self, job: Job, event: StepOutput) -> Output:
        start = job.num_tokens[event.choice]
        job.num_tokens[event.choice] += len(event.tokens)
        job.num_unfinished -= event.finish_reason is not None
        if job.num_unfinished == 0:
            del self.jobs[job.attempt]
        return Output.of(event, job.attempt, start)
