from paceline.cluster.pairing.placement import together
from paceline.core.cluster_config import ClusterConfig
from paceline.core.pool_config import Placement, PoolConfig

TARGET = PoolConfig("target", "target", "m", replicas=2)
DRAFT = PoolConfig("draft", "draft", "m", replicas=3, placement=Placement("target"))
ALONE = PoolConfig("far", "draft", "m")
CONFIG = ClusterConfig((DRAFT, TARGET, ALONE))


def test_pairs_are_together_the_host_first() -> None:
    assert together(CONFIG, TARGET, 1) == [TARGET, DRAFT]
    assert together(CONFIG, DRAFT, 1) == [TARGET, DRAFT]


def test_who_has_no_partner_is_alone() -> None:
    assert together(CONFIG, ALONE, 0) == [ALONE]
    assert together(CONFIG, DRAFT, 2) == [DRAFT]
