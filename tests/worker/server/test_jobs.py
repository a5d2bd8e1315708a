"""Messages that a target worker sends to a gateway."""

from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request, SamplingParams
from paceline.core.sequence import FinishReason, Origin
from paceline.wire.draft_messages import MAX_OUTPUTS
from paceline.wire.gateway_messages import FailureKind, Outputs, RequestFailed
from paceline.worker.server.gateways import MAX_REASON, GatewaySession, Submission


def job_of(gateway: GatewaySession, attempt: int = 1, request: Request | None = None) -> Submission:
    return gateway.submit(attempt, request or Request("r", (1, 2), SamplingParams()))


def put(*events: tuple[Submission, OutputEvent]) -> None:
    for job, event in events:
        job.put(event)


def step(*tokens: int, choice: int = 0, end: bool = False) -> StepOutput:
    reason = FinishReason.LENGTH if end else None
    return StepOutput("r", choice, choice, tokens, (Origin.PLAIN,) * len(tokens), finish_reason=reason)


def sent(gateway: GatewaySession) -> list[Outputs | RequestFailed]:
    messages: list[Outputs | RequestFailed] = []
    gateway.flush(lambda message: messages.append(message) is None)
    return messages


def test_outputs_have_start_positions_and_the_last_ends_the_job() -> None:
    gateway = GatewaySession()
    job = job_of(gateway)
    put((job, step(5, 6)), (job, step(7)))
    put((job, step(8, end=True)))
    outputs = [output for message in sent(gateway) if isinstance(message, Outputs) for output in message.outputs]
    assert [(output.start, list(output.tokens)) for output in outputs] == [(0, [5, 6]), (2, [7]), (3, [8])]
    assert gateway.jobs == {}


def test_continued_job_starts_after_the_committed_tokens() -> None:
    gateway = GatewaySession()
    request = Request("r", (1, 2), SamplingParams(n=3), committed=((9, 9), None, ()))
    job = job_of(gateway, request=request)
    put((job, step(5, choice=0, end=True)), (job, step(6, choice=2)))
    (message,) = sent(gateway)
    assert isinstance(message, Outputs)
    assert [(one.choice, one.start) for one in message.outputs] == [(0, 2), (2, 0)]
    assert gateway.jobs == {1: job}  # the third choice continues; the second was finished
    put((job, step(7, choice=2, end=True)))
    assert not job.is_running
    assert gateway.attempts == [1]
    assert len(sent(gateway)) == 1
    assert gateway.jobs == {}


def test_events_of_a_replaced_job_are_dropped() -> None:
    gateway = GatewaySession()
    old = job_of(gateway)
    new = job_of(gateway)
    put((old, step(5)), (old, PacelineError("gone")))
    assert (sent(gateway), gateway.jobs) == ([], {1: new})


def test_error_ends_a_job_and_marks_invalid_requests() -> None:
    gateway = GatewaySession()
    put((job_of(gateway, 1), PacelineError("broken")), (job_of(gateway, 2), InvalidRequest("no", field="n")))
    assert sent(gateway) == [
        RequestFailed(1, FailureKind.LOST, "broken", None),
        RequestFailed(2, FailureKind.INVALID, "no", "n"),
    ]
    assert gateway.jobs == {}


def test_error_message_is_valid_text_of_bounded_length() -> None:
    gateway = GatewaySession()
    gateway.fail(1, PacelineError("\ud800" * (MAX_REASON + 1)))
    (message,) = sent(gateway)
    assert isinstance(message, RequestFailed)
    assert message.message == "?" * MAX_REASON


def test_a_refused_message_stays_in_front() -> None:
    gateway = GatewaySession()
    job = job_of(gateway)
    put((job, step(5)), (job, step(6)))
    gateway.flush(lambda message: False)
    put((job, step(7, end=True)))
    gateway.fail(7, PacelineError("busy"))
    assert gateway.attempts == [1, 7]
    starts = [
        [output.start for output in message.outputs] if isinstance(message, Outputs) else message.attempt
        for message in sent(gateway)
    ]
    assert starts == [[0, 1], [2], 7]
    assert gateway.attempts == []


def test_messages_are_bounded() -> None:
    gateway = GatewaySession()
    job = job_of(gateway)
    put(*((job, step(i % 100)) for i in range(MAX_OUTPUTS + 1)))
    gateway.fail(7, PacelineError("busy"))
    messages = sent(gateway)
    sizes = [len(message.outputs) if isinstance(message, Outputs) else message.attempt for message in messages]
    assert sizes == [MAX_OUTPUTS, 1, 7]


def test_both_choices_of_a_refused_message_are_reported() -> None:
    """A submission leaves its session with its last message, however early it ends."""
    gateway = GatewaySession()
    job = job_of(gateway, request=Request("r", (1, 2), SamplingParams(n=2)))
    put((job, step(5, end=True)), (job, step(6, choice=1, end=True)))
    (message,) = sent(gateway)
    assert isinstance(message, Outputs)
    assert [output.choice for output in message.outputs] == [0, 1]
    assert gateway.jobs == {}
