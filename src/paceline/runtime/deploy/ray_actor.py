"""A worker inside a Ray actor. Ray starts it, watches it and starts it again; tokens never travel through it."""

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from paceline.core.machine import freeze_loaded_objects
from paceline.runtime.deploy.worker import Worker, make_worker
from paceline.runtime.deploy.worker_spec import WorkerSpec
from paceline.runtime.json_log import log_as
from paceline.runtime.weights.spec import PeerAddress

logger = logging.getLogger(__name__)

LOOK = 1.0
"""Seconds for peers to say where they give their weights; who does not is loading, or not there."""


class WorkerActor:
    """The class that becomes an actor. A worker that fails takes its process with it, and Ray starts another."""

    def __init__(self, spec: str) -> None:
        import ray

        own = WorkerSpec.from_json(spec)
        log_as(own.name)
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._spec = replace(own, address=own.address.replace("auto", host))
        if own.weights is not None:
            door = own.weights.address.replace("auto", host)
            self._spec = replace(
                self._spec, weights=replace(own.weights, address=door, peers=_running(own.weights.peers))
            )
        self._worker: Worker = make_worker(self._spec)
        freeze_loaded_objects()
        self._thread = threading.Thread(target=self._run, name=own.name, daemon=True)
        self._thread.start()
        logger.info("%s listens on %s", own.name, self._worker.address)

    def whereabouts(self) -> tuple[str, int, str]:
        """Address, process id, and node: answered once the model is loaded."""
        import ray

        return self._worker.address, os.getpid(), ray.get_runtime_context().get_node_id()

    def weight_address(self) -> str:
        """Where it gives its weights to others."""
        return self._worker.weight_address

    def stop(self) -> None:
        """Let the worker say goodbye. The actor is killed by whoever asked."""
        self._worker.stop()
        self._thread.join(10.0)

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception:
            logger.exception("%s failed", self._spec.name)
            os._exit(1)


def _running(peers: Sequence[PeerAddress]) -> tuple[PeerAddress, ...]:
    """Those that are up, and where."""
    import ray

    asked: dict[Any, str] = {}
    for peer in peers:
        with suppress(ValueError):  # there is none of that name
            asked[ray.get_actor(peer.name).weight_address.remote()] = peer.name
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK) if asked else ([], [])
    found = []
    for answer in ready:
        with suppress(ray.exceptions.RayError):  # it died a moment ago
            found.append(PeerAddress(asked[answer], ray.get(answer)))
    return tuple(peer for peer in found if peer.address)
