"""Events that other threads deliver reach the event loop once, in order."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from paceline.core.errors import GenerationFailed
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.sequence import Origin
from paceline.gateway.sessions.gateway import Inbox


def output(token: int) -> StepOutput:
    return StepOutput("r", 0, 0, (token,), (Origin.PLAIN,))


class Wakes:
    """An event loop that counts how often it is woken."""

    def __init__(self) -> None:
        self.count = 0

    def call_soon_threadsafe(self, callback: object) -> None:
        self.count += 1


def test_a_burst_wakes_the_loop_once() -> None:
    loop, inbox = Wakes(), Inbox(lambda: None)
    a, b = (inbox.listener_of(name, loop) for name in "ab")  # type: ignore[arg-type]
    failure = GenerationFailed("no")
    for listener, event in ((a, output(1)), (b, output(2)), (a, failure)):
        listener(event)
    assert loop.count == 1
    assert list(inbox.take()) == [("a", output(1)), ("b", output(2)), ("a", failure)]
    assert list(inbox.take()) == []
    a(output(3))
    assert loop.count == 2


def test_an_event_that_arrives_while_the_inbox_is_read_is_not_lost() -> None:
    loop, inbox = Wakes(), Inbox(lambda: None)
    listener = inbox.listener_of("a", loop)  # type: ignore[arg-type]
    listener(output(1))
    events = inbox.take()
    assert next(events) == ("a", output(1))
    listener(output(2))
    assert loop.count == 2
    assert list(events) == [("a", output(2))]


def test_events_of_other_threads_are_read_on_the_loop() -> None:
    received: list[tuple[str, OutputEvent]] = []

    async def run() -> None:
        done = asyncio.Event()

        def read() -> None:
            received.extend(inbox.take())
            if len(received) == 200:
                done.set()

        inbox = Inbox(read)
        listener = inbox.listener_of("a", asyncio.get_running_loop())
        with ThreadPoolExecutor(2) as threads:
            for token in range(200):
                threads.submit(listener, output(token))
            await asyncio.wait_for(done.wait(), 60)

    asyncio.run(run())
    tokens = [event.tokens[0] for _, event in received if isinstance(event, StepOutput)]
    assert sorted(tokens) == list(range(200))
