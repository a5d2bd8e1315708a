"""A draft worker as its targets see it; one thread runs both sides."""

from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace

import msgspec
import pytest

from paceline.core.clock import VirtualClock
from paceline.core.request import SamplingParams
from paceline.drafting.branches import unpack
from paceline.drafting.scheduler import DraftLimits
from paceline.drafting.worker import DraftWorker
from paceline.policy.pairing.ahead import PROBE_INTERVAL, PROBE_ROUNDS, WINDOW
from paceline.wire.draft_messages import (
    VERSION,
    Advance,
    Branches,
    Busy,
    Close,
    Drafts,
    Error,
    ErrorCode,
    Goodbye,
    Hello,
    Open,
    Ping,
    Pong,
    RoundRequest,
)
from tests.processes.memory_link import MemoryConnection, MemoryListener
from tests.processes.pools import TOKENIZER, ScriptedCore

VOCAB = 1000


class Target:
    """A target that sends what the test calls for."""

    def __init__(self, worker):
        self.worker = worker
        self.connection = MemoryConnection(worker._listener, worker._clock)
        self.epoch = worker.epoch

    def close(self):
        self.connection.close()

    def send(self, *messages):
        for message in messages:
            assert self.connection.send(message)

    def receive(self, kind=None):
        """The next message of a kind; the worker runs no longer than it needs for it."""
        for _ in range(1000):
            message = self.connection.receive()
            if message is not None and (kind is None or isinstance(message, kind)):
                return message
            if message is None:
                self.worker.run_once(0.0)
        raise AssertionError(f"no {kind} arrived")

    def draft(self, number, round_, base, *tokens):
        """The answer to a round."""
        while self.connection.receive() is not None:
            pass
        self.advance(number, round_, base, *tokens)
        return self.receive(Drafts)

    def greet(self, tokenizer=TOKENIZER, version=VERSION):
        self.send(Hello(version, 9, tokenizer, "t"))
        return self.receive()

    def open(self, number, *ids, **more):
        self.send(Open(self.epoch, number, list(ids), 1, SamplingParams(), 1, **more))

    def advance(self, number, round_, base, *tokens, depth=3, send_ahead=False):
        self.send(Advance(self.epoch, [RoundRequest(number, round_, base, list(tokens), depth)], send_ahead))


@contextmanager
def serving(limits=None, clock=None, core=None):
    core = core or ScriptedCore(lambda ids: (ids[-1] + 1) % VOCAB)
    worker = DraftWorker("d", core, MemoryListener(), TOKENIZER, VOCAB, limits, clock or VirtualClock())
    try:
        yield worker
    finally:
        worker.stop()
        worker.run()
        assert not core.open, "branches leaked"


@pytest.fixture
def worker():
    with serving(DraftLimits(max_branch_tokens=0)) as worker:
        yield worker


@pytest.fixture
def target(worker):
    with closing(Target(worker)) as target:
        assert isinstance(target.greet(), Hello)
        yield target


def test_hello_describes_the_worker(worker):
    with closing(Target(worker)) as target:
        hello = target.greet()
        assert (hello.version, hello.epoch, hello.tokenizer, hello.name) == (VERSION, worker.epoch, TOKENIZER, "d")
        assert hello.max_sequences == 256


def test_alternatives_are_sent_on_request(target):
    """With the draft, also to a target that has the draft from a branch; the most likely first."""
    target.open(1, 5)
    target.send(Advance(target.epoch, [RoundRequest(1, 1, 1, [], 3, num_alternatives=4)]))
    (draft,) = target.receive(Drafts).drafts
    assert draft.tokens == [6, 7, 8]
    keys = list(zip(draft.alternatives[::2], draft.alternatives[1::2], strict=True))
    assert len(set(keys)) == 4
    assert all(token in range(draft.tokens[accepted] + 1, draft.tokens[accepted] + 4) for accepted, token in keys)
    target.send(Advance(target.epoch, [RoundRequest(1, 2, 1, [6, 7, 8, 9], 3)]))
    assert target.receive(Drafts).drafts[0].alternatives == []


def test_worker_learns_acceptance():
    with serving(DraftLimits(max_branch_tokens=32)) as worker, closing(Target(worker)) as target:
        target.greet()
        target.open(1, 5)
        target.advance(1, 1, 1)
        last, length = 5, 1
        for round_ in range(2, 40):
            target.receive(Drafts)
            right = last + 1
            last = (right + 100) % 900
            target.advance(1, round_, length, right, last)  # the first is accepted, the second never
            length += 2
        target.receive(Drafts)
        alphas = worker.status().alphas
        assert alphas[0] > 0.9
        assert alphas[1] < 0.2


def test_under_rejection_drafts_are_made_ahead_but_not_sent_ahead():
    with serving(DraftLimits(max_branch_tokens=32)) as worker, closing(Target(worker)) as target:
        target.greet()
        target.open(1, 5, 6, rule="rejection")
        target.open(2, 5, 6)
        target.send(Advance(target.epoch, [RoundRequest(1, 1, 2, [], 3), RoundRequest(2, 1, 2, [], 3)], True))
        assert {one.sequence for one in target.receive(Drafts).drafts} == {1, 2}
        for _ in range(30):
            worker.run_once(0.0)
        target.send(Ping(7))
        sequences = set()
        while not isinstance(message := target.receive(), Pong):
            sequences |= {record.sequence for record in message.sequences}
        assert sequences == {2}
        target.advance(1, 2, 2, 7, 8, 10, send_ahead=True)  # two accepted, then the first alternative of the third
        (drafted,) = target.receive(Drafts).drafts
        assert (drafted.sequence, drafted.tokens, drafted.was_ready) == (1, [11, 12, 13], True)


def test_branches_are_sent_before_they_are_requested():
    with serving(DraftLimits(max_branch_tokens=32)) as worker, closing(Target(worker)) as target:
        target.greet()
        target.open(1, 5, 6)
        target.advance(1, 1, 2, send_ahead=True)
        target.receive(Drafts)
        for _ in range(30):
            worker.run_once(0.0)
        target.send(Ping(7))
        branches = {}
        while isinstance(message := target.receive(), Branches):
            branches |= {key: tokens for record in message.sequences for key, tokens in unpack(record)}
        assert isinstance(message, Pong)
        assert branches[3, 10] == [11, 12, 13], "the outcome after full acceptance"
        assert all(tokens == [key.token + i for i in (1, 2, 3)] for key, tokens in branches.items())
        assert len(branches) > 1


def test_kept_tokens_are_not_sent_back(target):
    target.open(1, 5, 6)
    target.advance(1, 1, 2)
    assert target.receive(Drafts).drafts[0].tokens == [7, 8, 9]
    target.send(Advance(target.epoch, [RoundRequest(1, 2, 2, [40], 3, num_kept=2)]))
    assert target.receive(Drafts).drafts[0].tokens == [41, 42, 43]
    target.send(Advance(target.epoch, [RoundRequest(1, 3, 5, [50], 3)]))  # 5 6 7 8 40
    assert target.receive(Drafts).drafts[0].tokens == [51, 52, 53]


def test_num_kept_beyond_the_offer_is_an_error(target):
    target.open(1, 5, 6)
    target.advance(1, 1, 2)
    target.receive(Drafts)
    target.send(Advance(target.epoch, [RoundRequest(1, 2, 2, [40], 3, num_kept=4)]))
    error = target.receive(Error)
    assert (error.code, error.sequences) == (ErrorCode.LENGTH, [1])


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({"tokenizer": replace(TOKENIZER, vocabulary="other")}, ErrorCode.TOKENIZER),
        ({"tokenizer": None}, ErrorCode.TOKENIZER),
        ({"version": VERSION + 1}, ErrorCode.VERSION),
        ({"version": VERSION - 1}, ErrorCode.VERSION),
    ],
)
def test_incompatible_target_receives_an_error(worker, hello, code):
    with closing(Target(worker)) as target:
        error = target.greet(**hello)
        assert (type(error), error.code) == (Error, code)
        target.open(1, 5)
        assert target.receive().code == ErrorCode.NO_HELLO


def test_two_rounds(target):
    target.open(1, 5, 6)
    target.advance(1, 1, 2)
    answer = target.receive()
    assert isinstance(answer, Drafts)
    assert (answer.epoch, answer.drafts[0].sequence, answer.drafts[0].round) == (target.epoch, 1, 1)
    assert answer.drafts[0].tokens == [7, 8, 9]
    target.advance(1, 2, 2, 7, 8, 50, depth=2)
    assert target.receive().drafts[0].tokens == [51, 52]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (RoundRequest(2, 1, 2, [], 3), ErrorCode.UNKNOWN_SEQUENCE),
        (RoundRequest(1, 1, 3, [], 3), ErrorCode.LENGTH),
        (RoundRequest(1, 1, 2, [VOCAB], 3), ErrorCode.MALFORMED),
    ],
)
def test_sequence_with_an_error_must_be_opened_again(target, request_, code):
    target.open(1, 5, 6)
    target.send(Advance(target.epoch, [request_]))
    error = target.receive()
    assert (error.code, error.sequences) == (code, [request_.sequence])
    target.open(1, 5, 6)
    target.advance(1, 1, 2)
    assert target.receive().drafts[0].tokens == [7, 8, 9]


def test_message_for_another_epoch_is_an_error(target):
    for message in (Open(1, 1, [5], 1, SamplingParams(), 1), Advance(1, []), Close(1, [1])):
        target.send(message)
        assert target.receive().code == ErrorCode.EPOCH


def test_stale_round_is_not_answered(target):
    target.open(1, 5, 6)
    target.advance(1, 5, 2)
    assert target.receive().drafts[0].round == 5
    target.advance(1, 4, 2)
    target.send(Ping(3))
    assert target.receive() == Pong(target.epoch, 3, target.worker._sender.load())


@pytest.mark.parametrize(
    "message",
    [
        Open(0, 1, [], 1, SamplingParams(), 1),
        Open(0, 1, [VOCAB], 1, SamplingParams(), 1),
        Open(0, 1, [5], 0, SamplingParams(), 1),
        Open(0, 1, [5], 2, SamplingParams(), 1),
        Open(0, 1, [5], 1, SamplingParams(logit_bias={VOCAB: 1.0}), 1),
    ],
)
def test_invalid_sequence_is_rejected(target, message):
    target.send(msgspec.structs.replace(message, epoch=target.epoch))
    assert target.receive().code == ErrorCode.MALFORMED


def test_full_worker_is_busy_until_a_sequence_closes():
    with (
        serving(DraftLimits(max_sequences=2, max_tokens=100, max_branch_tokens=0)) as worker,
        closing(Target(worker)) as target,
    ):
        target.greet()
        target.open(1, 5)
        target.open(2, 5)
        target.open(3, 5)
        busy = target.receive()
        assert isinstance(busy, Busy)
        assert busy.sequences == [3]
        assert busy.retry_ms > 0
        target.send(Close(target.epoch, [1, 99]))
        target.open(3, *[5] * 99)
        target.open(2, 5, 6, 7)
        assert target.receive(Busy).sequences == [2], "tokens count too"


def test_worker_is_busy_for_too_many_targets():
    with serving(DraftLimits(max_peers=1)) as worker, closing(Target(worker)) as one, closing(Target(worker)) as two:
        assert isinstance(one.greet(), Hello)
        assert isinstance(two.greet(), Busy)
        one.send(Goodbye())
        assert isinstance(two.greet(), Hello | Busy)


def test_goodbye_and_silence_close_all_sequences():
    clock = VirtualClock()
    with (
        serving(DraftLimits(silence=30.0), clock) as worker,
        closing(Target(worker)) as polite,
        closing(Target(worker)) as silent,
    ):
        for target in (polite, silent):
            target.greet()
            target.open(1, 5, 6)
            target.advance(1, 1, 2)
            target.receive(Drafts)
        assert worker.status().sequences == 2
        polite.send(Goodbye())
        worker.run_once(0.0)
        assert worker.status().peers == 1
        clock.advance(31.0)
        worker.run_once(0.0)
        assert (worker.status().peers, worker.status().sequences) == (0, 0)
        silent.advance(1, 2, 2)
        assert silent.receive(Error).code == ErrorCode.NO_HELLO


def test_targets_share_a_batch_round_robin():
    """One target with many sequences, one with a single sequence, and four branches per pass."""
    core = ScriptedCore(lambda ids: 1)
    with (
        serving(DraftLimits(max_batch=4, max_branch_tokens=0), core=core) as worker,
        closing(Target(worker)) as many,
        closing(Target(worker)) as few,
    ):
        many.greet()
        few.greet()
        for number in range(40):
            many.open(number, 5)
        few.open(1, 6)
        many.send(Advance(many.epoch, [RoundRequest(number, 1, 1, [], 8) for number in range(40)]))
        few.advance(1, 1, 1, depth=8)
        few.receive(Drafts)
        assert len(core.steps) <= 12, "it waits for its own eight passes, not for the eighty of the other"
        assert all(len(branches) <= 4 for branches in core.steps)
        for _ in range(200):
            worker.run_once(0.0)
        branches = Counter(branch for branches in core.steps for branch in branches)
        assert set(branches.values()) == {8}


def test_sequences_of_different_targets_share_a_pass():
    core = ScriptedCore(lambda ids: 1)
    with (
        serving(DraftLimits(max_branch_tokens=0), core=core) as worker,
        closing(Target(worker)) as one,
        closing(Target(worker)) as two,
    ):
        for target in (one, two):
            target.greet()
            target.open(1, 5)  # the same number: each target has its own numbers
        worker.run_once(0.0)
        core.steps.clear()
        one.send(Advance(one.epoch, [RoundRequest(1, 1, 1, [], 2)]))
        two.send(Advance(two.epoch, [RoundRequest(1, 1, 1, [], 2)]))
        one.receive(Drafts)
        two.receive(Drafts)
        assert [len(branches) for branches in core.steps] == [2, 2]


def test_ready_draft_does_not_wait_for_others():
    core = ScriptedCore(lambda ids: (ids[-1] + 1) % VOCAB)
    with serving(DraftLimits(max_branch_tokens=16), core=core) as worker, closing(Target(worker)) as target:
        target.greet()
        for number in (1, 2):
            target.open(number, 5, 6)
            target.advance(number, 1, 2, depth=4)
            target.receive(Drafts)
        for _ in range(20):
            worker.run_once(0.0)
        passes = len(core.steps)
        # 1 accepts all, which is prepared; 2 has an unprepared outcome
        requests = [RoundRequest(1, 2, 2, [7, 8, 9, 10, 11], 4), RoundRequest(2, 2, 2, [500], 4)]
        target.send(Advance(target.epoch, requests))
        first = target.receive(Drafts)
        assert len(core.steps) <= passes + 1
        assert [(d.sequence, d.was_ready, d.tokens) for d in first.drafts] == [(1, True, [12, 13, 14, 15])]
        second = target.receive(Drafts)
        assert [(d.sequence, d.was_ready, d.tokens) for d in second.drafts] == [(2, False, [501, 502, 503, 504])]


def num_passes_ahead(worker, limit=100):
    """Passes that the worker runs without a request."""
    count = 0
    while count < limit and worker.run_once(0.0):
        count += 1
    return count


def test_drafting_ahead_pauses_without_hits_and_resumes_with_hits():
    with serving(DraftLimits(max_branch_tokens=9)) as worker, closing(Target(worker)) as target:
        target.greet()
        target.open(1, 5)
        length, round_, passes_ahead = 1, 0, []

        def next_round(*tokens):
            nonlocal length, round_
            round_ += 1
            answer = target.draft(1, round_, length, *tokens)
            length += len(tokens)
            passes_ahead.append(num_passes_ahead(worker))
            return answer.drafts[0], answer.load

        drafted, load = next_round()
        while load.paused_hit_percent is None:
            assert round_ < 2 * WINDOW
            drafted, load = next_round((drafted.tokens[0] + 500) % VOCAB)
        assert all(passes_ahead[:-1])
        assert worker.status().paused == 1
        passes_ahead.clear()
        for _ in range(PROBE_INTERVAL):
            first = (drafted.tokens[0] + 500) % VOCAB
            drafted, load = next_round(first)
            assert drafted.tokens == [(first + i) % VOCAB for i in (1, 2, 3)], "drafted on demand"
        assert sum(passes > 0 for passes in passes_ahead) == PROBE_ROUNDS
        assert load.paused_hit_percent == 0
        for _ in range(PROBE_INTERVAL + 1):
            drafted, load = next_round(*drafted.tokens, (drafted.tokens[-1] + 1) % VOCAB)
        assert load.paused_hit_percent is None
        assert drafted.was_ready
        assert passes_ahead[-1]
        assert worker.status().paused == 0


@pytest.mark.parametrize(("seconds", "pauses"), [(0.012, True), (0.001, False)])
def test_drafting_ahead_pauses_if_it_delays_requests(seconds, pauses):
    """One of three tokens is ready; the request arrives during a pass of `seconds`, and a pass on demand takes 1 ms."""
    clock = VirtualClock()

    class TimedCore(ScriptedCore):
        seconds = 0.001

        def step(self, branches):
            clock.advance(self.seconds)
            return super().step(branches)

    core = TimedCore(lambda ids: (ids[-1] + 1) % VOCAB)
    with serving(DraftLimits(max_branch_tokens=3), clock, core) as worker, closing(Target(worker)) as target:
        target.greet()
        target.open(1, 5)
        tokens, length = [], 1
        for round_ in range(1, 80):
            core.seconds = 0.001
            (drafted,) = target.draft(1, round_, length, *tokens).drafts
            length += len(tokens)
            core.seconds = seconds
            for _ in range(2):  # the token after the draft, and one of the next draft
                worker.run_once(0.0)
            tokens = [*drafted.tokens, (drafted.tokens[-1] + 1) % VOCAB]
        assert (worker.status().paused == 1) is pauses


def test_failed_pass_closes_its_sequences_only(worker, target, caplog):
    def fail(branches):
        raise RuntimeError("the device is gone")

    target.open(1, 5)
    worker._backend.step, good = fail, worker._backend.step
    target.advance(1, 1, 1)
    error = target.receive(Error)
    assert (error.code, error.sequences) == (ErrorCode.UNKNOWN_SEQUENCE, [1])
    assert "the device is gone" in caplog.text
    worker._backend.step = good
    target.open(1, 5)
    target.advance(1, 1, 1)
    assert target.receive(Drafts).drafts[0].tokens == [6, 7, 8]


def test_malformed_message_is_answered_and_counted(worker, target):
    target.connection.send_bytes(b"\xc1 not a message")
    assert target.receive(Error).code == ErrorCode.MALFORMED
    assert worker.status().malformed == 1
    target.open(1, 5)
    target.advance(1, 1, 1)
    assert target.receive(Drafts).drafts[0].tokens == [6, 7, 8]


def test_a_drain_ends_after_the_rounds_that_targets_wait_for():
    core = ScriptedCore(lambda ids: (ids[-1] + 1) % VOCAB)
    worker = DraftWorker("d", core, MemoryListener(), TOKENIZER, VOCAB, clock=VirtualClock())
    with closing(Target(worker)) as target, closing(Target(worker)) as late:
        target.greet()
        target.open(1, 5, 6)
        target.advance(1, 1, 2)
        worker._inbox.receive(0.0)
        late.send(Hello(VERSION, 9, TOKENIZER, "late"))
        worker.drain(60.0)
        worker.run()
        answer = target.connection.receive()
        assert isinstance(answer, Drafts)
        assert answer.drafts[0].tokens == [7, 8, 9]
        assert target.connection.receive() == Goodbye("draining")
    assert not core.open
