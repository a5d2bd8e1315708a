"""Bytes that a model and its drafts read in a step, and the bandwidth of the memory."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.tools.footprint.memory_reads import (
        copy_bandwidth,
        draft_parts,
        footprint,
        kv_bytes_per_token,
        weight_reads,
    )

__all__ = ["copy_bandwidth", "draft_parts", "footprint", "kv_bytes_per_token", "weight_reads"]

__getattr__ = lazy_face(
    __name__,
    {
        "copy_bandwidth": "memory_reads",
        "draft_parts": "memory_reads",
        "footprint": "memory_reads",
        "kv_bytes_per_token": "memory_reads",
        "weight_reads": "memory_reads",
    },
)
