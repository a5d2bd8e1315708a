"""Events of all requests, from the target's thread to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from paceline.core.output import OutputEvent, OutputListener


class Inbox:
    """The target's thread only appends an event, and wakes the event loop once per burst."""

    def __init__(self, on_events: Callable[[], None]) -> None:
        """`on_events` is called on the event loop and reads `take`."""
        self._on_events = on_events
        self._events: deque[tuple[str, OutputEvent]] = deque()
        self._is_awake = False

    def listener_of(self, request_id: str, loop: asyncio.AbstractEventLoop) -> OutputListener:
        """Takes the outputs and the error of a request, from any thread."""

        def listen(event: OutputEvent) -> None:
            self._events.append((request_id, event))
            if not self._is_awake:
                self._is_awake = True
                loop.call_soon_threadsafe(self._on_events)

        return listen

    def take(self) -> Iterator[tuple[str, OutputEvent]]:
        """Events with the id of their request, in order, until none is left."""
        self._is_awake = False  # before reading: an event that arrives from here on wakes the loop again
        while self._events:
            yield self._events.popleft()
