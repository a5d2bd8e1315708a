"""The live pools of a cluster on Ray, as gateways and commands use them. Requests do not pass through Ray."""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import MissingDependency, PacelineError
from paceline.deploy.processes import AlreadyUp, NotUp
from paceline.policy.scaling.desired import DesiredState
from paceline.wire.worker_spec import Member

CALL_SECONDS = 60.0
"""Time to wait for an answer of the pools' actor. Its first answer waits for a process on a node."""
POLL = 0.1


class RayDeployment:
    """Implements `LivePools`. The namespace of its actors in Ray is the cluster's name."""

    def __init__(self, ray: Any, pools: Any) -> None:
        """`pools` is the handle of the `PoolsActor`."""
        self._ray, self._pools = ray, pools

    @staticmethod
    def up(config: ClusterConfig) -> "RayDeployment":
        """Start the pools. Raises `AlreadyUp`."""
        with suppress(NotUp):
            RayDeployment.find(config)
            raise AlreadyUp(
                f"cluster {config.name!r} is already up on Ray: see `paceline status`; `paceline apply` changes it"
            )
        return RayDeployment.find_or_up(config)

    @staticmethod
    def find_or_up(config: ClusterConfig) -> "RayDeployment":
        """The running pools, or those of the file, started now."""
        ray = connect(config)
        from paceline.deploy.ray.actors import NAME, PoolsActor

        actor = ray.remote(PoolsActor).options(
            name=NAME,
            namespace=config.name,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=3,  # a call during a restart is made again
            max_concurrency=8,
            num_cpus=0,
        )
        deployment = RayDeployment(ray, actor.remote(config.name, msgspec.json.encode(DesiredState.of(config))))
        deployment.members()
        return deployment

    @staticmethod
    def find(config: ClusterConfig) -> "RayDeployment":
        """The running pools. Raises `NotUp`."""
        ray = connect(config)
        from paceline.deploy.ray.actors import NAME

        try:
            return RayDeployment(ray, ray.get_actor(NAME, config.name))
        except ValueError:
            raise NotUp(f"cluster {config.name!r} is not up on Ray: start it with `paceline up --ray`") from None

    @staticmethod
    def down(config: ClusterConfig) -> bool:
        """Stop the actors and remove their placement groups. Returns whether there were any."""
        try:
            deployment = RayDeployment.find(config)
        except NotUp:
            return False
        deployment._call(deployment._pools.stop)
        deployment._ray.kill(deployment._pools, no_restart=True)
        return True

    def members(self) -> Sequence[Member]:
        found: Sequence[Member] = self._call(self._pools.members)
        return found

    def desired(self) -> DesiredState:
        return msgspec.json.decode(self._call(self._pools.desired), type=DesiredState)

    def edit(self, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        """Of two concurrent commands neither loses its change: the later change is applied again to the new state."""
        while True:
            old = self._call(self._pools.desired)
            state = change(msgspec.json.decode(old, type=DesiredState))
            if self._call(self._pools.swap, old, msgspec.json.encode(state)):
                return state

    def pids(self) -> dict[str, tuple[int, str]]:
        """Process id and node of each worker, by name. Waits until all have loaded."""
        while True:
            places: dict[str, tuple[int, str]] = self._call(self._pools.places)
            if places.keys() >= {goal.name for goal in self.desired().workers}:
                return places
            time.sleep(POLL)

    def _call(self, method: Any, *values: Any) -> Any:
        try:
            return self._ray.get(method.remote(*values), timeout=CALL_SECONDS)
        except self._ray.exceptions.RayError as error:
            text = str(error).strip().rpartition("\n")[2]
            raise PacelineError(f"the cluster's actor on Ray does not answer: {text}; see `ray logs`") from error


def connect(config: ClusterConfig) -> Any:
    """The module `ray`, connected to the cluster's Ray. Raises if Ray is not installed or not there."""
    try:
        import ray
    except ImportError:
        raise MissingDependency("ray", "running workers on Ray", "ray") from None
    if not ray.is_initialized():
        assert config.ray is not None
        address = _head(ray, config.ray)
        # Ray warns that placement groups should outlive restartable actors. The groups are removed after the actors.
        logging.getLogger("ray.actor").setLevel(logging.ERROR)
        try:
            ray.init(address=address, namespace=config.name, log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise _no_head(config.ray, str(error)) from None
    return ray


HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS_FRAME = 4
"""Type of the first frame of an HTTP/2 server, in its fourth byte. A Ray head speaks gRPC, which is HTTP/2."""
ANSWER_SECONDS = 3.0
"""Time in which a Ray head answers a connection."""


def _head(ray: Any, address: str) -> str:
    """The address of the Ray head that `address` names. Raises unless a head answers: `ray.init` would try for minutes, print
    the log lines of its C++ client meanwhile, and ignore Ctrl-C."""
    scheme, separator, place = address.rpartition("://")
    try:
        found = ray._private.services.canonicalize_bootstrap_address(
            place
        )  # resolves `auto` and the names of this machine
    except ConnectionError:
        raise _no_head(address, "none runs on this machine") from None
    except ValueError as error:
        raise _no_head(address, str(error)) from None
    problems: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: problems.put(_problem(found)), daemon=True).start()
    try:
        # A thread, since a name may take longer to be resolved.
        problem = problems.get(timeout=ANSWER_SECONDS)
    except queue.Empty:
        problem = f"no answer within {ANSWER_SECONDS:g} s"
    if problem:
        raise _no_head(address, problem)
    return f"{scheme}{separator}{found}"


def _problem(address: str) -> str:
    """Why the server at HOST:PORT is no Ray head. Empty if it may be one."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port))) as connection:
            connection.sendall(HTTP2_PREFACE)
            header = connection.recv(9)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return "" if header[3:4] == bytes([SETTINGS_FRAME]) else "the server there is none"


def _no_head(address: str, problem: str) -> PacelineError:
    return PacelineError(
        f"no Ray head at {address!r} ({problem}): start one with `ray start --head`, or give its address, `--ray HOST:6379`"
    )
