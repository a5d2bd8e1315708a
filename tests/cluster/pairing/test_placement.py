from paceline.cluster.pairing.pairing import colocated_pools
from paceline.core.cluster_config import ClusterConfig
from paceline.core.pool_config import Placement, PoolConfig

TARGET = PoolConfig("target", "target", "m", replicas=2)
DRAFT = PoolConfig("draft", "draft", "m", replicas=3, placement=Placement("target"))
ALONE = PoolConfig("far", "draft", "m")
CONFIG = ClusterConfig((DRAFT, TARGET, ALONE))


def test_pairs_are_together_the_host_first() -> None:
    assert colocated_pools(CONFIG, TARGET, 1) == [TARGET, DRAFT]
    assert colocated_pools(CONFIG, DRAFT, 1) == [TARGET, DRAFT]


def test_who_has_no_partner_is_alone() -> None:
    assert colocated_pools(CONFIG, ALONE, 0) == [ALONE]
    assert colocated_pools(CONFIG, DRAFT, 2) == [DRAFT]
