"""Which workers share a node. Pure."""

from paceline.core.cluster_config import ClusterConfig
from paceline.core.pool_config import PoolConfig


def together(config: ClusterConfig, pool: PoolConfig, worker: int) -> list[PoolConfig]:
    """The pools whose worker number `worker` belongs on the node of this pool's, the one they are placed with first.

    A pool that nobody is placed with, or that has more workers than the one it is placed with, is alone there.
    """
    host = pool.placement.beside or pool.name
    party = [one for one in config.pools if host in (one.name, one.placement.beside) and worker < one.replicas]
    party.sort(key=lambda one: one.name != host)
    return party if party and party[0].name == host else [pool]
