"""The shapes of a model's weights, and their split over ranks."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.shards.shards import Shard, ShardedWeights, check_split, rank_ranges, shard_config

__all__ = ["Shard", "ShardedWeights", "check_split", "rank_ranges", "shard_config"]

__getattr__ = lazy_face(__name__, {"shards": "Shard ShardedWeights check_split rank_ranges shard_config"})
