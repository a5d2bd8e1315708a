"""Warm-up of the passes that the host launches: compiles and captures them before the first request."""

from collections.abc import Collection

from paceline.models.drafts.eagle import EagleRunner
from paceline.models.gpu.forward_pass import PassKind
from paceline.models.gpu.runner import GpuRunner
from paceline.speculation.proposer import HiddenRequest, Proposer


def warm_up_passes(
    target: GpuRunner, proposers: Collection[Proposer], max_num_seqs: int, max_rows: int, window: int
) -> None:
    """Warm up every pass of the target and of the drafts."""
    target.warm_up(max_num_seqs, max_rows, window, pass_kinds(proposers))
    for runner in dict.fromkeys(runner for proposer in proposers for runner in proposer.traits.runners):
        if isinstance(runner, GpuRunner) and runner.cache[0] is target.cache[0]:
            runner.warm_up(max_num_seqs, max_num_seqs, 1)  # layers of the target draft one row of a sequence at a time
        elif isinstance(runner, GpuRunner | EagleRunner):
            runner.warm_up(max_num_seqs, max_rows, window)


def pass_kinds(proposers: Collection[Proposer]) -> set[PassKind]:
    """The kinds of passes that the target computes for these proposers."""
    kinds = {PassKind()}
    for proposer in proposers:
        wants = proposer.traits.hidden or HiddenRequest()
        states = tuple(sorted(wants.layers)), wants.last
        kinds |= {PassKind(is_tree, *states) for is_tree in {False, proposer.traits.is_tree}}
    return kinds
