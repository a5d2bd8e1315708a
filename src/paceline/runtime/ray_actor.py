"""A worker inside a Ray actor. Ray starts it, watches it and starts it again; tokens never travel through it."""

import logging
import os
import threading
from dataclasses import replace

from paceline.runtime.worker import Worker, make_worker
from paceline.runtime.worker_spec import WorkerSpec

logger = logging.getLogger(__name__)


class WorkerActor:
    """The class that becomes an actor. A worker that fails takes its process with it, and Ray starts another."""

    def __init__(self, spec: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        import ray

        own = WorkerSpec.from_json(spec)
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._spec = replace(own, address=own.address.replace("auto", host))
        self._worker: Worker = make_worker(self._spec)
        self._thread = threading.Thread(target=self._run, name=own.name, daemon=True)
        self._thread.start()
        logger.info("%s listens on %s", own.name, self._worker.address)

    def whereabouts(self) -> tuple[str, int, str]:
        """Address, process id, and node: answered once the model is loaded."""
        import ray

        return self._worker.address, os.getpid(), ray.get_runtime_context().get_node_id()

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
