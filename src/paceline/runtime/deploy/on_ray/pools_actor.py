"""The actor that makes the workers on Ray those of the desired state, as the supervisor does for processes."""

import logging
import threading
from collections.abc import Sequence

import msgspec
from ray.experimental import internal_kv

from paceline.cluster.scaling.desired import DesiredState
from paceline.runtime.deploy.directory import Member
from paceline.runtime.deploy.on_ray.actor_runner import ActorRunner
from paceline.runtime.deploy.pools import Pools
from paceline.runtime.json_log import log_as

logger = logging.getLogger(__name__)

NAME = "paceline-pools"
POLL = 0.3


class PoolsActor:
    """The class of the actor. The desired state is in Ray's key-value store, so that a restarted actor continues."""

    def __init__(self, cluster: str, state: bytes) -> None:
        """`state` is the desired state to use if none is stored for this cluster."""
        log_as("pools")
        self._key = f"paceline/{cluster}".encode()
        stored = internal_kv._internal_kv_get(self._key)
        self._desired = msgspec.json.decode(stored or state, type=DesiredState)
        self._save(self._desired)
        self._runner = ActorRunner(cluster, self._desired.drain_seconds, frozenset({NAME}))
        self._pools = Pools(self._runner)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._members: Sequence[Member] = self._pools.poll(self._desired)
        self._places: dict[str, tuple[int, str]] = {}
        self._thread = threading.Thread(target=self._run, name="pools", daemon=True)
        self._thread.start()

    def members(self) -> Sequence[Member]:
        """All workers, also those without an address yet, and those that left in the last minute."""
        return self._members

    def places(self) -> dict[str, tuple[int, str]]:
        """Process id and node of each worker that has loaded, by name."""
        return self._places

    def desired(self) -> bytes:
        return msgspec.json.encode(self._desired)

    def swap(self, old: bytes, new: bytes) -> bool:
        """Replace the desired state, if it is still `old`."""
        with self._lock:
            if self.desired() != old:
                return False
            self._save(msgspec.json.decode(new, type=DesiredState))
        return True

    def stop(self) -> None:
        """Stop all workers, remove their placement groups, and forget the desired state."""
        self._stop.set()
        self._thread.join()
        self._runner.stop()
        internal_kv._internal_kv_del(self._key)

    def _save(self, state: DesiredState) -> None:
        internal_kv._internal_kv_put(self._key, msgspec.json.encode(state), overwrite=True)
        self._desired = state

    def _run(self) -> None:
        while not self._stop.wait(POLL):
            try:
                self._members = self._pools.poll(self._desired)
                self._places = self._runner.places()
            except Exception:
                logger.exception("the workers could not be made those of the desired state; the next attempt follows")
