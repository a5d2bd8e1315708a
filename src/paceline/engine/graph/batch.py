"""A batch whose decoding steps run on the device alone: draft, verify and accept, three CUDA graphs without a wait.

The length and the last two tokens of each sequence stay on the device and every step updates them, so that the host can submit
the next step before it has read the outcome of the last. The host keeps the block tables, the depths and the active slots, and
copies them to the device with every step.

`RoundBuffers` is the device memory of steps of one shape. `ControlBuffer` holds the inputs of a step that the host writes:
active slots, draft limits and block tables.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.core.sequence import Sequence
from paceline.engine.graph.drafter import (
    NO_DRAFTS,
    DraftPart,
    DraftPrefills,
    DraftShape,
    DraftTensors,
    GraphProposer,
)
from paceline.engine.graph.inflight import InflightStep, StepBuffers
from paceline.engine.graph.mixed import SlotInputs
from paceline.engine.graph.rows import ChainRows, TreeRows
from paceline.engine.graph.selection import make_drafter
from paceline.engine.graph.slot_params import WARM_UP_ALL, WARM_UP_FEATURES, WARM_UP_SAMPLING, Sampling, Slot
from paceline.engine.graph.slots import DeviceSlots
from paceline.kernels.gpu.speculation.accept import Accepted, accept_chains
from paceline.kernels.gpu.speculation.accept_tree import AcceptedPath, accept_trees
from paceline.kernels.gpu.speculation.edits import DraftedRows
from paceline.kernels.gpu.speculation.scores import COLUMNS
from paceline.models.decoder import ForwardOutput
from paceline.models.device import Graph, StreamTimer
from paceline.models.runner.gpu import GpuRunner


class RoundBuffers:
    """What a step of one shape writes: the accepted path, and the rows and logits of its pass."""

    def __init__(
        self, target: GpuRunner, tables: Tensor, size: int, shape: DraftShape, drafts: DraftTensors | None
    ) -> None:
        device, rows = target.device, 1 + shape.nodes
        self.report = torch.zeros(3, size, dtype=torch.int32, device=device)  # accepted, is bonus, levels
        self.path = AcceptedPath(
            self.report[0],
            self.report[1],
            torch.full((size, 1 + shape.levels), -1, dtype=torch.int64, device=device),
            torch.arange(0, size * rows, rows, device=device).unsqueeze(1).repeat(1, 1 + shape.levels),
        )
        self.chain: ChainRows | None = None
        self.tree: TreeRows | None = None
        if drafts is None or drafts.parents is None:
            self.chain = ChainRows(target, tables, size, rows, target.workspace.logits(size * rows))
        else:
            self.tree = TreeRows(target, tables, self.report[2], shape.nodes, shape.levels)
        self.drafts = drafts
        self.output: ForwardOutput | None = None
        self.scores: Tensor | None = None
        """[S * (1 + L), COLUMNS] int32: the committed tokens, in steps with log-probabilities."""

    @property
    def positions(self) -> Tensor:
        """Positions of the rows."""
        return (self.chain or self.tree).positions  # type: ignore[union-attr]  # it is one of them

    def drafted(self) -> DraftedRows | None:
        """The drafts before each row."""
        if self.drafts is None:
            return None
        tokens = self.drafts.tokens
        ancestors = None if self.tree is None else self.tree.places.ancestors
        return DraftedRows(tokens, 1 + tokens.shape[1], len(self.positions), ancestors=ancestors)


Numbers = np.ndarray[Any, np.dtype[np.int32]]


class BlockTableRows:
    """Block tables by slot; unused entries point to the scratch block. A table that is the same object as in the step before
    has only grown, so that only its new blocks are written."""

    def __init__(self, rows: Numbers, scratch: int) -> None:
        self._rows, self._scratch = rows, scratch
        self._rows[:] = scratch
        self._tables: list[Seq[int]] = [()] * len(self._rows)
        self._counts = [0] * len(self._rows)

    def write(self, tables: Seq[Seq[int]]) -> None:
        tables = [*tables, *[()] * (len(self._tables) - len(tables))]
        for slot, (table, known, start) in enumerate(zip(tables, self._tables, self._counts, strict=True)):
            count = len(table)
            if table is known and count == start:
                continue
            if table is not known:
                self._rows[slot] = self._scratch
                start = 0
            self._rows[slot, start:count] = table[start:]
            self._tables[slot], self._counts[slot] = table, count


class ControlBuffer:
    """The host's inputs of one step, in pinned memory of its own."""

    def __init__(self, numbers: Numbers, size: int, width: int, scratch: int, draft_scratch: int | None) -> None:
        """`width` is the number of columns of the target's block tables. The draft's tables take the rest of `numbers`."""
        self._active, self._limits = numbers[: 2 * size].reshape(2, size)
        own, drafts = np.split(numbers[2 * size :], [width * size])
        self._tables = BlockTableRows(own.reshape(size, width), scratch)
        self._draft_tables = None if draft_scratch is None else BlockTableRows(drafts.reshape(size, -1), draft_scratch)

    def write(self, limits: Seq[int | None], tables: Seq[Seq[int]], draft_tables: Seq[Seq[int]]) -> None:
        """Writes the arguments of `GraphBatch.submit`, which are by slot."""
        slots = len(limits)
        self._active[:slots] = [limit is not None for limit in limits]
        self._limits[:slots] = [limit or 0 for limit in limits]
        self._active[slots:] = self._limits[slots:] = 0
        self._tables.write(tables)
        if self._draft_tables is not None:
            self._draft_tables.write(draft_tables)


Part = Literal["draft", "extend", "follow", "verify", "accept"]


class GraphKey(NamedTuple):
    part: Part
    shape: DraftShape
    sampling: Sampling | None
    """None if the part does not depend on it."""
    keeps: bool
    """Whether it keeps hidden states."""


def _is_optional(key: GraphKey) -> bool:
    """Whether the part has so few kernels that a step runs it without a graph."""
    return key.part == "accept" and key.sampling is not None and key.sampling.has_features


Capture = Callable[[], object]
TIMED_RUNS = 5
"""Runs of a graph that is timed; their median counts."""
IN_FLIGHT = 2
"""Steps in flight at once: one being computed, one queued behind it."""


class GraphBatch:
    """Steps of up to `size` sequences, with drafts of `proposer` if there is one."""

    def __init__(
        self,
        target: GpuRunner,
        proposer: GraphProposer | None,
        prefills: DraftPrefills | None,
        largest: DeviceSlots,
        size: int,
        max_depth: int,
    ) -> None:
        """`largest` holds the slots of the largest batch; this batch has the first `size` of them. `prefills` computes the
        draft prefills of a proposer that drafts with a model."""
        self.target, self.size, self.device = target, size, target.device
        self.slots = DeviceSlots(size, self.device, largest)
        vocab_size = target.model.config.vocab_size
        self.drafter = make_drafter(proposer, self.slots, vocab_size, prefills, max_depth) if proposer else None
        drafter, width = self.drafter, target.table_width
        draft_width = drafter.table_width if drafter else 0
        # Copied to the device with every step: active slots, node limits, the target's block tables, the draft's
        self._control = torch.zeros(size * (2 + width + draft_width), dtype=torch.int32, device=self.device)
        parts = self._control.split([size, size, size * width, size * draft_width])
        self._active, self._limits, self.tables = parts[0], parts[1], parts[2].view(size, width)
        if drafter:
            drafter.bind(parts[3].view(size, draft_width))
        most = drafter.shape(max_depth).levels if drafter else 0
        self._buffers = [StepBuffers(size, most, len(self._control), self.device) for _ in range(IN_FLIGHT)]
        widths = size, width, target.scratch_block, drafter.scratch_block if drafter else None
        self._controls = [ControlBuffer(buffers.control.numpy(), *widths) for buffers in self._buffers]
        self._count = 0
        self._capture_layers = drafter.state_layers if drafter else ()
        self._graphs: dict[GraphKey, Graph[None]] = {}
        self._eager: dict[GraphKey, Callable[[], None]] = {}
        """Parts that run without a graph."""
        self._rounds: dict[DraftShape, RoundBuffers] = {}

    @torch.inference_mode()
    def begin(
        self,
        shape: DraftShape,
        limits: Seq[int | None],
        tables: Seq[Seq[int]],
        draft_tables: Seq[Seq[int]],
    ) -> StepBuffers:
        """Queue the copy of the host's inputs of the next step, and its drafts. All arguments but `shape` are by slot. `limits`
        are the draft tokens granted, None for an empty slot. A block table that is the same object as in an earlier step has
        the blocks it had then, and perhaps more."""
        turn = self._count % IN_FLIGHT
        buffers = self._buffers[turn]
        self._count += 1
        self._controls[turn].write(limits, tables, draft_tables)
        self._control.copy_(buffers.control, non_blocking=True)
        buffers.begin.record()
        for part in self.drafter.begin(shape) if self.drafter else ():
            self._run(*part)
        buffers.drafted.record()
        return buffers

    def inputs(self, shape: DraftShape) -> SlotInputs:
        """What a mixed step reads of the slots after `begin`."""
        drafts = self.drafter.drafts(shape).tokens.contiguous() if self.drafter and shape != NO_DRAFTS else None
        return SlotInputs(self.tables, self._active, self._limits, drafts)

    @torch.inference_mode()
    def submit(
        self,
        shape: DraftShape,
        sequences: Seq[Sequence | None],
        limits: Seq[int | None],
        tables: Seq[Seq[int]],
        draft_tables: Seq[Seq[int]],
    ) -> InflightStep:
        """Queue one step; the arguments by slot are those of `begin`."""
        num_graphs = len(self._graphs)
        buffers = self.begin(shape, limits, tables, draft_tables)
        self._run("verify", shape)
        buffers.verified.record()
        self._run("accept", shape, self.drafter is not None and self.drafter.wants_states)
        round_, is_scored = self._round(shape), self.slots.sampling.is_scored
        buffers.report.copy_(round_.report, non_blocking=True)
        buffers.tokens_at(shape.levels).copy_(round_.path.tokens, non_blocking=True)
        if round_.tree is not None:
            buffers.rows_at(shape.levels).copy_(round_.path.rows, non_blocking=True)
        if is_scored:
            assert round_.scores is not None
            buffers.scores_at(shape.levels).copy_(round_.scores, non_blocking=True)
        buffers.end.record()
        is_timed = len(self._graphs) == num_graphs
        return InflightStep(shape, round_.tree is not None, sequences, limits, buffers, is_timed, is_scored)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def captures(self, max_depth: int, max_rows: int) -> list[Capture]:
        """Functions that capture the graphs of every shape of up to `max_rows` rows, over empty slots."""
        captures: list[Capture] = [
            partial(self._capture, shape, params)
            for shape in self.shapes(max_depth, max_rows)
            for params in (*WARM_UP_SAMPLING, *WARM_UP_FEATURES)
        ]
        return [*captures, partial(self._graph, "follow", NO_DRAFTS)] if self.drafter else captures

    def _draft_parts(self, shape: DraftShape) -> tuple[DraftPart, ...]:
        return self.drafter.parts(shape) if self.drafter and shape != NO_DRAFTS else ()

    @torch.inference_mode()
    def _capture(self, shape: DraftShape, params: SamplingParams) -> None:
        """Capture the graphs of one shape and one sampling. No sequence is in a slot."""
        self._clear(params)
        self._graph("verify", shape)
        for part in self._draft_parts(shape):
            self._graph(*part)
        self._graph("accept", shape, bool(self._capture_layers))
        if not shape.nodes:  # without drafts no states are kept
            self._graph("accept", shape)

    @torch.inference_mode()
    def load_features(self) -> None:
        """Load the kernels of steps whose features together have no graph."""
        self._clear(WARM_UP_ALL)
        for shape in (NO_DRAFTS, self.drafter.shape(1) if self.drafter else NO_DRAFTS):
            self._run("verify", shape)
            self._run("accept", shape)

    @torch.inference_mode()
    def draft_seconds(self, shape: DraftShape) -> float:
        """Time of the drafts of a step, over empty slots."""
        self._clear(WARM_UP_SAMPLING[0])
        graphs, seconds = [self._graph(*part) for part in self._draft_parts(shape)], []
        with self._kept():
            for _ in range(TIMED_RUNS):
                timer = StreamTimer(self.device)
                for graph in graphs:
                    graph.replay()
                seconds.append(timer.seconds())
        return median(seconds)

    def _clear(self, params: SamplingParams) -> None:
        """Empty all slots, and set the sampling of the next captures."""
        empty = [()] * self.size
        self._controls[0].write([None] * self.size, empty, empty)
        self._control.copy_(self._buffers[0].control)
        self.slots.load([Slot((0, 0), params, 0, 0)])

    def most_rows(self, max_depth: int, max_rows: int) -> int:
        """Rows of the largest step that `warm_up` captures."""
        return max((self.size * (1 + shape.nodes) for shape in self.shapes(max_depth, max_rows)), default=0)

    def shapes(self, max_depth: int, max_rows: int) -> list[DraftShape]:
        """Shapes of steps of up to `max_rows` rows, the largest first."""
        drafted = {self.drafter.shape(depth) for depth in range(1, max_depth + 1)} if self.drafter else set()
        fitting = [shape for shape in {NO_DRAFTS, *drafted} if self.size * (1 + shape.nodes) <= max_rows]
        return sorted(fitting, key=lambda shape: -shape.nodes)

    def _round(self, shape: DraftShape) -> RoundBuffers:
        if shape not in self._rounds:
            drafts = self.drafter.drafts(shape) if self.drafter and shape != NO_DRAFTS else None
            self._rounds[shape] = RoundBuffers(self.target, self.tables, self.size, shape, drafts)
        return self._rounds[shape]

    def _key(self, part: Part, shape: DraftShape, keeps: bool = False) -> GraphKey:
        if part in ("verify", "follow"):  # passes alone
            return GraphKey(part, shape, None, keeps)
        sampling = self.slots.sampling
        if part != "accept":
            assert self.drafter is not None
            sampling = Sampling(sampling.kind, sampling.is_edited and self.drafter.edits_logits)
        return GraphKey(part, shape, sampling, keeps)

    def _run(self, part: Part, shape: DraftShape, keeps: bool = False) -> None:
        """Queue a part of a step: its graph, which is captured if it is missing and the part needs one."""
        key = self._key(part, shape, keeps)
        if key in self._graphs or not _is_optional(key):
            self._captured(key).replay()
            return
        if key not in self._eager:
            self._eager[key] = self._part(key)
        self._eager[key]()

    def _graph(self, part: Part, shape: DraftShape, keeps: bool = False) -> Graph[None]:
        return self._captured(self._key(part, shape, keeps))

    def _captured(self, key: GraphKey) -> Graph[None]:
        if key not in self._graphs:
            work = self._part(key)
            # A capture runs the function once for real. Without an active slot nothing is accepted and no cached key moves.
            with self._kept():
                if key.part == "accept":
                    self._active.zero_()
                self._graphs[key] = Graph(work, self.device, self.target.graph_pool)
            self._eager.pop(key, None)
        return self._graphs[key]

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Undo the updates of graphs that run inside it."""
        updated = (self._active, *(self.drafter.state if self.drafter else ()))
        kept = [tensor.clone() for tensor in updated]
        yield
        for tensor, before in zip(updated, kept, strict=True):
            tensor.copy_(before)

    def _part(self, key: GraphKey) -> Callable[[], None]:
        if key.part == "verify":
            return self._verify_part(key.shape)
        if key.part == "accept":
            assert key.sampling is not None
            return self._accept_part(key.shape, key.sampling, key.keeps)
        assert self.drafter is not None
        return self.drafter.work(DraftPart(key.part, key.shape), key.sampling or Sampling("greedy"))

    def _verify_part(self, shape: DraftShape) -> Callable[[], None]:
        """The target's pass over the last committed token and the drafts."""
        round_, state = self._round(shape), self.slots.state
        drafts = round_.drafts

        def compute() -> None:
            tokens = state.last[:, 1:]
            if drafts is not None:
                tokens = torch.cat((tokens, drafts.tokens), 1)
            tokens = tokens.flatten().contiguous()  # a single column would stay a view with gaps
            if round_.chain is not None:
                round_.output = round_.chain.forward(tokens, state.lengths, -1, self._capture_layers)
            else:
                assert round_.tree is not None
                assert drafts is not None
                assert drafts.parents is not None
                round_.output = round_.tree.forward(
                    tokens, state.lengths, drafts.parents, self._limits, self._capture_layers
                )

        return compute

    def _accept_part(self, shape: DraftShape, sampling: Sampling, keeps: bool) -> Callable[[], None]:
        """Sample the target's tokens, accept the drafts that agree, and update the state; the drafter's too if it
        `keeps` hidden states."""
        round_, rows, slots, state = self._round(shape), 1 + shape.nodes, self.slots, self.slots.state
        choose, path, drafts = slots.picker(rows, sampling), round_.path, round_.drafts
        score, num_tokens = slots.scorer(path.tokens.numel()), path.tokens.shape[1]
        if sampling.is_scored and round_.scores is None:
            round_.scores = torch.zeros(path.tokens.numel(), COLUMNS, dtype=torch.int32, device=self.device)
        every = torch.arange(self.size * rows, device=self.device)
        none = torch.zeros(self.size, 0, dtype=torch.int64, device=self.device)

        def compute() -> None:
            assert round_.output is not None
            assert round_.output.logits is not None
            logits = round_.output.logits
            picks = choose(logits, round_.positions + 1, round_.drafted()).view(self.size, rows)
            if round_.tree is not None:
                assert drafts is not None
                assert drafts.parents is not None
                accept_trees(drafts.tokens, drafts.parents, picks, self._limits, self._active, state, path)
                contexts = round_.tree.places.contexts
                self.target.move_paths(contexts, self.tables, path.rows, path.counts, rows)
            else:
                tokens = drafts.tokens.contiguous() if drafts is not None else none
                out = Accepted(path.counts, path.tokens)
                accept_chains(tokens, picks, self._limits, self._active, state, out)
            slots.count(path.tokens, sampling)
            if sampling.is_scored:
                assert round_.scores is not None
                places = every if round_.tree is None else path.rows.flatten()
                score(logits, places, path.tokens.flatten(), num_tokens, round_.scores)
            if keeps:
                assert self.drafter is not None
                self.drafter.keep_states(round_.output.hidden_by_layer, path, self._active)

        return compute
