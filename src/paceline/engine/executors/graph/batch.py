"""A batch that decodes on the device by itself: one round is draft, verify, accept, three CUDA graphs and no wait.

What a round needs to know of each sequence (how long it is, its last two tokens) stays on the device and is moved on by the
round itself, so that the host may launch the next one before it has seen what the last one brought. The host keeps the
books: blocks, depths and who is still there go up with every launch.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal

import torch

from paceline.core.sampling import SamplingParams
from paceline.engine.executors.graph.chain_drafter import ChainDrafter
from paceline.engine.executors.graph.control import Control
from paceline.engine.executors.graph.drafter import NOTHING, DeviceDrafter, DeviceProposer, DraftShape
from paceline.engine.executors.graph.inflight import Flight, Launch
from paceline.engine.executors.graph.round import DeviceRound
from paceline.engine.executors.graph.slots import DeviceSeats, Sampling, Seat
from paceline.engine.executors.graph.tree_drafter import TreeDrafter
from paceline.kernels.gpu.speculation.accept import Accepted, accept_chains
from paceline.kernels.gpu.speculation.accept_tree import accept_trees
from paceline.kernels.gpu.speculation.tree_rows import CacheAddresses, move_paths
from paceline.models.cuda_graph import Graph
from paceline.models.gpu.runner import GpuRunner
from paceline.speculation.proposers.eagle import EagleProposer

Part = Literal["draft", "follow", "verify", "accept"]
REHEARSED = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9))
"""One for each `Sampling`."""
IN_FLIGHT = 2
"""Rounds that may be under way at once: one being computed, one behind it."""


class DeviceBatch:
    """Rounds over up to `size` sequences, with drafts of `proposer` if there is one."""

    def __init__(self, target: GpuRunner, proposer: DeviceProposer | None, size: int, max_depth: int) -> None:
        self.target, self.size, self.device = target, size, target.device
        self.seats = DeviceSeats(size, self.device)
        self.drafter = device_drafter(proposer, self.seats, target.model.config.vocab_size) if proposer else None
        drafter, width = self.drafter, target.table_width
        draft_width = drafter.table_width if drafter else 0
        # Goes up with every launch: active, node limits, the target's tables, the draft's
        self._control = torch.zeros(size * (2 + width + draft_width), dtype=torch.int32, device=self.device)
        parts = self._control.split([size, size, size * width, size * draft_width])
        self._active, self._limits, self._tables = parts[0], parts[1], parts[2].view(size, width)
        if drafter:
            drafter.bind(parts[3].view(size, draft_width))
        most = drafter.shape(max_depth).levels if drafter else 0
        self._launches = [Launch(size, most, len(self._control), self.device) for _ in range(IN_FLIGHT)]
        told = size, width, target.scratch_block, drafter.scratch_block if drafter else None
        self._controls = [Control(launch.control.numpy(), *told) for launch in self._launches]
        self._count = 0
        self._capture = drafter.capture if drafter else ()
        self._cache = CacheAddresses(target.cache)
        self._graphs: dict[tuple[Part, DraftShape, Sampling | None, bool], Graph[None]] = {}
        self._rounds: dict[DraftShape, DeviceRound] = {}

    def board(self, seats: Seq[Seat]) -> None:
        """Start anew with these sequences, in this order. No round is under way."""
        self.seats.board(seats)
        for control in self._controls:
            control.clear()

    @torch.inference_mode()
    def launch(
        self, shape: DraftShape, limits: Seq[int | None], tables: Seq[Seq[int]], draft_tables: Seq[Seq[int]]
    ) -> Flight:
        """One more round. By seat: how many nodes it wants (None: it is empty), and its blocks. A table that is the same object
        as in a launch before has the blocks it had then, and perhaps more."""
        turn = self._count % IN_FLIGHT
        launch = self._launches[turn]
        self._count += 1
        self._controls[turn].write(limits, tables, draft_tables)
        self._control.copy_(launch.control, non_blocking=True)
        num_graphs = len(self._graphs)
        launch.begin.record()
        first = self.drafter.begin(shape) if self.drafter else None
        if first is not None:
            self._graph(first, shape).replay()
        launch.drafted.record()
        self._graph("verify", shape).replay()
        launch.verified.record()
        self._graph("accept", shape, self.drafter is not None and self.drafter.wants_states).replay()
        round_ = self._round(shape)
        launch.report.copy_(round_.report, non_blocking=True)
        launch.tokens_at(shape.levels).copy_(round_.path.tokens, non_blocking=True)
        if round_.tree is not None:
            launch.rows_at(shape.levels).copy_(round_.path.rows, non_blocking=True)
        launch.end.record()
        return Flight(shape, round_.tree is not None, tuple(limits), launch, len(self._graphs) == num_graphs)

    @torch.inference_mode()
    def rehearse(self, max_depth: int, max_rows: int) -> None:
        """Record rounds of every shape of up to `max_rows` rows, over nobody: later somebody would wait for it."""
        nobody, control = [()] * self.size, self._launches[0].control
        self._controls[0].write([None] * self.size, nobody, nobody)
        self._control.copy_(control)
        for shape in self._shapes(max_depth, max_rows):
            self._graph("verify", shape)
            for params in REHEARSED:
                self.board([Seat((0, 0), params, 0, 0)])
                if shape.nodes:
                    self._graph("draft", shape)
                self._graph("accept", shape, bool(self._capture))
                if not shape.nodes:  # where nobody is to be drafted for, no states are kept
                    self._graph("accept", shape)
        if self.drafter:
            self._graph("follow", NOTHING)

    def most_rows(self, max_depth: int, max_rows: int) -> int:
        """Of the largest round that is rehearsed."""
        return max((self.size * (1 + shape.nodes) for shape in self._shapes(max_depth, max_rows)), default=0)

    def _shapes(self, max_depth: int, max_rows: int) -> list[DraftShape]:
        """Of rounds of up to `max_rows` rows, the largest first."""
        drafted = {self.drafter.shape(depth) for depth in range(1, max_depth + 1)} if self.drafter else set()
        fitting = [shape for shape in {NOTHING, *drafted} if self.size * (1 + shape.nodes) <= max_rows]
        return sorted(fitting, key=lambda shape: -shape.nodes)

    def _round(self, shape: DraftShape) -> DeviceRound:
        if shape not in self._rounds:
            drafts = self.drafter.drafts(shape) if self.drafter and shape != NOTHING else None
            self._rounds[shape] = DeviceRound(self.target, self._tables, self.size, shape, drafts)
        return self._rounds[shape]

    def _graph(self, part: Part, shape: DraftShape, keeps: bool = False) -> Graph[None]:
        # A pass is the same however its rows are picked from
        sampling = self.seats.sampling if part in ("draft", "accept") else None
        key = part, shape, sampling, keeps
        if key not in self._graphs:
            work = self._part(part, shape, keeps)
            # Capturing runs the part once for real: what it does to the sequences must not count. In a batch where nobody
            # is active nothing is accepted, and no cached key moves
            moved = (self._active, *(self.drafter.state if self.drafter else ()))
            kept = [tensor.clone() for tensor in moved]
            if part == "accept":
                self._active.zero_()
            self._graphs[key] = Graph(work, self.device, self.target.memory_pool)
            for tensor, before in zip(moved, kept, strict=True):
                tensor.copy_(before)
        return self._graphs[key]

    def _part(self, part: Part, shape: DraftShape, keeps: bool = False) -> Callable[[], None]:
        if part == "verify":
            return self._verify_part(shape)
        if part == "accept":
            return self._accept_part(shape, keeps)
        assert self.drafter is not None
        return self.drafter.draft(shape) if part == "draft" else self.drafter.follow()

    def _verify_part(self, shape: DraftShape) -> Callable[[], None]:
        """The target's pass over the last committed token and the drafts."""
        round_, state = self._round(shape), self.seats.state
        drafts = round_.drafts

        def compute() -> None:
            tokens = state.last[:, 1:]
            if drafts is not None:
                tokens = torch.cat((tokens, drafts.tokens), 1)
            tokens = tokens.flatten().contiguous()  # a single column would stay a view with gaps
            if round_.chain is not None:
                round_.output = round_.chain.forward(tokens, state.lengths, -1, self._capture)
            else:
                assert round_.tree is not None
                assert drafts is not None
                assert drafts.parents is not None
                round_.output = round_.tree.forward(tokens, state.lengths, drafts.parents, self._limits, self._capture)

        return compute

    def _accept_part(self, shape: DraftShape, keeps: bool) -> Callable[[], None]:
        """The target's picks, how far the drafts agree with them, and the state moved on by that, the drafter's too if it
        `keeps` any."""
        round_, rows, state = self._round(shape), 1 + shape.nodes, self.seats.state
        choose, path, drafts = self.seats.picker(rows), round_.path, round_.drafts
        none = torch.zeros(self.size, 0, dtype=torch.int64, device=self.device)

        def compute() -> None:
            assert round_.output is not None
            assert round_.output.logits is not None
            positions = (round_.chain or round_.tree).positions  # type: ignore[union-attr]  # it is one of them
            picks = choose(round_.output.logits, positions + 1).view(self.size, rows)
            if round_.tree is not None:
                assert drafts is not None
                assert drafts.parents is not None
                accept_trees(drafts.tokens, drafts.parents, picks, self._limits, self._active, state, path)
                contexts = round_.tree.places.contexts
                move_paths(self._cache, contexts, self._tables, path.rows, path.counts, rows)
            else:
                tokens = drafts.tokens if drafts is not None else none
                out = Accepted(path.counts, path.tokens)
                accept_chains(tokens, picks, self._limits, self._active, state, out)
            if keeps:
                assert self.drafter is not None
                self.drafter.keep(round_.output.inner, path, self._active)

        return compute


def device_drafter(proposer: DeviceProposer, seats: DeviceSeats, vocab_size: int) -> DeviceDrafter:
    """`vocab_size` is the target's."""
    if isinstance(proposer, EagleProposer):
        return TreeDrafter(proposer, seats)
    return ChainDrafter(proposer, seats, vocab_size)
