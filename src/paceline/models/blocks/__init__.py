"""The blocks of a paged cache as bytes, and their copies in host memory."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.blocks.host_blocks import HostBlocks
    from paceline.models.blocks.kv_blocks import (
        Bytes,
        block_bytes,
        cache_fingerprint,
        copy_blocks,
        finish_writes,
        head_shares,
        layer_bytes,
        load_kernels,
        planes,
        read_layer,
        write_layer,
    )

__all__ = [
    "Bytes",
    "HostBlocks",
    "block_bytes",
    "cache_fingerprint",
    "copy_blocks",
    "finish_writes",
    "head_shares",
    "layer_bytes",
    "load_kernels",
    "planes",
    "read_layer",
    "write_layer",
]

__getattr__ = lazy_face(
    __name__,
    {
        "host_blocks": "HostBlocks",
        "kv_blocks": (
            "Bytes block_bytes cache_fingerprint copy_blocks finish_writes head_shares layer_bytes load_kernels"
            " planes read_layer write_layer"
        ),
    },
)
