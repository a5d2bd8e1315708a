"""Memory of models: staged copies, checksums, zeroed blocks."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.memory.memory import ReadAhead, StagedCopies, in_threads, memory_checksum, zeroed

__all__ = ["ReadAhead", "StagedCopies", "in_threads", "memory_checksum", "zeroed"]

__getattr__ = lazy_face(__name__, {"memory": "ReadAhead StagedCopies in_threads memory_checksum zeroed"})
