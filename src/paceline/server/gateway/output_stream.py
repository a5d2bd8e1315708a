"""An admitted HTTP request: what the engine says about it, on the event loop, until it is finished, failed or given up."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request


class Ticket:
    """One writer, the gateway (`put`, `fail`); one reader, who iterates. All on the event loop's thread."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = {request.id: request for request in requests}
        self.unfinished = {request.id: request.sampling.n for request in requests}
        """Choices still to be finished, by request; a request whose last one is finished is not in it."""
        self._pending: list[StepOutput] = []
        self.error: PacelineError | None = None
        self._news = asyncio.Event()

    @property
    def num_unfinished(self) -> int:
        return sum(self.unfinished.values())

    def put(self, output: StepOutput) -> None:
        self._pending.append(output)
        self._news.set()

    def fail(self, error: PacelineError) -> None:
        """Whoever reads gets `error` once they have read what came before it. The first one counts."""
        self.error = self.error or error
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[list[StepOutput]]:
        """All that has come since the last look, as often as there is something."""
        while True:
            await self._news.wait()
            self._news.clear()
            batch, self._pending = self._pending, []
            if batch:
                yield batch
            if self.error is not None and not self._pending:
                raise self.error
            if not self.unfinished and not self._pending:
                return
