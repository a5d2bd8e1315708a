"""Placement of workers on Ray: pairs that start together share a group, later workers use the node of their partner."""

from paceline.core.cluster_config import cluster_config
from paceline.deploy.ray.placement import ActorPlacement, choose
from paceline.policy.scaling.desired import DesiredState

TARGET = {"name": "target", "role": "target", "model": "t", "replicas": 2, "ray": {"num_cpus": 2, "num_gpus": 0.75}}
DRAFT = {"name": "draft", "role": "draft", "model": "d", "placement": {"with": "target"}, "ray": {"num_gpus": 0.25}}


def state(num_drafts: int) -> DesiredState:
    return DesiredState.of(cluster_config({"pools": [TARGET, {**DRAFT, "replicas": num_drafts}]}))


def placed(desired: DesiredState, others: dict[str, ActorPlacement] | None = None) -> dict[str, ActorPlacement]:
    """The placements of all workers, started one after the other beside `others`."""
    found = dict(others or {})
    for goal in desired.workers:
        if goal.name not in found:
            found[goal.name] = choose(goal, desired, found)
    return found


def test_workers_that_start_together_share_a_group() -> None:
    found = placed(state(1))
    assert [(one.worker, one.num_cpus, one.num_gpus) for one in found["target-0"].group] == [
        ("target-0", 2, 0.75),
        ("draft-0", 1, 0.25),
    ]
    assert found["draft-0"].group == found["target-0"].group
    assert found["target-1"] == ActorPlacement(found["target-1"].own)  # no partner: any node


def test_a_draft_that_starts_later_uses_the_node_of_its_target() -> None:
    found = placed(state(2), placed(state(0)))
    assert [found[name].same_node_as for name in ("draft-0", "draft-1")] == ["target-0", "target-1"]
    assert not any(one.group for one in found.values())


def test_a_replaced_worker_uses_the_room_of_its_group() -> None:
    desired = state(1)
    found = placed(desired)
    others = {name: one for name, one in found.items() if name != "target-0"}
    assert choose(desired.workers[0], desired, others) == found["target-0"]
