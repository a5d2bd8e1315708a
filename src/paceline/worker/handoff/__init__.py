"""Prompts computed by a prefill worker, or cached by a peer, and decoded by another worker."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.worker.handoff.handoffs import Handoffs
    from paceline.worker.handoff.service import PrefillService

__all__ = ["Handoffs", "PrefillService"]

__getattr__ = lazy_face(__name__, {"handoffs": "Handoffs", "service": "PrefillService"})
