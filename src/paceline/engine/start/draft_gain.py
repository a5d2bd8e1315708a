"""Decides at start whether the shipped head is faster than plain decoding on this CPU, for `draft: auto`.

On a CPU the cost of further rows differs by a factor of three between processors.
"""

import math
from collections.abc import Callable, Mapping

import torch

from paceline.core.clock import Clock
from paceline.core.sampling import SamplingParams
from paceline.kernels.eagle_head import TreeRoot
from paceline.models.architectures.llama import DecoderModel
from paceline.models.drafts.eagle import EagleModel, EagleRunner
from paceline.models.runner import ModelRunner, Span, pass_rows

ALPHA = 0.7
"""Acceptance of a draft, given that all before it were accepted: that of the shipped head over the development prompts."""
MIN_GAIN = 1.1
"""Gain from which the head is used. It leaves out the engine's work for drafts and their prefill, about 5% of a step."""
_ROWS = (1, 2, 4, 8)
"""Rows of the measured passes."""
_REPEATS = 5
_CHAIN = 4
"""Drafted tokens of a measured chain."""


def expected_gain(passes: Mapping[int, float], draft_seconds: float, alpha: float = ALPHA) -> float:
    """Speed over plain decoding of the best chain, for one sequence. `passes` is {target rows: seconds}, from 1 row on.
    `draft_seconds` is the time of one drafted token."""
    plain = passes[1]
    gains = [0.0]
    for depth in range(1, max(passes)):
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
    passes, draft = ModelRunner(target, 1), _chain(head)

    def draft_seconds() -> float:
        before = clock.now()
        draft()
        return clock.now() - before

    best = dict.fromkeys((*_ROWS, 0), math.inf)  # 0 rows: a draft
    for _ in range(_REPEATS):  # in turns, so that load affects all alike
        for rows in _ROWS:
            spans = [Span([0], 0, [0] * rows, num_logits=rows)]
            best[rows] = min(best[rows], passes.measure_seconds(spans, clock))
        best[0] = min(best[0], draft_seconds())
    return expected_gain({rows: best[rows] for rows in _ROWS}, best[0] / _CHAIN)


def _chain(head: EagleModel) -> Callable[[], object]:
    """A function that updates the head by two tokens and drafts a chain of `_CHAIN`, as a round does."""
    runner = EagleRunner(head, 1, 2)
    native = head.native(runner.cache)
    states = {layer: head.hidden_norm.new_zeros(2, head.config.hidden_size) for layer in head.config.state_layers}
    spans = [Span([0], 0, [0, 0], 0)]
    if native is None:
        return lambda: [head.logits(runner.forward(spans, states)).topk(1) for _ in range(_CHAIN)]
    inner, rows = runner.inner_rows([(states, slice(None))]), pass_rows(spans)
    root = TreeRoot(
        blocks=range(3),
        num_cached=2,
        position=1,
        next_token=3,
        budget=_CHAIN,
        max_levels=_CHAIN,
        sampling=SamplingParams(temperature=0.0),
        stream=0,
        is_noisy=False,
    )

    def draft() -> object:
        assert states  # the addresses of `inner` are in their memory
        return native.draft(inner, rows, [1], [root], 1, 1)

    return draft
