"""Workers as named, detached Ray actors: they outlive whoever started them, and are found by name."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from paceline.cluster.pairing.pairing import colocated_pools
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import MissingDependency, PacelineError
from paceline.core.pool_config import PoolConfig
from paceline.runtime.deploy.directory import Member
from paceline.runtime.deploy.ray_actor import WorkerActor
from paceline.runtime.deploy.worker_spec import WorkerSpec, worker_specs

logger = logging.getLogger(__name__)

LOOK = 2.0
"""Seconds to wait for actors to say where they are; who is still loading is asked again."""


class RayDeployment:
    """A `Directory` over the actors of one cluster. Its namespace in Ray is the cluster's name."""

    def __init__(self, config: ClusterConfig) -> None:
        self._ray = _connect(config)
        self._specs = {spec.name: spec for spec in worker_specs(config, _Addresses(config), threads=None)}
        self._known: dict[str, Member] = {}
        self._asked: dict[str, Any] = {}
        """Answers that are still to come, by worker: one that loads is asked once, not every second."""

    @staticmethod
    def up(config: ClusterConfig) -> "RayDeployment":
        """Start whatever is not there yet. Workers that run are left alone."""
        deployment = RayDeployment(config)
        deployment._start(config)
        return deployment

    @staticmethod
    def find(config: ClusterConfig) -> "RayDeployment":
        """Actors that are up. Raises when there are none."""
        deployment = RayDeployment(config)
        if not any(deployment._actors()):
            raise PacelineError(f"cluster {config.name!r} is not up on Ray: start it with `paceline up --ray`")
        return deployment

    @staticmethod
    def down(config: ClusterConfig) -> bool:
        """Stop the actors and free what was reserved for them. Returns whether there were any."""
        deployment = RayDeployment(config)
        ray, actors = deployment._ray, dict(deployment._actors())
        if actors:
            ray.wait([actor.stop.remote() for actor in actors.values()], num_returns=len(actors), timeout=15.0)
        for actor in actors.values():
            ray.kill(actor, no_restart=True)
        for name in deployment._groups(config):
            with suppress(ValueError):  # there is none of that name
                ray.util.remove_placement_group(ray.util.get_placement_group(name))
        return bool(actors)

    def members(self) -> Sequence[Member]:
        """Whoever can say where it is. One that is being started again keeps its old address until it has a new one."""
        actors = dict(self._actors())
        for name in actors.keys() - self._asked.keys():
            self._asked[name] = actors[name].whereabouts.remote()
        asked = {answer: name for name, answer in self._asked.items()}
        ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=LOOK) if asked else ([], [])
        for answer in ready:
            name = asked[answer]
            del self._asked[name]
            with suppress(self._ray.exceptions.RayError):  # it died a moment ago
                self._known[name] = self._specs[name].member(self._ray.get(answer)[0])
        return [self._known[name] for name in self._specs if name in self._known and name in actors]

    def pids(self) -> dict[str, tuple[int, str]]:
        """Process and node of each worker, by name. Waits until all have loaded."""
        actors = dict(self._actors())
        answers = self._ray.get([actor.whereabouts.remote() for actor in actors.values()])
        return {name: (pid, node) for name, (_, pid, node) in zip(actors, answers, strict=True)}

    def _actors(self) -> Iterator[tuple[str, Any]]:
        for name in self._specs:
            with suppress(ValueError):  # there is none of that name
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
        """One node for all that are placed together; whoever is alone goes where there is room."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        party = colocated_pools(config, pool, worker)
        if len(party) == 1:
            return "SPREAD"
        group = self._group(f"{config.name}-{party[0].name}-{worker}", party)
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=party.index(pool))

    def _group(self, name: str, party: Sequence[PoolConfig]) -> Any:
        with suppress(ValueError):
            return self._ray.util.get_placement_group(name)
        bundles = [{"CPU": pool.ray.num_cpus, "GPU": pool.ray.num_gpus} for pool in party]
        bundles = [{resource: amount for resource, amount in bundle.items() if amount} for bundle in bundles]
        return self._ray.util.placement_group(bundles, strategy="STRICT_PACK", name=name, lifetime="detached")

    def _groups(self, config: ClusterConfig) -> list[str]:
        return [f"{config.name}-{name}" for pool in config.pools for name in pool.worker_names]


class _Addresses(dict[str, str]):
    """A free port of the node's own address, or of the configured one."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__()
        self._address = f"tcp://{config.host}:0"

    def __missing__(self, name: str) -> str:
        return self._address


def _on_ray(spec: WorkerSpec, pool: PoolConfig) -> WorkerSpec:
    """Ray shows a worker only the GPUs reserved for it, counted from 0."""
    device = "cuda:0" if pool.ray.num_gpus else spec.engine.device
    threads = max(1, int(pool.ray.num_cpus))
    return replace(spec, engine=replace(spec.engine, device=device), threads=threads)


def _connect(config: ClusterConfig) -> Any:
    try:
        import ray
    except ImportError:
        raise MissingDependency("ray", "running workers on Ray", "ray") from None
    if not ray.is_initialized():
        # That groups should outlive restartable actors: ours are removed by `down` alone, after the actors.
        logging.getLogger("ray.actor").setLevel(logging.ERROR)
        try:
            ray.init(address=config.ray, namespace=config.name, log_to_driver=False, configure_logging=False)
        except ConnectionError:
            raise PacelineError(
                f"no Ray cluster at {config.ray!r}: start one with `ray start --head`, or say where it is, `--ray HOST:6379`"
            ) from None
    return ray
