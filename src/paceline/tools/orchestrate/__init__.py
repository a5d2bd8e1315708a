"""The speculative loop over two servers that speak the OpenAI API: one drafts, the other verifies."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.tools.orchestrate.orchestrator import Answer, Orchestrator

__all__ = ["Answer", "Orchestrator"]

__getattr__ = lazy_face(__name__, {"orchestrator": "Answer Orchestrator"})
