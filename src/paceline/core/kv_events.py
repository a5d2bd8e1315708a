"""What a cache says about its blocks, as it happens: the values that workers publish and routers index."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""Nearest first: what is on the device is used where it is, the others are loaded into it."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """These blocks, one after the other in a chain, can now be found. All their tokens are committed."""

    keys: Sequence[Hashable]
    """One a block, the same in every tier; what they are is the cache's own business."""
    parent: Hashable | None
    """Key of the block before the first; None at the beginning of a sequence."""
    tokens: Sequence[int]
    """Of all blocks, `block_size` each."""
    salt: str = ""
    """The tenant's, of a chain that begins here: what is stored under one salt is not there for another."""
    tier: Tier = "device"
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks are gone from that tier. Another may still have them."""

    keys: Sequence[Hashable]
    tier: Tier = "device"


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing is cached, in any tier."""


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | CacheCleared
