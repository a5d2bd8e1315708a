"""Warm-up: kernels and the graphs that any traffic needs before the first request, the other graphs in idle moments."""

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq

from paceline.core.timeline import phase
from paceline.engine.hooks.idle_captures import Capture, IdleCaptures
from paceline.kernels.gpu.compilation import count_lookups
from paceline.models.drafts.eagle import EagleRunner
from paceline.models.gpu.forward_pass import PassKind
from paceline.models.gpu.runner import GpuRunner, PassLimits
from paceline.speculation.proposer import HiddenRequest, Proposer


def warm_up_passes(
    target: GpuRunner,
    proposers: Collection[Proposer],
    max_num_seqs: int,
    max_rows: int,
    window: int,
    later: IdleCaptures | None = None,
) -> None:
    """Load the kernels of every pass of the target and of the drafts. `later` captures their graphs in idle moments. If it is
    None, they are captured now."""
    kinds = frozenset(pass_kinds(proposers))
    captures: list[Capture] = []
    with phase("load kernels") as loading:
        counts = count_lookups()
        for runner, limits in _runners(target, proposers, PassLimits(max_num_seqs, max_rows, window, kinds)):
            if isinstance(runner, EagleRunner):
                runner.warm_up(limits.max_num_seqs, limits.max_rows, limits.longest)
                continue
            runner.load_kernels(limits)
            captures.extend(runner.captures(limits))
        loading.note = f"{counts.hits} in the cache, {counts.misses} compiled"
    if later is not None:
        later.add(captures)
        return
    with phase("capture passes") as capturing:
        for capture in captures:
            capture()
        capturing.note = f"{len(captures)} graphs"


def capture_steps(first: Seq[Capture], later: Seq[Capture], idle: IdleCaptures) -> None:
    """Capture the first graphs now, and the remaining graphs in idle moments."""
    with phase("capture steps") as capturing:
        for capture in first:
            capture()
        idle.add(later)
        capturing.note = f"{len(first)} of {len(first) + idle.num_waiting}"


def _runners(
    target: GpuRunner, proposers: Collection[Proposer], limits: PassLimits
) -> Iterator[tuple[GpuRunner | EagleRunner, PassLimits]]:
    """The runners of the target and of the drafts, with the limits of their passes."""
    yield target, limits
    plain = frozenset({PassKind()})
    for runner in dict.fromkeys(runner for proposer in proposers for runner in proposer.traits.runners):
        if isinstance(runner, GpuRunner) and runner.cache[0] is target.cache[0]:
            # Layers of the target draft one row of a sequence at a time
            yield runner, PassLimits(limits.max_num_seqs, limits.max_num_seqs, 1, plain)
        elif isinstance(runner, GpuRunner | EagleRunner):
            yield runner, PassLimits(limits.max_num_seqs, limits.max_rows, limits.longest, plain)


def pass_kinds(proposers: Collection[Proposer]) -> set[PassKind]:
    """The kinds of passes that the target computes for these proposers."""
    kinds = {PassKind()}
    for proposer in proposers:
        wants = proposer.traits.hidden or HiddenRequest()
        states = tuple(sorted(wants.layers)), wants.last
        kinds |= {PassKind(is_tree, *states) for is_tree in {False, proposer.traits.is_tree}}
    return kinds
