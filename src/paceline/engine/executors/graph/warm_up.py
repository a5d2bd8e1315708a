"""Passes for nobody, before there is traffic: what it will want is compiled and recorded by then."""

from collections.abc import Collection

from paceline.models.gpu.forward_pass import PassKind
from paceline.models.gpu.runner import GpuRunner
from paceline.speculation.proposer import HiddenRequest, Proposer, forks, hidden_wanted
from paceline.speculation.proposers.draft_model import DraftModelProposer
from paceline.speculation.proposers.eagle import EagleProposer
from paceline.speculation.proposers.layer_skip import LayerSkipProposer


def rehearse_passes(
    target: GpuRunner, proposers: Collection[Proposer], max_num_seqs: int, max_rows: int, window: int
) -> None:
    """All that the host may ask of the target and of those who draft for it."""
    target.rehearse(max_num_seqs, max_rows, window, pass_kinds(proposers))
    for proposer in proposers:
        match proposer:
            case DraftModelProposer(runner=GpuRunner() as runner) | EagleProposer(runner=runner):
                runner.rehearse(max_num_seqs, max_rows, window)
            case LayerSkipProposer(runner=GpuRunner() as runner):  # a row of each sequence at a time
                runner.rehearse(max_num_seqs, max_num_seqs, 1)


def pass_kinds(proposers: Collection[Proposer]) -> set[PassKind]:
    """What the target is asked for, with these to draft for it."""
    kinds = {PassKind()}
    for proposer in proposers:
        wants = hidden_wanted(proposer) or HiddenRequest()
        states = tuple(sorted(wants.layers)), wants.last
        kinds |= {PassKind(is_tree, *states) for is_tree in {False, forks(proposer)}}
    return kinds
