"""KV cache events: workers publish them, routers index them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""Tiers, nearest first. Blocks on the device are used in place; blocks of the other tiers are loaded into it."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """These consecutive blocks of one chain can now be found. All their tokens are committed."""

    keys: Sequence[Hashable]
    """Prefix keys, one per block, the same in every tier. Their type is private to the cache."""
    parent: Hashable | None
    """Key of the block before the first; None at the start of a sequence."""
    tokens: Sequence[int]
    """Token ids of all blocks, `block_size` per block."""
    salt: str = ""
    """Cache salt of a chain that starts here. Requests with another salt do not find these blocks."""
    tier: Tier = "device"
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks were removed from this tier. Another tier may still hold them."""

    keys: Sequence[Hashable]
    tier: Tier = "device"


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All tiers are empty."""


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | CacheCleared
