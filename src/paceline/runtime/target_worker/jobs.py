"""What one gateway has asked a target worker for, and what it is yet to be told."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request
from paceline.runtime.wire.stream_messages import MAX_OUTPUTS, Output, Outputs, RequestFailed
from paceline.runtime.wire.transport import Peer

MAX_REASON = 2000


@dataclass(slots=True, eq=False)
class Job:
    """One submission, while it runs."""

    peer: Peer
    attempt: int
    request_id: str
    counts: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Output tokens by choice, those committed elsewhere included."""
    unfinished: int = 0

    def begin(self, request: Request) -> None:
        self.counts.update({i: len(tokens) for i, tokens in enumerate(request.committed) if tokens})
        self.unfinished = len(request.unfinished)


@dataclass(slots=True)
class GatewayJobs:
    heard: float = 0.0
    """When the gateway last gave a sign of life."""
    jobs: dict[int, Job] = field(default_factory=dict)
    """By attempt."""
    outbox: deque[Outputs | RequestFailed] = field(default_factory=deque)
    """What its queue did not take yet: no more than the tokens of what it was admitted with."""

    def tell(self, news: Iterable[tuple[Job, OutputEvent]]) -> None:
        """What the engine said of jobs; nothing is told of those that ended or were withdrawn meanwhile."""
        outputs = []
        for job, event in news:
            if self.jobs.get(job.attempt) is not job:
                continue
            if isinstance(event, StepOutput):
                outputs.append(self._output(job, event))
            else:
                del self.jobs[job.attempt]
                self.refuse(job.attempt, event)
        parts = range(0, len(outputs), MAX_OUTPUTS)
        self.outbox.extend(Outputs(outputs[i : i + MAX_OUTPUTS]) for i in parts)

    def refuse(self, attempt: int, error: PacelineError) -> None:
        """That attempt ended without its last token."""
        field = error.field if isinstance(error, InvalidRequest) else None
        text = str(error)[:MAX_REASON].encode(errors="replace").decode()  # it may quote what is no text
        self.outbox.append(RequestFailed(attempt, isinstance(error, InvalidRequest), text, field))

    def flush(self, send: Callable[[Outputs | RequestFailed], bool]) -> None:
        """As much as `send` takes, in order."""
        while self.outbox and send(self.outbox[0]):
            self.outbox.popleft()

    def _output(self, job: Job, event: StepOutput) -> Output:
        start = job.counts[event.choice]
        job.counts[event.choice] += len(event.tokens)
        job.unfinished -= event.finish_reason is not None
        if job.unfinished == 0:
            del self.jobs[job.attempt]
        return Output.of(event, job.attempt, start)
