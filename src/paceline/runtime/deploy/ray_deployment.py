"""Workers as named, detached Ray actors. Ray starts, watches and restarts them; requests do not pass through Ray."""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.cluster.pairing.pairing import colocated_pools
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import MissingDependency, PacelineError
from paceline.core.machine import freeze_loaded_objects
from paceline.core.pool_config import PoolConfig
from paceline.runtime.deploy.directory import Member
from paceline.runtime.deploy.worker_spec import WorkerSpec, worker_specs
from paceline.runtime.json_log import log_as
from paceline.runtime.weights.spec import PeerAddress

if TYPE_CHECKING:
    from paceline.runtime.deploy.worker import Worker

logger = logging.getLogger(__name__)

LOCATION_TIMEOUT = 2.0
"""Seconds to wait for the locations of actors; an actor that is loading answers a later call."""
PEER_TIMEOUT = 1.0
"""Seconds to wait for the weight servers of peers; a peer that is loading or absent is left out."""


class RayDeployment:
    """A `Directory` over the actors of one cluster. Its namespace in Ray is the cluster's name."""

    def __init__(self, config: ClusterConfig) -> None:
        self._ray = _connect(config)
        self._specs = {spec.name: spec for spec in worker_specs(config, _Addresses(config), threads=None)}
        self._known: dict[str, Member] = {}
        self._pending: dict[str, Any] = {}
        """Pending calls by worker: a worker that is loading is called once, not every second."""

    @staticmethod
    def up(config: ClusterConfig) -> "RayDeployment":
        """Start the workers that do not run yet."""
        deployment = RayDeployment(config)
        deployment._start(config)
        return deployment

    @staticmethod
    def find(config: ClusterConfig) -> "RayDeployment":
        """The running actors. Raises if there are none."""
        deployment = RayDeployment(config)
        if not any(deployment._actors()):
            raise PacelineError(f"cluster {config.name!r} is not up on Ray: start it with `paceline up --ray`")
        return deployment

    @staticmethod
    def down(config: ClusterConfig) -> bool:
        """Stop the actors and remove their placement groups. Returns whether there were any."""
        deployment = RayDeployment(config)
        ray, actors = deployment._ray, dict(deployment._actors())
        if actors:
            ray.wait([actor.stop.remote() for actor in actors.values()], num_returns=len(actors), timeout=15.0)
        for actor in actors.values():
            ray.kill(actor, no_restart=True)
        for name in deployment._groups(config):
            with suppress(ValueError):  # no such name
                ray.util.remove_placement_group(ray.util.get_placement_group(name))
        return bool(actors)

    def members(self) -> Sequence[Member]:
        """All workers with a known address. A restarting worker keeps its old address until it has a new one."""
        actors = dict(self._actors())
        for name in actors.keys() - self._pending.keys():
            self._pending[name] = actors[name].location.remote()
        pending = {answer: name for name, answer in self._pending.items()}
        ready, _ = (
            self._ray.wait(list(pending), num_returns=len(pending), timeout=LOCATION_TIMEOUT) if pending else ([], [])
        )
        for answer in ready:
            name = pending[answer]
            del self._pending[name]
            with suppress(self._ray.exceptions.RayError):  # it has just died
                self._known[name] = self._specs[name].member(self._ray.get(answer)[0])
        return [self._known[name] for name in self._specs if name in self._known and name in actors]

    def pids(self) -> dict[str, tuple[int, str]]:
        """Process id and node of each worker, by name. Waits until all have loaded."""
        actors = dict(self._actors())
        answers = self._ray.get([actor.location.remote() for actor in actors.values()])
        return {name: (pid, node) for name, (_, pid, node) in zip(actors, answers, strict=True)}

    def _actors(self) -> Iterator[tuple[str, Any]]:
        for name in self._specs:
            with suppress(ValueError):  # no such name
                yield name, self._ray.get_actor(name)

    def _start(self, config: ClusterConfig) -> None:
        actor = self._ray.remote(WorkerActor)
        for pool in config.pools:
            for i, name in enumerate(pool.worker_names):
                spec = self._specs[name]
                actor.options(
                    name=spec.name,
                    lifetime="detached",
                    get_if_exists=True,
                    max_restarts=-1,
                    max_concurrency=4,
                    scheduling_strategy=self._strategy(config, pool, i),
                    num_cpus=pool.ray.num_cpus,
                    num_gpus=pool.ray.num_gpus,
                ).remote(_on_ray(spec, pool).to_json())

    def _strategy(self, config: ClusterConfig, pool: PoolConfig, worker: int) -> Any:
        """The same node for workers placed together; any node for the others."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group_pools = colocated_pools(config, pool, worker)
        if len(group_pools) == 1:
            return "SPREAD"
        group = self._group(f"{config.name}-{group_pools[0].name}-{worker}", group_pools)
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=group_pools.index(pool))

    def _group(self, name: str, group_pools: Sequence[PoolConfig]) -> Any:
        with suppress(ValueError):
            return self._ray.util.get_placement_group(name)
        bundles = [{"CPU": pool.ray.num_cpus, "GPU": pool.ray.num_gpus} for pool in group_pools]
        bundles = [{resource: amount for resource, amount in bundle.items() if amount} for bundle in bundles]
        return self._ray.util.placement_group(bundles, strategy="STRICT_PACK", name=name, lifetime="detached")

    def _groups(self, config: ClusterConfig) -> list[str]:
        return [f"{config.name}-{name}" for pool in config.pools for name in pool.worker_names]


class _Addresses(dict[str, str]):
    """For any name, a free port of the configured host."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__()
        self._address = f"tcp://{config.host}:0"

    def __missing__(self, name: str) -> str:
        return self._address


def _on_ray(spec: WorkerSpec, pool: PoolConfig) -> WorkerSpec:
    """Ray shows a worker only its reserved GPUs, numbered from 0."""
    device = "cuda:0" if pool.ray.num_gpus else spec.engine.device
    threads = max(1, int(pool.ray.num_cpus))
    return replace(spec, engine=replace(spec.engine, device=device), threads=threads)


def _connect(config: ClusterConfig) -> Any:
    try:
        import ray
    except ImportError:
        raise MissingDependency("ray", "running workers on Ray", "ray") from None
    if not ray.is_initialized():
        # Ray warns that placement groups should outlive restartable actors. `down` removes the groups after the actors.
        logging.getLogger("ray.actor").setLevel(logging.ERROR)
        try:
            ray.init(address=config.ray, namespace=config.name, log_to_driver=False, configure_logging=False)
        except ConnectionError:
            raise PacelineError(
                f"no Ray cluster at {config.ray!r}: start one with `ray start --head`, or give its address, `--ray HOST:6379`"
            ) from None
    return ray


class WorkerActor:
    """The class of the actors. If its worker fails, the process exits and Ray restarts it."""

    def __init__(self, spec: str) -> None:
        import ray

        from paceline.runtime.deploy.worker import make_worker  # needs torch; a gateway does not

        own = WorkerSpec.from_json(spec)
        log_as(own.name)
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._spec = replace(own, address=own.address.replace("auto", host))
        if own.weights is not None:
            address = own.weights.address.replace("auto", host)
            weights = replace(own.weights, address=address, peers=_running_peers(own.weights.peers))
            self._spec = replace(self._spec, weights=weights)
        self._worker: Worker = make_worker(self._spec)
        freeze_loaded_objects()
        self._thread = threading.Thread(target=self._run, name=own.name, daemon=True)
        self._thread.start()
        logger.info("%s listens on %s", own.name, self._worker.address)

    def location(self) -> tuple[str, int, str]:
        """Address, process id and node. Ray calls it after the model is loaded."""
        import ray

        return self._worker.address, os.getpid(), ray.get_runtime_context().get_node_id()

    def weight_address(self) -> str:
        """Address of the weight server."""
        return self._worker.weight_address

    def stop(self) -> None:
        """Stop the worker. The caller then kills the actor."""
        self._worker.stop()
        self._thread.join(10.0)

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception:
            logger.exception("%s failed", self._spec.name)
            os._exit(1)


def _running_peers(peers: Sequence[PeerAddress]) -> tuple[PeerAddress, ...]:
    """The peers that run, with their weight addresses."""
    import ray

    pending: dict[Any, str] = {}
    for peer in peers:
        with suppress(ValueError):  # no such name
            pending[ray.get_actor(peer.name).weight_address.remote()] = peer.name
    ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=PEER_TIMEOUT) if pending else ([], [])
    found = []
    for answer in ready:
        with suppress(ray.exceptions.RayError):  # it has just died
            found.append(PeerAddress(pending[answer], ray.get(answer)))
    return tuple(peer for peer in found if peer.address)
