"""A plugin for vLLM: our proposers and draft pool draft for it, and our noise samples for it."""

from paceline.vllm.plugin import register
from paceline.vllm.proposers import LocalProposer, PoolProposer

__all__ = ["LocalProposer", "PoolProposer", "register"]
