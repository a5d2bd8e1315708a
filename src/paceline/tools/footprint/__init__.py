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
    __name__, {"memory_reads": "copy_bandwidth draft_parts footprint kv_bytes_per_token weight_reads"}
)
