"""Paged blocks and the prefix cache."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.kv.block_tables import BlockTables, blocks_for
    from paceline.kv.prefix import PrefixSums, chain_keys

__all__ = ["BlockTables", "PrefixSums", "blocks_for", "chain_keys"]

__getattr__ = lazy_face(__name__, {"block_tables": "BlockTables blocks_for", "prefix": "PrefixSums chain_keys"})
