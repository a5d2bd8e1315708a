"""The rows of a verification pass: the context of each row, its noise, and the processing of its logits."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.speculation.rows.noise import Purpose, gumbel, gumbel_at, stream, uniform
    from paceline.speculation.rows.rows import Facts, RowContext, process, row_contexts

__all__ = ["Facts", "Purpose", "RowContext", "gumbel", "gumbel_at", "process", "row_contexts", "stream", "uniform"]

__getattr__ = lazy_face(
    __name__, {"noise": "Purpose gumbel gumbel_at stream uniform", "rows": "Facts RowContext process row_contexts"}
)
