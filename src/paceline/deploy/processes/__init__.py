"""Workers as local processes: supervisor, pools, rollout."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.deploy.processes.cluster_file import is_cluster_file, load_cluster
    from paceline.deploy.processes.pools import HeldWorker, Pools, ProcessPools
    from paceline.deploy.processes.rollout import LivePools, RolloutRun
    from paceline.deploy.processes.state import AlreadyUp, NotUp, StateFolder
    from paceline.deploy.processes.supervisor import Supervisor

__all__ = [
    "AlreadyUp",
    "HeldWorker",
    "LivePools",
    "NotUp",
    "Pools",
    "ProcessPools",
    "RolloutRun",
    "StateFolder",
    "Supervisor",
    "is_cluster_file",
    "load_cluster",
]

__getattr__ = lazy_face(
    __name__,
    {
        "cluster_file": "is_cluster_file load_cluster",
        "pools": "HeldWorker Pools ProcessPools",
        "rollout": "LivePools RolloutRun",
        "state": "AlreadyUp NotUp StateFolder",
        "supervisor": "Supervisor",
    },
)
