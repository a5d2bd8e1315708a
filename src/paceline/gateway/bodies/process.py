"""The process that checks large request bodies, so that the event loop and its interpreter do not work on bodies it refuses."""

import json
import logging
import sys
from collections.abc import Callable
from functools import partial

from paceline.core.child import LineChild
from paceline.core.machine import measured
from paceline.gateway.api.errors import Unavailable
from paceline.gateway.bodies import check as body_check
from paceline.gateway.bodies.check import BodyLimits, read_error
from paceline.gateway.bodies.fair_share import FairThreads, Owner

logger = logging.getLogger(__name__)

WAIT_SECONDS = 30.0
"""Longest check of one body, the start of the process included."""
TRIES = 2
"""Processes that check a body before it is refused: the first may have ended for another reason."""


class BodyProcess:
    """Checks one body after the other, on a thread that waits without the interpreter's lock. Owners take turns by the bytes of
    their bodies. All calls are of one event loop at a time."""

    def __init__(self, limits: BodyLimits, charge: Callable[[Owner, str, float], None]) -> None:
        """`charge` receives the processor seconds of a check, from any thread."""
        self._limits, self._charge = limits, charge
        self._thread = FairThreads(1, 1, "paceline-bodies")
        self._process: LineChild | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None before the start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process without waiting for it. The first check would do so."""
        self._thread.submit(self._start)

    async def check(self, owner: Owner, path: str, body: bytes) -> None:
        """Raise `BadRequest` if the route at `path` would refuse the body, `Overloaded` if too many wait, and `Unavailable` if
        the check did not end."""
        charge = partial(self._charge, owner, "body")
        line = await self._thread.run(owner, len(body), measured, charge, self._ask, path, body)
        if line is None:
            raise Unavailable("the process that checks large bodies has ended: send the request again")
        error = read_error(line)
        if error is not None:
            raise error

    def close(self) -> None:
        """End the process, and with it a check under way. A later check starts another one."""
        self._stop()
        self._thread.submit(self._stop).result()  # the check may have started it again

    def _ask(self, path: str, body: bytes) -> str | None:
        """The answer of the process; None if it ended, or was ended after `WAIT_SECONDS`."""
        for _ in range(TRIES):
            try:
                process = self._start()
            except OSError:
                logger.exception("the process that checks large bodies did not start")
                return None
            if line := process.ask([json.dumps([path, len(body)]).encode() + b"\n", body], WAIT_SECONDS).decode():
                return line
            logger.warning("the process that checks large bodies has ended: it is started again")
            self._stop()
        return None

    def _start(self) -> LineChild:
        process = self._process
        if process is not None and process.is_running:
            return process
        self._stop()
        process = self._process = LineChild([sys.executable, "-m", body_check.__name__])
        process.tell(self._limits.to_json().encode() + b"\n")
        return process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.close()
