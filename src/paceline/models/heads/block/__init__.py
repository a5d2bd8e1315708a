"""Block drafters: DFlash and DSpark."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.heads.block.block import BlockModel, BlockRunner
    from paceline.models.heads.block.block_forms import read_block
    from paceline.models.heads.block.block_weights import BlockConfig, MarkovState

__all__ = ["BlockConfig", "BlockModel", "BlockRunner", "MarkovState", "read_block"]

__getattr__ = lazy_face(
    __name__,
    {
        "block": "BlockModel BlockRunner",
        "block_forms": "read_block",
        "block_weights": "BlockConfig MarkovState",
    },
)
