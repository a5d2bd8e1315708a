"""The live pools of a cluster on Ray, as gateways and commands use them. Requests do not pass through Ray."""

import logging
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
        # Ray warns that placement groups should outlive restartable actors. The groups are removed after the actors.
        logging.getLogger("ray.actor").setLevel(logging.ERROR)
        try:
            ray.init(address=config.ray, namespace=config.name, log_to_driver=False, configure_logging=False)
        except ConnectionError:
            raise PacelineError(
                f"no Ray cluster at {config.ray!r}: start one with `ray start --head`, or give its address, `--ray HOST:6379`"
            ) from None
    return ray
