"""A plugin for vLLM: our proposers and draft pool draft for it, and our noise samples for it."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.vllm.plugin import register
    from paceline.vllm.proposers import LocalProposer, PoolProposer

__all__ = ["LocalProposer", "PoolProposer", "register"]

__getattr__ = lazy_face(__name__, {"plugin": "register", "proposers": "LocalProposer PoolProposer"})
