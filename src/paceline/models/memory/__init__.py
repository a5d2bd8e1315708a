"""Memory of models: staged copies, checksums, zeroed blocks."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.memory.copies import ReadAhead, StagedCopies, in_threads
    from paceline.models.memory.memory import memory_checksum, zeroed

__all__ = ["ReadAhead", "StagedCopies", "in_threads", "memory_checksum", "zeroed"]

__getattr__ = lazy_face(__name__, {"copies": "ReadAhead StagedCopies in_threads", "memory": "memory_checksum zeroed"})
