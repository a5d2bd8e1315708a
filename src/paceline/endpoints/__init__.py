"""The speculative loop over two servers that speak the OpenAI API: the first drafts, and the second verifies."""

from paceline.endpoints.orchestrator import Orchestrator

__all__ = ["Orchestrator"]
