"""Where an engine's time goes, added up for reports. Nothing is decided by it."""

from collections.abc import Mapping

DRAFT, NETWORK, VERIFY = "draft", "network", "verify"
"""Parts of a step that drafted: waiting for drafts, the network's share of that, and the target's pass."""
PLAIN = "plain"
"""A step without drafts."""
PROMPT = "prompt"
"""A step that also computed prompts: its seconds tell nothing about either of the others."""


class StepTotals:
    """One writer; readers on any thread copy."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys((DRAFT, NETWORK, VERIFY, PLAIN, PROMPT), 0.0)

    @property
    def seconds(self) -> Mapping[str, float]:
        """By part, since the start."""
        return dict(self._seconds)

    def add(self, prefill_rows: int, drafted: bool, draft: float, network: float, verify: float) -> None:
        """One step. `drafted`: whether anybody was asked for drafts."""
        if prefill_rows:
            self._seconds[PROMPT] += draft + network + verify
        elif drafted:
            self._seconds[DRAFT] += draft
            self._seconds[NETWORK] += network
            self._seconds[VERIFY] += verify
        else:
            self._seconds[PLAIN] += draft + network + verify
