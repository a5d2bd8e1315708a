"""What a target worker does while its memory is almost full: `policy/overload.py` decides, with readings of this process."""

import logging
import threading
from collections.abc import Callable

from paceline.core.machine import process_memory, release_memory, total_memory
from paceline.core.status import Symptom
from paceline.policy.overload import OverloadPolicy, OverloadStage

logger = logging.getLogger(__name__)

SECONDS = 0.25
"""Time between two readings."""
REMEDIES = {
    OverloadStage.LARGE_BODIES: "freed memory is given back to the system",
    OverloadStage.NEW_REQUESTS: "new requests go to other workers; raise worker_memory_bytes or lower max_num_seqs",
    OverloadStage.DROP: "the longest requests continue on other workers; raise worker_memory_bytes or lower max_num_seqs",
}


class WorkerOverload:
    """The memory stage of a worker. The thread of its server makes all calls."""

    def __init__(
        self,
        limit: int | None,
        read: Callable[[], int] = process_memory,
        release: Callable[[], None] = release_memory,
    ) -> None:
        """`limit` is in bytes. If it is None, it is the memory of the machine or container. `read` returns the bytes that are
        used, and `release` gives freed memory back; it runs on a thread of its own."""
        self._policy = OverloadPolicy(total_memory() if limit is None else limit)
        self._read, self._release = read, release
        self._used, self._next = 0, 0.0

    @property
    def refuses(self) -> bool:
        """Whether the worker takes no new requests."""
        return self._policy.stage >= OverloadStage.NEW_REQUESTS

    @property
    def symptoms(self) -> tuple[Symptom, ...]:
        """The stage, for status, metrics and timeline."""
        stage = self._policy.stage
        if stage is OverloadStage.NORMAL:
            return ()
        name = f"memory_{stage.name.lower()}"
        return (Symptom(name, float(self._used), float(self._policy.limit), REMEDIES[stage]),)

    def poll(self, now: float) -> bool:
        """Reads the memory if that is due. Returns whether the most expensive request must leave now."""
        if now < self._next:
            return False
        self._next, self._used, before = now + SECONDS, self._read(), self._policy.stage
        decision = self._policy.observe(self._used, now)
        if decision.has_changed:
            stage = decision.stage
            level = logging.INFO if stage < before else logging.WARNING
            text = "memory stage %d, %s: %d of %d MiB"
            logger.log(level, text, stage, stage.words, self._used >> 20, self._policy.limit >> 20)
            if stage > before:
                threading.Thread(target=self._release, name="paceline-release", daemon=True).start()
        return decision.drops
