"""Decides at start whether the shipped head is faster than plain decoding on this CPU, for `draft: auto`.

On a CPU the cost of further rows differs by a factor of three between processors.
"""

from collections.abc import Mapping
from statistics import median

import torch

from paceline.core.clock import Clock
from paceline.engine.sizing.calibration import REPEATS, measure_passes
from paceline.models.architectures.llama import DecoderModel
from paceline.models.drafts.eagle import EagleModel, EagleRunner
from paceline.models.runner import ModelRunner, Span

ALPHA = 0.7
"""Acceptance of a draft, given that all before it were accepted: that of the shipped head over the development prompts."""
MIN_GAIN = 1.2
"""Gain from which the head is used. It leaves out the engine's work for drafts and their prefill, about a tenth of a step."""
MAX_CHAIN = 8
"""Most drafts of a chain that is considered."""


def expected_gain(passes: Mapping[int, float], draft_seconds: float, alpha: float = ALPHA) -> float:
    """Speed over plain decoding of the best chain, for one sequence. `passes`: {target rows: seconds}, from 1 row on;
    `draft_seconds`: time of one drafted token."""
    plain = passes[1]
    gains = [0.0]
    for depth in range(1, MAX_CHAIN + 1):
        if depth + 1 > max(passes):
            break
        tokens = (1 - alpha ** (depth + 1)) / (1 - alpha)
        gains.append(tokens * plain / (_interpolated(passes, depth + 1) + depth * draft_seconds))
    return max(gains)


def _interpolated(passes: Mapping[int, float], rows: int) -> float:
    below, above = max(size for size in passes if size <= rows), min(size for size in passes if size >= rows)
    if below == above:
        return passes[rows]
    share = (rows - below) / (above - below)
    return (1 - share) * passes[below] + share * passes[above]


@torch.inference_mode()
def measure_gain(target: DecoderModel, head: EagleModel, clock: Clock) -> float:
    """`expected_gain` of this head on this machine. It takes about half a second."""
    passes = measure_passes(ModelRunner(target, 1), MAX_CHAIN, MAX_CHAIN, clock)
    runner, states = EagleRunner(head, 1, 1), head.hidden_norm.new_zeros(1, head.config.hidden_size)

    def draft() -> float:
        before = clock.now()
        logits = head.logits(runner.forward([Span([0], 0, [0], 0)], states))
        logits.log_softmax(-1).topk(1)
        return clock.now() - before

    draft()
    return expected_gain(passes, median(draft() for _ in range(REPEATS)))
