"""A draft worker as its peers see it: one thread here takes both sides' turns."""

import time
from collections import Counter
from contextlib import closing, contextmanager

import msgspec
import pytest
from paceline.runtime.draft_worker.packed_branches import unpack

from paceline.cluster.pairing.ahead import PROBE_INTERVAL, PROBE_ROUNDS, WINDOW
from paceline.core.clock import VirtualClock
from paceline.runtime.draft_worker.scheduler import DraftLimits
from paceline.runtime.draft_worker.worker import DraftWorker
from paceline.runtime.wire.messages import (
    OLDEST,
    TO_DRAFT_WORKER,
    TO_TARGET,
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
    Rule,
    Sampling,
)
from paceline.runtime.wire.transport import Connection, Listener
from tests.runtime.pools import ScriptedCore

VOCAB = 1000


class Peer:
    """A target, by hand."""

    def __init__(self, worker):
        self.worker = worker
        self.line = Connection(worker.address, TO_TARGET)
        self.epoch = worker.epoch

    def close(self):
        self.line.close()

    def say(self, *messages):
        for message in messages:
            assert self.line.send(message)

    def hear(self, kind=None, seconds=10.0):
        """The next message (of a kind), the worker working meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.worker.turn(0.0)
            message = self.line.receive(0.002)
            if message is not None and (kind is None or isinstance(message, kind)):
                return message
        raise AssertionError(f"no {kind} came")

    def ask(self, number, round_, base, *tokens):
        """The answer to a round; the worker takes no turn more than it needs for it."""
        worker, traffic = self.worker, self.worker._listener.traffic
        rounds, sent = worker.snapshot().rounds, traffic.sent
        self.advance(number, round_, base, *tokens)
        while worker.snapshot().rounds == rounds:
            worker._hear(1.0)
        while traffic.sent == sent:
            worker.turn(0.0)
        answer = self.line.receive(5.0)
        assert isinstance(answer, Drafts)
        return answer

    def greet(self, vocabulary="v", version=VERSION, oldest=OLDEST):
        self.say(Hello(version, oldest, 9, vocabulary, "t"))
        return self.hear()

    def open(self, number, *ids, **more):
        self.say(Open(self.epoch, number, list(ids), 1, Sampling(), 1, **more))

    def advance(self, number, round_, base, *tokens, depth=3, ahead=False, held=0):
        self.say(Advance(self.epoch, [RoundRequest(number, round_, base, list(tokens), depth, held)], ahead))


@contextmanager
def serving(limits=None, clock=None, core=None):
    core = core or ScriptedCore(lambda ids: (ids[-1] + 1) % VOCAB)
    worker = DraftWorker("d", core, Listener("tcp://127.0.0.1:0", TO_DRAFT_WORKER), "v", VOCAB, limits, clock)
    try:
        yield worker
    finally:
        worker.stop()
        worker.run()
        assert not core.open, "rides leaked"


@pytest.fixture
def worker():
    with serving(DraftLimits(ahead_nodes=0)) as worker:
        yield worker


@pytest.fixture
def peer(worker):
    with closing(Peer(worker)) as peer:
        assert isinstance(peer.greet(), Hello)
        yield peer


def test_hello_says_who_it_is(worker):
    with closing(Peer(worker)) as peer:
        hello = peer.greet()
        assert (hello.version, hello.epoch, hello.vocabulary, hello.name) == (VERSION, worker.epoch, "v", "d")
        assert hello.max_sequences == 256


@pytest.mark.parametrize(("version", "oldest"), [(VERSION + 1, VERSION), (VERSION + 1, OLDEST), (VERSION - 1, OLDEST)])
def test_peers_one_version_apart_work_together(worker, version, oldest):
    with closing(Peer(worker)) as peer:
        assert isinstance(peer.greet(version=version, oldest=oldest), Hello)
        # A newer peer's messages are longer, an older one's shorter
        new = msgspec.msgpack.decode(TO_DRAFT_WORKER.encode(Open(worker.epoch, 1, [1, 2], 1, Sampling(), 1)))
        peer.line.socket.send(msgspec.msgpack.encode([*new, "new"] if version > VERSION else new[:7]))
        peer.advance(1, 1, 2)
        assert peer.hear().drafts[0].tokens == [3, 4, 5]


def test_it_learns_how_often_it_is_right():
    with serving(DraftLimits(ahead_nodes=32)) as worker, closing(Peer(worker)) as peer:
        peer.greet()
        peer.open(1, 5)
        peer.advance(1, 1, 1)
        last, length = 5, 1
        for round_ in range(2, 40):
            peer.hear(Drafts)
            right = last + 1
            last = (right + 100) % 900
            peer.advance(1, round_, length, right, last)  # the first is accepted, the second never
            length += 2
        peer.hear(Drafts)
        alphas = worker.snapshot().alphas
        assert alphas[0] > 0.9
        assert alphas[1] < 0.2


def test_under_rejection_nothing_is_sent_ahead_and_the_answer_is_ready_all_the_same():
    with serving(DraftLimits(ahead_nodes=32)) as worker, closing(Peer(worker)) as peer:
        peer.greet()
        peer.open(1, 5, 6, rule=Rule.REJECTION)
        peer.open(2, 5, 6)
        peer.say(Advance(peer.epoch, [RoundRequest(1, 1, 2, [], 3), RoundRequest(2, 1, 2, [], 3)], True))
        assert {one.sequence for one in peer.hear(Drafts).drafts} == {1, 2}
        for _ in range(30):
            worker.turn(0.0)
        peer.say(Ping(7))
        told = set()
        while not isinstance(message := peer.hear(), Pong):
            told |= {one.sequence for one in message.sequences}
        assert told == {2}
        peer.advance(1, 2, 2, 7, 8, 10, ahead=True)  # two accepted, then the likeliest rival of the third
        (drafted,) = peer.hear(Drafts).drafts
        assert (drafted.sequence, drafted.tokens, drafted.ready) == (1, [11, 12, 13], True)


def test_an_older_peer_is_sent_nothing_it_does_not_know():
    with serving(DraftLimits(ahead_nodes=32)) as worker:
        told = []
        for version in (2, 3):
            with closing(Peer(worker)) as peer:
                peer.greet(version=version, oldest=2)
                peer.open(1, 5, 6)
                peer.advance(1, 1, 2, ahead=True)
                peer.hear(Drafts)
                for _ in range(30):
                    worker.turn(0.0)
                peer.say(Ping(7))
                ahead = []
                while isinstance(message := peer.hear(), Branches):
                    ahead += message.sequences
                assert isinstance(message, Pong)
                assert ahead
                assert all(bool(one.packed) == (version == 3) for one in ahead)
                told.append([branch for one in ahead for branch in unpack(one)])
                peer.say(Goodbye())
        assert told[0] == told[1], "the same branches, however they are written"


def test_what_was_kept_of_its_answer_need_not_be_sent_back(peer):
    peer.open(1, 5, 6)
    peer.advance(1, 1, 2)
    assert peer.hear(Drafts).drafts[0].tokens == [7, 8, 9]
    peer.say(Advance(peer.epoch, [RoundRequest(1, 2, 2, [40], 3, kept=2)]))
    assert peer.hear(Drafts).drafts[0].tokens == [41, 42, 43]
    peer.say(Advance(peer.epoch, [RoundRequest(1, 3, 5, [50], 3)]))  # 5 6 7 8 40
    assert peer.hear(Drafts).drafts[0].tokens == [51, 52, 53]


def test_nobody_can_keep_more_than_was_offered(peer):
    peer.open(1, 5, 6)
    peer.advance(1, 1, 2)
    peer.hear(Drafts)
    peer.say(Advance(peer.epoch, [RoundRequest(1, 2, 2, [40], 3, kept=4)]))
    error = peer.hear(Error)
    assert (error.code, error.sequences) == (ErrorCode.BASE, [1])


@pytest.mark.parametrize(
    ("hello", "fault"),
    [
        ({"vocabulary": "other"}, ErrorCode.VOCABULARY),
        ({"version": VERSION + 9, "oldest": VERSION + 1}, ErrorCode.VERSION),
    ],
)
def test_who_does_not_fit_is_told_why(worker, hello, fault):
    with closing(Peer(worker)) as peer:
        error = peer.greet(**hello)
        assert (type(error), error.code) == (Error, fault)
        peer.open(1, 5)
        assert peer.hear().code == ErrorCode.STRANGER


def test_a_round_and_the_next(peer):
    peer.open(1, 5, 6)
    peer.advance(1, 1, 2)
    answer = peer.hear()
    assert isinstance(answer, Drafts)
    assert (answer.epoch, answer.drafts[0].sequence, answer.drafts[0].round) == (peer.epoch, 1, 1)
    assert answer.drafts[0].tokens == [7, 8, 9]
    peer.advance(1, 2, 2, 7, 8, 50, depth=2)
    assert peer.hear().drafts[0].tokens == [51, 52]


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        (RoundRequest(2, 1, 2, [], 3), ErrorCode.UNKNOWN),
        (RoundRequest(1, 1, 3, [], 3), ErrorCode.BASE),
        (RoundRequest(1, 1, 2, [VOCAB], 3), ErrorCode.MALFORMED),
    ],
)
def test_what_does_not_fit_must_be_opened_again(peer, step, fault):
    peer.open(1, 5, 6)
    peer.say(Advance(peer.epoch, [step]))
    error = peer.hear()
    assert (error.code, error.sequences) == (fault, [step.sequence])
    peer.open(1, 5, 6)
    peer.advance(1, 1, 2)
    assert peer.hear().drafts[0].tokens == [7, 8, 9]


def test_another_epoch_is_fenced_off(peer):
    for message in (Open(1, 1, [5], 1, Sampling(), 1), Advance(1, []), Close(1, [1])):
        peer.say(message)
        assert peer.hear().code == ErrorCode.EPOCH


def test_a_round_that_was_overtaken_is_not_answered(peer):
    peer.open(1, 5, 6)
    peer.advance(1, 5, 2)
    assert peer.hear().drafts[0].round == 5
    peer.advance(1, 4, 2)
    peer.say(Ping(3))
    assert peer.hear() == Pong(peer.epoch, 3, peer.worker._load())


@pytest.mark.parametrize(
    "message",
    [
        Open(0, 1, [], 1, Sampling(), 1),
        Open(0, 1, [VOCAB], 1, Sampling(), 1),
        Open(0, 1, [5], 0, Sampling(), 1),
        Open(0, 1, [5], 2, Sampling(), 1),
        Open(0, 1, [5], 1, Sampling(logit_bias={VOCAB: 1.0}), 1),
    ],
)
def test_a_sequence_that_makes_no_sense_is_refused(peer, message):
    peer.say(msgspec.structs.replace(message, epoch=peer.epoch))
    assert peer.hear().code == ErrorCode.MALFORMED


def test_no_room_is_busy_and_room_again_after_closing():
    with serving(DraftLimits(max_sequences=2, max_tokens=100, ahead_nodes=0)) as worker, closing(Peer(worker)) as peer:
        peer.greet()
        peer.open(1, 5)
        peer.open(2, 5)
        peer.open(3, 5)
        busy = peer.hear()
        assert isinstance(busy, Busy)
        assert busy.sequences == [3]
        assert busy.retry_ms > 0
        peer.say(Close(peer.epoch, [1, 99]))
        peer.open(3, *[5] * 99)
        peer.open(2, 5, 6, 7)
        assert peer.hear(Busy).sequences == [2], "tokens are counted too"


def test_too_many_targets_are_busy():
    with serving(DraftLimits(max_peers=1)) as worker, closing(Peer(worker)) as one, closing(Peer(worker)) as two:
        assert isinstance(one.greet(), Hello)
        assert isinstance(two.greet(), Busy)
        one.say(Goodbye())
        assert isinstance(two.greet(), Hello | Busy)


def test_goodbye_and_silence_free_everything():
    clock = VirtualClock()
    with (
        serving(DraftLimits(silence=30.0), clock) as worker,
        closing(Peer(worker)) as polite,
        closing(Peer(worker)) as silent,
    ):
        for peer in (polite, silent):
            peer.greet()
            peer.open(1, 5, 6)
            peer.advance(1, 1, 2)
            peer.hear(Drafts)
        assert worker.snapshot().sequences == 2
        polite.say(Goodbye())
        while worker.snapshot().peers == 2:
            worker.turn(0.01)
        clock.advance(31.0)
        worker.turn(0.0)
        assert (worker.snapshot().peers, worker.snapshot().sequences) == (0, 0)
        silent.advance(1, 2, 2)
        assert silent.hear(Error).code == ErrorCode.STRANGER


def test_targets_share_a_batch_by_turns():
    """One target with many sequences, another with one, and room for four rides in a pass."""
    core = ScriptedCore(lambda ids: 1)
    with (
        serving(DraftLimits(max_batch=4, ahead_nodes=0), core=core) as worker,
        closing(Peer(worker)) as many,
        closing(Peer(worker)) as few,
    ):
        many.greet()
        few.greet()
        for number in range(40):
            many.open(number, 5)
        few.open(1, 6)
        worker.turn(0.05)
        many.say(Advance(many.epoch, [RoundRequest(number, 1, 1, [], 8) for number in range(40)]))
        few.advance(1, 1, 1, depth=8)
        few.hear(Drafts)
        assert len(core.steps) <= 12, "it waits for its eight passes and not for the other's eighty"
        assert all(len(rides) <= 4 for rides in core.steps)
        for _ in range(200):
            worker.turn(0.0)
        rides = Counter(ride for rides in core.steps for ride in rides)
        assert set(rides.values()) == {8}


def test_sequences_of_different_targets_ride_together():
    core = ScriptedCore(lambda ids: 1)
    with (
        serving(DraftLimits(ahead_nodes=0), core=core) as worker,
        closing(Peer(worker)) as one,
        closing(Peer(worker)) as two,
    ):
        for peer in (one, two):
            peer.greet()
            peer.open(1, 5)  # the same number: numbers are the target's own
        worker.turn(0.05)
        core.steps.clear()
        one.say(Advance(one.epoch, [RoundRequest(1, 1, 1, [], 2)]))
        two.say(Advance(two.epoch, [RoundRequest(1, 1, 1, [], 2)]))
        while worker.snapshot().waiting < 2:
            worker._hear(0.05)
        one.hear(Drafts)
        two.hear(Drafts)
        assert [len(rides) for rides in core.steps] == [2, 2]


def test_what_was_ready_does_not_wait_for_what_was_not():
    core = ScriptedCore(lambda ids: (ids[-1] + 1) % VOCAB)
    with serving(DraftLimits(ahead_nodes=16), core=core) as worker, closing(Peer(worker)) as peer:
        peer.greet()
        for number in (1, 2):
            peer.open(number, 5, 6)
            peer.advance(number, 1, 2, depth=4)
            peer.hear(Drafts)
        for _ in range(20):
            worker.turn(0.0)
        passes = len(core.steps)
        # 1 accepts all, as foreseen; 2 does something else
        steps = [RoundRequest(1, 2, 2, [7, 8, 9, 10, 11], 4), RoundRequest(2, 2, 2, [500], 4)]
        sent = worker._listener.traffic.sent
        peer.say(Advance(peer.epoch, steps))
        while worker._listener.traffic.sent == sent:
            worker.turn(0.1)
        assert len(core.steps) <= passes + 1
        first = peer.hear(Drafts)
        assert [(d.sequence, d.ready, d.tokens) for d in first.drafts] == [(1, True, [12, 13, 14, 15])]
        second = peer.hear(Drafts)
        assert [(d.sequence, d.ready, d.tokens) for d in second.drafts] == [(2, False, [501, 502, 503, 504])]


def drafted_on(worker, limit=100):
    """Passes made while nobody asks."""
    made = 0
    while made < limit and worker.turn(0.0):
        made += 1
    return made


def test_it_stops_drafting_ahead_where_nothing_hits_and_resumes_when_it_does():
    with serving(DraftLimits(ahead_nodes=9)) as worker, closing(Peer(worker)) as peer:
        peer.greet()
        peer.open(1, 5)
        length, round_, made = 1, 0, []

        def go_on(*tokens):
            nonlocal length, round_
            round_ += 1
            answer = peer.ask(1, round_, length, *tokens)
            length += len(tokens)
            made.append(drafted_on(worker))
            return answer.drafts[0], answer.load

        drafted, load = go_on()
        while load.resting is None:
            assert round_ < 2 * WINDOW
            drafted, load = go_on((drafted.tokens[0] + 500) % VOCAB)
        assert all(made[:-1])
        assert worker.snapshot().resting == 1
        made.clear()
        for _ in range(PROBE_INTERVAL):
            first = (drafted.tokens[0] + 500) % VOCAB
            drafted, load = go_on(first)
            assert drafted.tokens == [(first + i) % VOCAB for i in (1, 2, 3)], "it answers on demand"
        assert sum(passes > 0 for passes in made) == PROBE_ROUNDS
        assert load.resting == 0
        for _ in range(PROBE_INTERVAL + 1):
            drafted, load = go_on(*drafted.tokens, (drafted.tokens[-1] + 1) % VOCAB)
        assert load.resting is None
        assert drafted.ready
        assert made[-1]
        assert worker.snapshot().resting == 0


@pytest.mark.parametrize(("seconds", "rests"), [(0.012, True), (0.001, False)])
def test_it_stops_drafting_ahead_where_that_is_in_the_way(seconds, rests):
    """One of three tokens is there when it is asked for, in the midst of a pass that takes `seconds`, and 1 ms on demand."""
    clock = VirtualClock()

    class Timed(ScriptedCore):
        seconds = 0.001

        def step(self, rides):
            clock.advance(self.seconds)
            return super().step(rides)

    core = Timed(lambda ids: (ids[-1] + 1) % VOCAB)
    with serving(DraftLimits(ahead_nodes=3), clock, core) as worker, closing(Peer(worker)) as peer:
        peer.greet()
        peer.open(1, 5)
        tokens, length = [], 1
        for round_ in range(1, 80):
            core.seconds = 0.001
            (drafted,) = peer.ask(1, round_, length, *tokens).drafts
            length += len(tokens)
            core.seconds = seconds
            for _ in range(2):  # the token after the last, and one of the next draft
                worker.turn(0.0)
            tokens = [*drafted.tokens, (drafted.tokens[-1] + 1) % VOCAB]
        assert (worker.snapshot().resting == 1) is rests


def test_a_failing_pass_costs_its_sequences_and_nothing_else(worker, peer, caplog):
    def fail(rides):
        raise RuntimeError("the device is gone")

    peer.open(1, 5)
    worker._core.step, good = fail, worker._core.step
    peer.advance(1, 1, 1)
    error = peer.hear(Error)
    assert (error.code, error.sequences) == (ErrorCode.UNKNOWN, [1])
    assert "the device is gone" in caplog.text
    worker._core.step = good
    peer.open(1, 5)
    peer.advance(1, 1, 1)
    assert peer.hear(Drafts).drafts[0].tokens == [6, 7, 8]


def test_garbage_is_answered_and_counted(worker, peer):
    peer.line.socket.send(b"\xc1 not a message")
    assert peer.hear(Error).code == ErrorCode.MALFORMED
    assert worker.snapshot().malformed == 1
    peer.open(1, 5)
    peer.advance(1, 1, 1)
    assert peer.hear(Drafts).drafts[0].tokens == [6, 7, 8]
