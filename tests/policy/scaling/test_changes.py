from dataclasses import replace

import pytest

from paceline.core.cluster_config import ClusterConfig, HealthConfig
from paceline.core.errors import InvalidConfig
from paceline.core.pool_config import PoolConfig, PoolLimits
from paceline.policy.scaling.changes import Change, applied, plan, resized, with_numbers
from paceline.policy.scaling.desired import DesiredState

TARGET, DRAFT = PoolConfig("target", "target", "m", replicas=2), PoolConfig("draft", "draft", "d")
CONFIG = ClusterConfig((TARGET, DRAFT))
STATE = DesiredState.of(CONFIG)


def with_pools(*pools: PoolConfig) -> ClusterConfig:
    return replace(CONFIG, pools=pools)


def test_the_same_file_changes_nothing() -> None:
    assert plan(STATE, CONFIG).changes == ()


def test_replicas_start_and_drain_workers() -> None:
    changes = plan(STATE, with_pools(replace(TARGET, replicas=1), replace(DRAFT, replicas=3))).changes
    assert changes == (
        Change("start", ("draft-1", "draft-2"), "draft", "replicas 1 -> 3"),
        Change("drain", ("target-1",), "target", "replicas 2 -> 1"),
    )


def test_other_settings_replace_the_workers_that_stay() -> None:
    pool = replace(TARGET, replicas=1, limits=PoolLimits(max_num_seqs=8))
    replaced, drained = plan(STATE, with_pools(pool, DRAFT)).changes
    assert replaced == Change("replace", ("target-0",), "target", "limits.max_num_seqs None -> 8")
    assert drained.workers == ("target-1",)
    changes = plan(STATE, replace(CONFIG, router="kv_aware")).changes
    assert [(change.action, change.pool) for change in changes] == [("replace", "target"), ("replace", "draft")]


def test_a_price_replaces_no_worker() -> None:
    assert plan(STATE, with_pools(replace(TARGET, price=2.69), DRAFT)).changes == ()


def test_pools_come_and_go() -> None:
    extra = PoolConfig("prefill", "prefill", "m")
    assert plan(STATE, with_pools(TARGET, DRAFT, extra)).changes == (
        Change("start", ("prefill-0",), "prefill", "new pool"),
    )
    assert plan(STATE, with_pools(TARGET)).changes == (
        Change("drain", ("draft-0",), "draft", "the pool is not in the file"),
    )


def test_settings_of_gateways_are_a_note() -> None:
    found = plan(STATE, replace(CONFIG, health=HealthConfig(canary=1.0)))
    assert found.changes == ()
    assert found.notes == ("health changed: restart the gateways, one at a time",)


def test_what_a_running_cluster_cannot_change() -> None:
    with pytest.raises(InvalidConfig, match="name cannot change while the cluster runs"):
        plan(STATE, replace(CONFIG, name="other"))
    with pytest.raises(InvalidConfig, match="pool 'draft' is a draft pool"):
        plan(STATE, with_pools(TARGET, PoolConfig("draft", "prefill", "m")))


def test_applied_state_keeps_revisions_of_workers_that_stay() -> None:
    after = applied(STATE, with_pools(replace(TARGET, replicas=3), DRAFT))
    assert [(goal.name, goal.revision) for goal in after.workers] == [
        ("target-0", 0), ("target-1", 0), ("target-2", 1), ("draft-0", 0),
    ]  # fmt: skip


def test_numbers_reach_the_highest_worker() -> None:
    state = STATE.scaled("target", 3).without("target-1").scaled("draft", 0)
    assert [pool.replicas for pool in with_numbers(state).pools] == [3, 0]


def test_a_gpu_has_memory_for_a_new_worker_or_the_change_is_refused() -> None:
    state = DesiredState.of(ClusterConfig((PoolConfig("target", "target", "m", devices=("cuda:0",)),)))
    with pytest.raises(InvalidConfig, match=r"target-1 needs 0\.42 of the memory of cuda:0, and 0\.85 is taken"):
        resized(state, "target", 2)
    limits = PoolLimits(memory_fraction=0.4)
    fits = DesiredState.of(ClusterConfig((PoolConfig("target", "target", "m", devices=("cuda:0",), limits=limits),)))
    assert len(resized(fits, "target", 2).workers) == 2
    two = DesiredState.of(ClusterConfig((PoolConfig("target", "target", "m", devices=("cuda:0", "cuda:1")),)))
    assert len(resized(two, "target", 2).workers) == 2


def test_workers_of_an_older_revision_are_replaced() -> None:
    """After a roll-back some workers have the new settings and others do not."""
    new = with_pools(replace(TARGET, limits=PoolLimits(max_num_seqs=8)), DRAFT)
    state = STATE.with_revision(new).scaled("target", 3)
    (change,) = plan(state, replace(new, pools=(replace(new.pools[0], replicas=3), DRAFT))).changes
    assert (change.action, change.workers) == ("replace", ("target-0", "target-1"))
