"""Where Ray places a worker: on the node of the workers that its pool is placed with, or on any node."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.policy.pairing.pairing import colocated_pools
from paceline.policy.scaling.changes import with_numbers
from paceline.policy.scaling.desired import DesiredState, WorkerGoal


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources of one worker in a placement group."""

    worker: str
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    own: Bundle
    group: tuple[Bundle, ...] = ()
    """Bundles of its placement group. Empty if it has no group."""
    same_node_as: str = ""
    """Worker whose node it uses. Empty if any node will do."""

    @property
    def group_name(self) -> str:
        return self.group[0].worker if self.group else ""


def choose(goal: WorkerGoal, desired: DesiredState, others: Mapping[str, ActorPlacement]) -> ActorPlacement:
    """The placement of a worker that starts now. `others` are the placements of the running workers.

    Workers that start together share a placement group, so that Ray finds a node with room for all of them. One that starts
    later uses the room that the group has for it, or else the node of a worker that runs.
    """
    config = with_numbers(desired, goal.revision)
    pool = next(candidate for candidate in config.pools if candidate.name == goal.pool)
    bundles = tuple(
        Bundle(f"{neighbour.name}-{goal.number}", neighbour.ray.num_cpus, neighbour.ray.num_gpus)
        for neighbour in colocated_pools(config, pool, goal.number)
        if desired.goal(f"{neighbour.name}-{goal.number}") is not None
    )
    own = Bundle(goal.name, pool.ray.num_cpus, pool.ray.num_gpus)
    for other in others.values():
        if own in other.group:
            return ActorPlacement(own, other.group)
    neighbour = next((bundle.worker for bundle in bundles if bundle.worker in others and bundle != own), "")
    return (
        ActorPlacement(own, same_node_as=neighbour) if neighbour or len(bundles) < 2 else ActorPlacement(own, bundles)
    )


def strategy(placement: ActorPlacement, cluster: str, nodes: Mapping[str, str]) -> Any:
    """Ray's scheduling strategy. `nodes` maps each placed worker to its node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    if placement.group:
        group = _group(f"{cluster}-{placement.group_name}", placement.group)
        index = placement.group.index(placement.own)
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    if placement.same_node_as in nodes:
        return NodeAffinitySchedulingStrategy(nodes[placement.same_node_as], soft=False)
    return "SPREAD"


def remove_group(cluster: str, group_name: str) -> None:
    """Remove a placement group, so that its resources, and under an autoscaler its node, become free."""
    import ray

    with suppress(ValueError):  # no such name
        ray.util.remove_placement_group(ray.util.get_placement_group(f"{cluster}-{group_name}"))


def _group(name: str, bundles: Sequence[Bundle]) -> Any:
    import ray

    with suppress(ValueError):  # no such name
        return ray.util.get_placement_group(name)
    resources = [{"CPU": bundle.num_cpus, "GPU": bundle.num_gpus} for bundle in bundles]
    resources = [{resource: amount for resource, amount in amounts.items() if amount} for amounts in resources]
    return ray.util.placement_group(resources, strategy="STRICT_PACK", name=name, lifetime="detached")
