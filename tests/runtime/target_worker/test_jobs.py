"""What a gateway is told of what it asked for."""

from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import FinishReason, Origin
from paceline.runtime.target_worker.jobs import MAX_REASON, GatewayJobs, Job
from paceline.runtime.wire.stream_messages import MAX_OUTPUTS, Outputs, RequestFailed


def job_of(gateway: GatewayJobs, attempt: int = 1, request: Request | None = None) -> Job:
    job = gateway.jobs[attempt] = Job(b"g", attempt, "r")
    job.begin(request or Request("r", (1, 2), SamplingParams()))
    return job


def step(*tokens: int, choice: int = 0, end: bool = False) -> StepOutput:
    reason = FinishReason.LENGTH if end else None
    return StepOutput("r", choice, choice, tokens, (Origin.PLAIN,) * len(tokens), "", 0, 0, finish_reason=reason)


def sent(gateway: GatewayJobs) -> list[Outputs | RequestFailed]:
    messages: list[Outputs | RequestFailed] = []
    gateway.flush(lambda message: messages.append(message) is None)
    return messages


def test_outputs_say_where_they_begin_and_the_last_one_ends_the_job() -> None:
    gateway = GatewayJobs()
    job = job_of(gateway)
    gateway.tell([(job, step(5, 6)), (job, step(7))])
    gateway.tell([(job, step(8, end=True))])
    told = [output for message in sent(gateway) if isinstance(message, Outputs) for output in message.outputs]
    assert [(one.start, list(one.tokens)) for one in told] == [(0, [5, 6]), (2, [7]), (3, [8])]
    assert gateway.jobs == {}


def test_a_continued_job_counts_on_from_what_was_committed_elsewhere() -> None:
    gateway = GatewayJobs()
    request = Request("r", (1, 2), SamplingParams(n=3), committed=((9, 9), None, ()))
    job = job_of(gateway, request=request)
    gateway.tell([(job, step(5, choice=0, end=True)), (job, step(6, choice=2))])
    (message,) = sent(gateway)
    assert isinstance(message, Outputs)
    assert [(one.choice, one.start) for one in message.outputs] == [(0, 2), (2, 0)]
    assert gateway.jobs == {1: job}  # the third choice goes on; the second was finished before
    gateway.tell([(job, step(7, choice=2, end=True))])
    assert gateway.jobs == {}


def test_nothing_is_told_of_a_job_that_was_withdrawn_or_replaced() -> None:
    gateway = GatewayJobs()
    old = job_of(gateway)
    new = job_of(gateway)
    gateway.tell([(old, step(5)), (old, PacelineError("gone"))])
    assert (sent(gateway), gateway.jobs) == ([], {1: new})


def test_an_error_ends_a_job_and_says_whose_fault_it_is() -> None:
    gateway = GatewayJobs()
    gateway.tell([(job_of(gateway, 1), PacelineError("broken")), (job_of(gateway, 2), InvalidRequest("no", field="n"))])
    assert sent(gateway) == [RequestFailed(1, False, "broken", None), RequestFailed(2, True, "no", "n")]
    assert gateway.jobs == {}


def test_a_reason_is_text_of_bounded_length_whatever_it_quotes() -> None:
    gateway = GatewayJobs()
    gateway.refuse(1, PacelineError("\ud800" * (MAX_REASON + 1)))
    (message,) = sent(gateway)
    assert isinstance(message, RequestFailed)
    assert message.message == "?" * MAX_REASON


def test_what_is_not_taken_stays_in_order_and_no_message_is_too_large() -> None:
    gateway = GatewayJobs()
    job = job_of(gateway)
    gateway.tell([(job, step(i % 100)) for i in range(MAX_OUTPUTS + 1)])
    gateway.refuse(7, PacelineError("busy"))
    gateway.flush(lambda message: False)
    messages = sent(gateway)
    assert [len(one.outputs) if isinstance(one, Outputs) else one.attempt for one in messages] == [MAX_OUTPUTS, 1, 7]
    assert not gateway.outbox
