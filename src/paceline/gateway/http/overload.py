"""What the gateway refuses while its memory is almost full: first large bodies, then new requests, then the most expensive one.

`OverloadManager` reads the memory of the gateway and of the processes that check bodies for it, and carries out what
`policy/overload.py` decides. Its stage is a metric, and a change of the stage is an event in the log and in the timeline.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from paceline.core.machine import process_memory, release_memory, total_memory
from paceline.gateway.api.errors import Overloaded
from paceline.gateway.metrics import Metrics
from paceline.gateway.sessions import Gateway
from paceline.policy.overload import OverloadDecision, OverloadPolicy, OverloadStage

logger = logging.getLogger(__name__)

INTERVAL = 0.25
"""Seconds between two readings."""
SHARE = 4
"""Without a setting the gateway's limit is this part of the memory: the rest belongs to the workers."""
RETRY_SECONDS = 5
LARGE_BYTES = 65536
"""Bytes of a large body."""


def memory_limit(setting: int | None) -> int:
    """The limit in bytes. `setting` is None for the default."""
    return total_memory() // SHARE if setting is None else setting


class OverloadManager:
    """All calls must come from the event loop's thread."""

    def __init__(
        self,
        policy: OverloadPolicy,
        gateways: Sequence[Gateway],
        metrics: Metrics,
        read: Callable[[], int] = process_memory,
        tell: Callable[[str, bool], None] = lambda text, is_bad: None,
    ) -> None:
        """`read` returns the bytes that are used. `tell` receives an event and whether it is bad. In the last stage requests of
        `gateways` are ended."""
        self._policy, self._gateways, self._metrics = policy, gateways, metrics
        self._read, self._tell = read, tell
        self._used = 0
        metrics.add_memory(lambda: self._used, policy.limit, lambda: policy.stage)

    def check(self, num_bytes: int) -> None:
        """Raises `Overloaded` if a body of this size is refused now."""
        stage = self._policy.stage
        if stage >= OverloadStage.NEW_REQUESTS:
            self._refuse(OverloadStage.NEW_REQUESTS, "the gateway's memory is full")
        if stage >= OverloadStage.LARGE_BODIES and num_bytes > LARGE_BYTES:
            text = f"the gateway's memory is almost full, and it takes no bodies over {LARGE_BYTES} bytes"
            self._refuse(OverloadStage.LARGE_BODIES, text)

    def observe(self, now: float) -> None:
        """Reads the memory and does what the stage demands."""
        self._used = self._read()
        decision = self._policy.observe(self._used, now)
        if decision.has_changed:
            self._report(decision)
        if decision.drops:
            self._drop()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Observes inside the block."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        loop, stage = asyncio.get_running_loop(), self._policy.stage
        while True:
            try:
                self.observe(loop.time())
                if self._policy.stage > stage:  # freed memory does not count as used
                    await asyncio.to_thread(release_memory)
                stage = self._policy.stage
            except Exception:
                logger.exception("cannot measure the memory")
            await asyncio.sleep(INTERVAL)

    def _refuse(self, stage: OverloadStage, text: str) -> None:
        raise Overloaded(RETRY_SECONDS, text, code=f"memory_{stage.name.lower()}")

    def _report(self, decision: OverloadDecision) -> None:
        self._metrics.record_overload(decision.stage)
        stage = decision.stage
        what = f"memory stage {int(stage)}, {stage.words}: {self._used >> 20} of {self._policy.limit >> 20} MiB"
        logger.log(logging.INFO if stage is OverloadStage.NORMAL else logging.WARNING, "gateway: %s", what)
        self._tell(f"gateway: {what}", stage is not OverloadStage.NORMAL)

    def _drop(self) -> None:
        code = f"memory_{OverloadStage.DROP.name.lower()}"
        error = Overloaded(RETRY_SECONDS, "the gateway's memory is full, and this was its most expensive request", code)
        dearest = max(self._gateways, key=lambda gateway: gateway.highest_cost, default=None)
        request_id = None if dearest is None else dearest.end_most_expensive(error)
        if request_id is not None:
            self._metrics.record_rejection(code)
            logger.warning("gateway: request %s was ended, the memory is full", request_id)
