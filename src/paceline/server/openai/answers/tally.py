"""What a request used and what speculation did for it, over all its prompts and choices."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.core.sequence import SpeculationCounts
from paceline.engine.transcript import speculation_metrics


class Tally:
    def __init__(self, requests: Iterable[Request], max_depth: int) -> None:
        self._prompt_tokens = 0
        self._max_depth = 0
        for request in requests:
            self._prompt_tokens += len(request.prompt_ids)
            wanted = request.speculation.max_depth if request.speculation.enabled else 0
            self._max_depth = max(self._max_depth, max_depth if wanted is None else min(wanted, max_depth))
        self._completion_tokens = 0
        self._cached: dict[str, int] = {}
        self._counts = SpeculationCounts()

    def add(self, output: StepOutput) -> None:
        self._completion_tokens += len(output.tokens)
        if output.choice == 0:  # the others find the first one's prompt, and that is no saving to speak of
            self._cached[output.request_id] = output.num_cached
        if output.drafted:
            self._counts.add(output.drafted, output.accepted)

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    def metrics(self) -> dict[str, Any]:
        return {"speculative_decoding": asdict(speculation_metrics(self._counts, self._max_depth))}
