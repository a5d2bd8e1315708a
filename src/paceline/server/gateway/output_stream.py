"""Step outputs of one session, from the gateway to the response."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import ValidatedRequest
from paceline.server.gateway.admission import AdmissionEntry


class OutputStream:
    """Step outputs of the admitted requests of one session. The gateway writes, the session reads, on the event loop."""

    def __init__(
        self, requests: Sequence[ValidatedRequest], entries: Sequence[AdmissionEntry], deadline: float
    ) -> None:
        """`entries` are the places of the requests in the queue, in the same order."""
        self.deadline = deadline
        """Time of the event loop at which the stream fails."""
        self.entries = {entry.id: entry for entry in entries}
        self.requests = {request.id: request for request in requests}
        self.unfinished = {request.id: len(request.unfinished) for request in requests}
        """Number of unfinished choices by request id; finished requests are absent."""
        self.error: PacelineError | None = None
        self._pending: list[StepOutput] = []
        self._changed = asyncio.Event()

    @property
    def num_unfinished(self) -> int:
        return sum(self.unfinished.values())

    def put(self, output: StepOutput) -> None:
        if not self._pending:
            self._changed.set()
        self._pending.append(output)

    def fail(self, error: PacelineError) -> None:
        """Ends the stream with `error`, after the outputs that came before it. Only the first error counts."""
        self.error = self.error or error
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[list[StepOutput]]:
        """Yields all outputs since the previous batch."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            batch, self._pending = self._pending, []
            if batch:
                yield batch
            if self.error is not None and not self._pending:
                raise self.error
            if not self.unfinished and not self._pending:
                return
