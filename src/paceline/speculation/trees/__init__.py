"""Draft trees: growing and ranking."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.speculation.trees.growth import Growth, RankRules, draft_row, rank, tree_root

__all__ = ["Growth", "RankRules", "draft_row", "rank", "tree_root"]

__getattr__ = lazy_face(__name__, {"growth": "Growth RankRules draft_row rank tree_root"})
