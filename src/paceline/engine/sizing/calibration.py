"""Measures target passes and drafts on this machine before the first request.

The depth policy needs the time of target passes and of a draft model in graph steps. Without these times it would have to draft
at a loss to learn them. Under load such probes are rare, and a server whose first traffic is heavy would decode plainly for
minutes.

An EAGLE head is measured in host steps and in graph steps. HAZARD: the first draft of a process is slow. As the only known cost
it would keep the depth policy from drafting for a long time.

`measure_gain` decides at start whether the shipped head is faster than plain decoding on this CPU, for `draft: auto`. On a CPU
the cost of further rows differs by a factor of three between processors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median
from typing import cast

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.config import EngineConfig
from paceline.core.request import SamplingParams
from paceline.core.sequence import BLOCK_SIZE
from paceline.engine import Engine
from paceline.kernels.cpu import native
from paceline.kernels.cpu.eagle_head import TreeRoot
from paceline.models.decoder import DecoderModel
from paceline.models.device import StreamTimer
from paceline.models.heads.eagle import EagleModel, EagleRunner
from paceline.models.runner import ModelRunner, Span, pass_rows
from paceline.policy.cost.curve import LinearCost
from paceline.policy.cost.speculation import GivenCosts, speedup
from paceline.policy.depth.goodput import GoodputDepth
from paceline.speculation import HiddenRows, Proposer, SequenceProgress

CPU_ROWS, CPU_SEQUENCES, CPU_CONTEXT = 64, 8, 2048
"""Limits of the calibration on a CPU: rows of a pass, sequences with context, and tokens of context in all."""


def calibrate(engine: Engine, config: EngineConfig) -> None:
    """Measure passes for the depth policy. This overwrites the cache, so that it does nothing after the first request; the
    policy then learns the costs from steps."""
    depth = engine.speculator.depth
    if not isinstance(depth, GoodputDepth) or not config.speculation.enabled or engine.has_work or engine.num_steps:
        return
    with native.single_threaded_torch():
        count, most = engine.scheduler.max_num_seqs, engine.scheduler.max_batched_tokens
        most = min(4 * count, most)
        if engine.runner.device.type == "cpu":
            # A row costs the same in every larger pass, and the cache takes memory only where it is written
            passes = measure_passes(engine.runner, count, min(CPU_ROWS, most), engine.clock)
            per_token = measure_context(engine.runner, min(count, CPU_SEQUENCES), engine.clock, CPU_CONTEXT)
        else:
            passes = measure_passes(engine.runner, count, most, engine.clock)
            per_token = measure_context(engine.runner, count, engine.clock)
        depth.calibrate(passes, per_token)
        _calibrate_drafts(engine, depth)


def _calibrate_drafts(engine: Engine, depth: GoodputDepth) -> None:
    """Measure the drafts whose first samples in steps would mislead the policy: a draft model on a GPU, and a head."""
    proposers, count = engine.speculator.proposers, engine.scheduler.max_num_seqs
    if engine.graph is not None and "draft_model" in proposers:
        (runner,) = proposers["draft_model"].traits.runners
        costs = measure_drafts(cast(ModelRunner, runner), count, engine.clock)
        depth.calibrate_drafts("draft_model", costs.lines, costs.prefill_seconds)
    if "eagle" in proposers:
        head = cast(EagleRunner, proposers["eagle"].traits.runners[0])
        if engine.graph is None:
            lines = measure_head(proposers["eagle"], head.model, count, depth.max_depth, engine.clock)
            depth.calibrate_drafts("eagle", lines)
        elif "eagle" in engine.speculator.graph_methods:
            costs = measure_head_in_graphs(engine.graph.draft_seconds, head, count)
            depth.calibrate_drafts("eagle", costs.lines, costs.prefill_seconds)


MAX_SECONDS = 2.0
"""Time after which no larger pass is measured."""
REPEATS = 3
_FIRST_CONTEXT, _LONGER = 256, 4
"""Tokens of the first measured context, and the factor to the next."""
_MIN_RATIO = 1.5
"""Ratio of a pass with context to one without from which the cost of context is measurable."""


def measure_passes(runner: ModelRunner, max_num_seqs: int, max_rows: int, clock: Clock) -> dict[int, float]:
    """{rows: seconds} for a few row counts up to `max_rows`, with an empty cache. Up to `max_num_seqs` rows there is one row
    per sequence, then several, as in verification.

    Every span lies in block 0: its content is overwritten before any sequence reads it.
    """
    passes: dict[int, float] = {}
    spent, rows = 0.0, 1
    while rows <= max_rows and spent < MAX_SECONDS:
        each = -(-rows // max_num_seqs)
        places = BLOCK_SIZE + 1 - each
        spans = [Span([0], i % places, [0] * each, num_logits=each) for i in range(rows // each)]
        seconds = passes[len(spans) * each] = median_seconds(runner, spans, clock)
        spent += REPEATS * seconds
        rows *= 2
    return passes


def measure_context(runner: ModelRunner, max_num_seqs: int, clock: Clock, max_tokens: int | None = None) -> float:
    """Seconds that a token of context adds to a pass; 0 for a model with a sliding window in all layers. Measured with as many
    sequences as possible: few long contexts leave part of a GPU idle. `max_tokens` limits all contexts together, for a cache
    that takes memory only where it is written."""
    count = min(max_num_seqs, max(1, runner.num_blocks * BLOCK_SIZE // _FIRST_CONTEXT), runner.num_blocks - 1)
    config = runner.model.config
    if count < 1 or (config.sliding_window is not None and not config.full_layers):
        return 0.0
    blocks_each = (runner.num_blocks - 1) // count
    most = min(blocks_each * BLOCK_SIZE, (runner.model.config.max_position - 1) // BLOCK_SIZE * BLOCK_SIZE)

    def seconds(each: int) -> float:
        """The new row goes to block 0. Sequences share no blocks: shared ones would stay in the processor's cache."""
        firsts = range(1, 1 + count * blocks_each, blocks_each)
        tables = [[*range(first, first + each // BLOCK_SIZE), 0] for first in firsts]
        return median_seconds(runner, [Span(table, each, [0], num_logits=1) for table in tables], clock)

    if max_tokens is not None:
        blocks_each = min(blocks_each, max(1, max_tokens // count // BLOCK_SIZE))
        most = min(most, blocks_each * BLOCK_SIZE)
        for values in (values for layer in runner.cache for values in layer):
            values[: 1 + count * blocks_each] = 0.0  # reads of pages without memory would be too fast
    without = with_context = seconds(0)
    each, spent = min(_FIRST_CONTEXT, most), 0.0
    while each and spent < MAX_SECONDS:
        with_context = seconds(each)
        spent += REPEATS * with_context
        if with_context > _MIN_RATIO * without or each * _LONGER > most:
            break
        each *= _LONGER
    return max(0.0, with_context - without) / (count * each) if each else 0.0


def median_seconds(runner: ModelRunner, spans: Sequence[Span], clock: Clock) -> float:
    """Median time of such a pass, after a first one that compiles."""
    runner.measure_seconds(spans, clock)
    return median(runner.measure_seconds(spans, clock) for _ in range(REPEATS))


CONTEXT = 256
"""Tokens of context of a measured sequence, less if the cache is small."""
DRAFT_PREFILL_ROWS = 2048
"""Most rows of the measured draft prefill: as many as one graph computes."""
DRAFT_SIZES = (1, 8, 32, 64, 256)
"""Numbers of sequences that are measured; a batch of another size costs about as much as the nearest."""


@dataclass(frozen=True, slots=True)
class MeasuredDraftCosts:
    """Measured costs of one draft model."""

    lines: dict[int, LinearCost]
    """Time of drafts by number of sequences."""
    prefill_seconds: float
    """Time of draft prefill per token, of several prompts at once."""


def measure_drafts(runner: ModelRunner, max_num_seqs: int, clock: Clock) -> MeasuredDraftCosts:
    """Costs for batches of up to `max_num_seqs` sequences. The first pass of a round computes two tokens of every sequence,
    each later pass one. The passes overwrite the cache."""
    lines = {}
    for count in sorted({min(size, max_num_seqs) for size in DRAFT_SIZES}, reverse=True):
        two, one_token = (median_seconds(runner, _spans(runner, count, rows), clock) for rows in (2, 1))
        lines[count] = LinearCost(max(0.0, two - one_token), one_token)
    rows = min(CONTEXT, runner.model.config.max_position, (runner.num_blocks - 1) * BLOCK_SIZE)
    num_blocks = -(-rows // BLOCK_SIZE)
    count = max(1, min(DRAFT_PREFILL_ROWS // rows, (runner.num_blocks - 1) // num_blocks))
    prompts = [Span(range(1 + i * num_blocks, 1 + (i + 1) * num_blocks), 0, [0] * rows, 1) for i in range(count)]
    return MeasuredDraftCosts(lines, median_seconds(runner, prompts, clock) / (count * rows))


def _spans(runner: ModelRunner, count: int, rows: int) -> list[Span]:
    """`count` sequences that share no blocks, so that their contexts are read from memory; new rows go to block 0."""
    num_blocks = min(CONTEXT // BLOCK_SIZE, (runner.num_blocks - 1) // count)
    context = num_blocks * BLOCK_SIZE
    firsts = range(1, 1 + count * num_blocks, num_blocks) if num_blocks else [1] * count
    return [Span([*range(first, first + num_blocks), 0], context, [0] * rows, num_logits=1) for first in firsts]


HEAD_SIZES = (1, 8)
"""Numbers of sequences that are measured in host steps; a batch of another size costs about as much as the nearest."""
HEAD_PREFILL_ROWS, PREFILL_SEQUENCES = 256, 8
"""Rows of each sequence of the measured draft prefill, and their number."""
_PROMPT = 16
"""Tokens of a measured sequence."""
_COMMITTED = 2
"""Tokens that a measured round has committed."""


class _Rounds:
    """Rounds of a batch of sequences whose tokens and hidden states are zeros."""

    def __init__(self, proposer: Proposer, head: EagleModel, count: int) -> None:
        self._proposer, self._head = proposer, head
        self._ids = [-1 - i for i in range(count)]  # no sequence of a request
        self._tokens: list[int] = []

    def next(self, depth: int, num_committed: int, clock: Clock) -> float:
        """Seconds in which every sequence gets a draft, after `num_committed` more tokens."""
        start = max(0, len(self._tokens) - 1)
        self._tokens += [0] * num_committed
        states = self._states(len(self._tokens) - 1 - start)
        batch = [self._progress(sequence_id, depth, HiddenRows(start, states, None)) for sequence_id in self._ids]
        began = clock.now()
        self._proposer.observe(batch)
        self._proposer.collect(self._ids, began)
        return clock.now() - began

    def close(self) -> None:
        self._proposer.close(self._ids)

    def _states(self, rows: int) -> dict[int, Tensor]:
        return self._head.zero_states(rows)

    def _progress(self, sequence_id: int, depth: int, hidden: HiddenRows) -> SequenceProgress:
        return SequenceProgress(
            sequence_id,
            self._tokens,
            depth,
            SamplingParams(temperature=0.0),
            seed=0,
            choice=0,
            num_prompt=_PROMPT,
            verification="coupled",
            cache_salt="calibration",
            hidden=hidden,
        )


def measure_head(
    proposer: Proposer, head: EagleModel, max_num_seqs: int, max_depth: int, clock: Clock
) -> dict[int, LinearCost]:
    """The time of drafts of `head` by number of sequences, from rounds with one node and with `max_depth` nodes, the fastest
    of each."""
    lines = {}
    for count in sorted({min(size, max_num_seqs) for size in HEAD_SIZES}):
        rounds = _Rounds(proposer, head, count)
        rounds.next(max_depth, _PROMPT, clock)  # a draft prefill, and what the first draft loads
        depths: Sequence[int] = (1, max(2, max_depth))
        first, deepest = (min(rounds.next(depth, _COMMITTED, clock) for _ in range(REPEATS)) for depth in depths)
        rounds.close()
        per_depth = max(0.0, deepest - first) / (depths[1] - 1)
        lines[count] = LinearCost(max(0.0, first - per_depth), per_depth)
    return lines


def measure_head_in_graphs(
    draft_seconds: Callable[[int], Mapping[int, float]], runner: EagleRunner, max_num_seqs: int
) -> MeasuredDraftCosts:
    """Costs in graph steps. `draft_seconds(size)`: seconds of drafting by number of nodes, for about `size` sequences."""
    lines = {}
    for count in sorted({min(size, max_num_seqs) for size in DRAFT_SIZES}):
        times = draft_seconds(count)
        if len(times) > 1:
            slope, base = linear_regression(list(times), list(times.values()))
            lines[count] = LinearCost(max(0.0, base), max(0.0, slope))
        elif times:
            (seconds,) = times.values()
            lines[count] = LinearCost(seconds, 0.0)
    return MeasuredDraftCosts(lines, median(_prefill_seconds(runner) for _ in range(REPEATS)))


def _prefill_seconds(runner: EagleRunner) -> float:
    """Seconds per token of a draft prefill of several sequences, which write to a lane."""
    rows = min(HEAD_PREFILL_ROWS, len(runner.model.cos))
    span = Span(runner.lane(0)[:1] * -(-rows // BLOCK_SIZE), 0, [0] * rows, 0)
    states = runner.model.zero_states(PREFILL_SEQUENCES * rows)
    timer = StreamTimer(runner.model.device)
    runner.forward([span] * PREFILL_SEQUENCES, states)
    return timer.seconds() / (PREFILL_SEQUENCES * rows)


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
    most = max(passes)
    costs = GivenCosts(passes, {0: 0.0, most: most * draft_seconds})
    return max([speedup(costs, (alpha,), 1, depth) for depth in range(1, most)], default=0.0)


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
    states = head.zero_states(2)
    spans = [Span([0], 0, [0, 0], 0)]
    if native is None or not native.has_plain_states:
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
