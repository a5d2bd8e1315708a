"""Cached blocks in host memory and on disk: eviction from the device, and loading back."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.kv.tiers.block import TieredBlock
    from paceline.kv.tiers.store import TierStore
    from paceline.kv.tiers.tiers import DiskFolder, Fetch

__all__ = ["DiskFolder", "Fetch", "TierStore", "TieredBlock"]

__getattr__ = lazy_face(__name__, {"block": "TieredBlock", "store": "TierStore", "tiers": "DiskFolder Fetch"})
