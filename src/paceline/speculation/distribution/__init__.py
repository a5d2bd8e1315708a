"""The target's distribution of a row."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.speculation.distribution.distribution import (
        log_distribution,
        logprobs,
        pick,
        sample_draft,
        sampled_row,
    )

__all__ = ["log_distribution", "logprobs", "pick", "sample_draft", "sampled_row"]

__getattr__ = lazy_face(__name__, {"distribution": "log_distribution logprobs pick sample_draft sampled_row"})
