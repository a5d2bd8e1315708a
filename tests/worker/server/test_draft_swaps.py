"""A new draft loads beside the engine, is tried on its thread, and is reported with the worker's status."""

import threading
from collections.abc import Callable, Iterator

import pytest

from paceline.core.errors import UnsupportedModel
from paceline.core.status import DraftSwapStatus
from paceline.engine.loop import EngineLoop
from paceline.models.drafts.exchanges import AnyDraft
from paceline.wire.draft_messages import VERSION, Hello
from paceline.wire.gateway_messages import TO_GATEWAY, TO_TARGET_WORKER, StatusReport, StatusRequest, SwapDraft
from paceline.wire.transport import Connection, Listener
from paceline.worker.server.draft_swap import DraftSwaps
from paceline.worker.server.draft_trial import AlternatingDraftTrial
from tests.engine.harness import engine_of
from tests.fakes import StepClock, draft_model, request, tiny_engine, tiny_model
from tests.heads import tiny_eagle
from tests.processes.target_harness import engine_server

TARGET = tiny_model()


class Worker:
    """A loop whose draft is bad, and its swaps."""

    def __init__(self, load: Callable[[str], AnyDraft], clock: StepClock | None = None) -> None:
        self.hook = AlternatingDraftTrial(clock or StepClock(), seed=0)
        self.loop = EngineLoop(tiny_engine(TARGET, draft_model(tiny_model(seed=5)), hooks=(self.hook,)))
        self.swaps = DraftSwaps(self.hook, self.loop, "old", load)

    @property
    def swap(self) -> DraftSwapStatus:
        status = self.swaps.status
        assert status is not None
        assert status.swap is not None
        return status.swap

    def wait_loaded(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "paceline-draft-swap":
                thread.join()

    def generate(self, number: int) -> None:
        done = threading.Event()
        self.loop.submit(
            request(f"r{number}", [number % 40, 2, 3], max_tokens=16, temperature=0.0),
            lambda event: done.set() if getattr(event, "finish_reason", None) or isinstance(event, Exception) else None,
        )
        assert done.wait(60)


@pytest.fixture
def make() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def made(load: Callable[[str], AnyDraft], **options: StepClock) -> Worker:
        workers.append(Worker(load, **options))
        return workers[-1]

    yield made
    for worker in workers:
        worker.loop.close()


def test_a_better_draft_is_kept_and_becomes_the_draft(make: Callable[..., Worker]) -> None:
    worker = make(lambda name: tiny_model())
    status = worker.swaps.status
    assert status is not None
    assert (status.draft, status.method, status.swap) == ("old", "fake", None)
    worker.swaps.start(SwapDraft(7, "new", 600.0, 0.008))
    worker.wait_loaded()
    for number in range(1000):
        worker.generate(number)
        if worker.swap.verdict != "continue":
            break
    assert (worker.swap.number, worker.swap.candidate, worker.swap.verdict) == (7, "new", "keep")
    assert worker.swap.gain is not None
    assert worker.swap.gain > 0.2
    assert worker.swap.of_candidate.goodput > worker.swap.of_current.goodput
    status = worker.swaps.status
    assert status is not None
    assert status.draft == "new"
    worker.swaps.start(SwapDraft(8, "third", 600.0, 0.008))
    worker.wait_loaded()
    assert (worker.swap.candidate, worker.swap.verdict) == ("third", "continue")


def test_with_0_seconds_the_draft_is_used_at_once(make: Callable[..., Worker]) -> None:
    worker = make(lambda name: tiny_model())
    worker.swaps.start(SwapDraft(7, "new", 0.0))
    worker.wait_loaded()
    assert (worker.swap.verdict, worker.swap.reason) == ("keep", "used at once, without a trial")
    status = worker.swaps.status
    assert status is not None
    assert status.draft == "new"
    worker.generate(1)


def test_while_it_loads_the_engine_serves_and_another_swap_is_ignored(make: Callable[..., Worker]) -> None:
    may_load = threading.Event()

    def load(name: str) -> AnyDraft:
        assert may_load.wait(60)
        return tiny_model()

    worker = make(load)
    worker.swaps.start(SwapDraft(1, "slow"))
    assert (worker.swap.verdict, worker.swap.reason) == ("continue", "the new draft loads")
    worker.generate(0)
    worker.swaps.start(SwapDraft(2, "other"))
    assert worker.swap.candidate == "slow"
    worker.swaps.start(SwapDraft(3, ""))
    may_load.set()
    worker.wait_loaded()
    assert (worker.swap.verdict, worker.swap.reason) == ("roll back", "the trial was interrupted")
    assert not worker.hook.is_running


def test_a_draft_that_does_not_fit_is_refused_with_the_reason(make: Callable[..., Worker]) -> None:
    worker = make(lambda name: tiny_eagle(TARGET))
    worker.swaps.start(SwapDraft(1, "head"))
    worker.wait_loaded()
    assert worker.swap.verdict == "roll back"
    assert "the new draft is refused: the kind of the draft in use is a whole model" in worker.swap.reason
    worker.generate(0)


@pytest.mark.parametrize("error", [UnsupportedModel("no config.json"), RuntimeError("broken file")])
def test_a_draft_that_does_not_load_is_refused(make: Callable[..., Worker], error: Exception) -> None:
    def load(name: str) -> AnyDraft:
        raise error

    worker = make(load)
    worker.swaps.start(SwapDraft(1, "broken"))
    worker.wait_loaded()
    assert worker.swap.verdict == "roll back"
    assert str(error) in worker.swap.reason
    worker.generate(0)


def test_an_empty_name_ends_the_trial(make: Callable[..., Worker]) -> None:
    worker = make(lambda name: tiny_model())
    worker.swaps.start(SwapDraft(1, "new"))
    worker.wait_loaded()
    worker.generate(0)
    assert worker.swap.verdict == "continue"
    worker.swaps.start(SwapDraft(2, ""))
    worker.loop.run(lambda: None)
    assert (worker.swap.number, worker.swap.verdict) == (1, "roll back")


def test_a_trial_without_traffic_ends_with_its_time(make: Callable[..., Worker]) -> None:
    worker = make(lambda name: tiny_model())
    worker.swaps.start(SwapDraft(1, "new", 0.01))
    worker.wait_loaded()
    while worker.swap.verdict == "continue":
        worker.loop.run(lambda: None)
    assert "only 0 periods" in worker.swap.reason


def test_a_gateway_starts_and_follows_a_swap_over_the_wire() -> None:
    hook = AlternatingDraftTrial(StepClock(), seed=0)
    tokenizer = engine_of(tokenizer=True).tokenizer
    loop = EngineLoop(tiny_engine(TARGET, draft_model(tiny_model(seed=5)), hooks=(hook,), tokenizer=tokenizer))
    swaps = DraftSwaps(hook, loop, "old", lambda name: tiny_eagle(TARGET))
    listener = Listener("tcp://127.0.0.1:0", TO_TARGET_WORKER)
    worker = engine_server("a", loop, listener, draft_swaps=swaps)
    thread = threading.Thread(target=worker.run)
    thread.start()
    connection = Connection(worker.address, TO_GATEWAY)
    try:
        connection.send(Hello(VERSION, 1, None))
        connection.send(SwapDraft(9, "head"))
        while True:
            connection.send(StatusRequest())
            while not isinstance(message := connection.receive(60), StatusReport):
                assert message is not None
            draft = message.status.draft
            assert draft is not None
            assert draft.draft == "old"
            if draft.swap is not None and draft.swap.verdict != "continue":
                break
        assert (draft.swap.number, draft.swap.verdict) == (9, "roll back")
        assert "an EAGLE head" in draft.swap.reason
    finally:
        connection.close()
        worker.stop()
        thread.join(60)
