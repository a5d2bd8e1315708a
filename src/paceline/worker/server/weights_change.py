"""Changes of the target's weights in a worker: loads new weights in addition to those in use, waits for the requests that run,
and replaces the weights between two steps.
"""

import logging
import threading
from collections.abc import Callable

from paceline.core.config import EngineConfig
from paceline.core.errors import PacelineError, WeightsChanged
from paceline.core.status import WeightsStatus
from paceline.engine import EngineLoop
from paceline.engine.start import load_weights
from paceline.models.loading import LoadedModel
from paceline.transfer.weights import Activity, WeightManager
from paceline.wire.gateway_messages import ChangeWeights

logger = logging.getLogger(__name__)

MAX_REASON = 2000
"""Characters of a reason."""
ANNOUNCE_SECONDS = 5.0
"""Time that gateways have to be told, before requests get the new weights."""


def weights_loader(
    config: EngineConfig, loop: EngineLoop, weights: WeightManager
) -> Callable[[ChangeWeights], LoadedModel]:
    """A function that loads the weights of a change, in the formats of a running engine."""

    def load(change: ChangeWeights) -> LoadedModel:
        if change.peer:
            return load_weights(config, loop.engine, change.peer, weights.fetch)
        return load_weights(config, loop.engine, change.folder)

    return load


class WeightsChanges:
    """`start`, `status` and `announce` are for the worker's thread. The weights load on a thread of their own."""

    def __init__(
        self,
        loop: EngineLoop,
        load: Callable[[ChangeWeights], LoadedModel],
        weights: WeightManager | None = None,
        obstacle: str = "",
    ) -> None:
        """`weights` serves the weights to other workers. `obstacle` says why this worker cannot change its weights."""
        self._loop, self._load, self._weights, self._obstacle = loop, load, weights, obstacle
        self._status: WeightsStatus | None = None
        self._thread: threading.Thread | None = None
        self._wake: Callable[[], None] = lambda: None
        self._unannounced = False
        self._announced = threading.Event()
        self.number = 0
        """The last change that gateways were told of."""

    def attach(self, wake: Callable[[], None]) -> None:
        """`wake` makes the worker's thread call `announce`."""
        self._wake = wake

    @property
    def status(self) -> WeightsStatus | None:
        return self._status

    def start(self, change: ChangeWeights) -> None:
        """Begin a change. It is ignored if it was made before, or if one is under way."""
        if self._status is not None and (self._status.number == change.number or self._is_running):
            return
        source = change.peer or change.folder
        if self._obstacle:
            self._status = WeightsStatus(change.number, source, "failed", self._obstacle)
            return
        self._status = WeightsStatus(change.number, source, "loading")
        self._thread = threading.Thread(
            target=self._run, args=(change, source), name="paceline-weights-change", daemon=True
        )
        self._thread.start()

    def announce(self, tell: Callable[[], None]) -> None:
        """If the weights have changed, let `tell` tell all gateways. Then the requests that wait are started."""
        if self._unannounced:
            self._unannounced = False
            assert self._status is not None
            self.number = self._status.number
            tell()
            self._announced.set()

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, change: ChangeWeights, source: str) -> None:
        engine = self._loop.engine
        try:
            loaded = self._load(change)
            self._status = WeightsStatus(change.number, source, "waiting")
            with self._loop.alone(change.seconds, WeightsChanged()):
                if self._weights is not None:
                    self._weights.withhold()
                self._loop.run(lambda: engine.use_weights(loaded.model, loaded.checksum))
                self._announced.clear()
                self._unannounced = True
                self._wake()
                self._announced.wait(ANNOUNCE_SECONDS)
            self._status = WeightsStatus(change.number, source, "done")
            logger.info("the weights are those of %s: system fingerprint %s", source, engine.fingerprint)
            if self._weights is not None:
                checksum = loaded.checksum
                del loaded
                self._weights.replaced(checksum, lambda: Activity(engine.has_work, engine.num_steps))
        except PacelineError as error:
            logger.warning("the weights of %s are not used: %s", source, error)
            self._fail(change, source, str(error))
        except Exception as error:  # a folder of any content must not end the worker
            logger.exception("the weights of %s could not be used", source)
            self._fail(change, source, repr(error))

    def _fail(self, change: ChangeWeights, source: str, reason: str) -> None:
        if self._status is None or self._status.state != "done":
            self._status = WeightsStatus(change.number, source, "failed", reason[:MAX_REASON])
