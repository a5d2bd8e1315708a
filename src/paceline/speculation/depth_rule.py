"""The depth policy and the circuit breaker that a configuration names."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.config import PUBLISHED_DEPTHS, SpeculationConfig
from paceline.speculation.depth.breaker import Breaker, BreakerRule
from paceline.speculation.depth.goodput import GoodputDepth
from paceline.speculation.depth.padded_batch import PaddedBatch
from paceline.speculation.depth.policy import DepthPolicy
from paceline.speculation.depth.simple_rules import AdditiveDepth, FixedDepth, ThresholdDepth


def make_depth(config: SpeculationConfig, max_depth: int, padded: Sequence[PaddedBatch] = ()) -> DepthPolicy:
    """`padded` are the rows of padded passes, if the engine has any."""
    if config.depth == "fixed" or max_depth == 0:
        return FixedDepth(max_depth)
    if config.depth == "goodput":
        return GoodputDepth(max_depth, padded=padded)
    bounds = {"most": max_depth}
    if config.min_depth is not None:
        bounds["least"] = config.min_depth
    if config.depth == "threshold":
        return ThresholdDepth(**bounds)
    if config.acceptance_threshold is None:
        return AdditiveDepth(**bounds)
    return AdditiveDepth(config.acceptance_threshold, **bounds)


def make_breaker(config: SpeculationConfig) -> Breaker:
    """The published rules count single rounds. The other rules count windows, by measured gain where it is known."""
    rule = BreakerRule(trips=config.breaker_rounds)
    if config.depth in PUBLISHED_DEPTHS:
        rule = replace(rule, window=1, conditional=False)
    if config.acceptance_threshold is not None:
        rule = replace(rule, threshold=config.acceptance_threshold)
    return Breaker(rule)
