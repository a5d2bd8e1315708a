"""Tensor parallelism: one process for each rank."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.parallel.commands import RankSpec
    from paceline.models.parallel.gpu import ParallelGpuRunner
    from paceline.models.parallel.ranks import Ranks
    from paceline.models.parallel.runner import ParallelRunner, load_parallel
    from paceline.models.parallel.weights import RankExport, load_from

__all__ = ["ParallelGpuRunner", "ParallelRunner", "RankExport", "RankSpec", "Ranks", "load_from", "load_parallel"]

__getattr__ = lazy_face(
    __name__,
    {
        "commands": "RankSpec",
        "gpu": "ParallelGpuRunner",
        "ranks": "Ranks",
        "runner": "ParallelRunner load_parallel",
        "weights": "RankExport load_from",
    },
)
