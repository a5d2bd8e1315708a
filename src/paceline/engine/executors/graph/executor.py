"""The loop one step ahead, on a GPU: while a round is being computed the next one is launched behind it.

It takes over whenever there is nothing to do but decode: no prompt to compute, nobody whose turn it is to be let in, and only
sequences whose picks the device can make. Anything else brings the rounds under way home first, and `Engine.step` goes on on
the host; nothing is decided twice and nothing differs, for a round's outcome depends on tokens, noise and model alone.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache

import torch

from paceline.core.output import StepOutput
from paceline.core.sequence import Origin, Sequence, Status
from paceline.engine.executors.graph.batch import DeviceBatch
from paceline.engine.executors.graph.drafter import NOTHING, DeviceDrafter, DeviceProposer, DraftShape
from paceline.engine.executors.graph.eligibility import DeviceTurns
from paceline.engine.executors.graph.inflight import Flight, Landed, chain_path
from paceline.engine.executors.graph.slots import Seat
from paceline.engine.executors.graph.warm_up import rehearse_passes
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import SpeculatedRound, Speculator
from paceline.engine.validator import Intake
from paceline.models.gpu.runner import GpuRunner, bucket, buckets
from paceline.speculation.depth.probing import SEQUENCES as PROBED
from paceline.speculation.verification.verify import PLAIN, Verdict

Commit = Callable[[Seq[tuple[Sequence, Verdict, int]]], list[StepOutput]]
"""Appends to each sequence the verdict on so many drafts, and ends the sequence if that is the end of it."""


class RunAhead:
    def __init__(
        self,
        runner: GpuRunner,
        proposer: DeviceProposer | None,
        scheduler: Scheduler,
        speculator: Speculator,
        intake: Intake,
        max_depth: int,
        commit: Commit,
    ) -> None:
        self._runner, self._proposer = runner, proposer
        self._scheduler, self._speculator, self._intake = scheduler, speculator, intake
        self._max_depth = max_depth
        self._commit = commit
        self._batches: dict[int, DeviceBatch] = {}
        self._seats: list[Sequence] = []
        self._seated: set[int] = set()
        self._flights: deque[Flight] = deque()
        self._turns = DeviceTurns(proposer, scheduler, speculator, intake)
        self.num_rounds = 0
        self.last_landed: Landed | None = None
        """What the newest round to come home cost; for those who measure."""

    def rehearse(self) -> None:
        """Compile what passes of any size will want, and record them and the rounds: the first to want them would wait for
        seconds."""
        scheduler, runner = self._scheduler, self._runner
        limits = self._max_depth, scheduler.max_batched_tokens
        batches = [self._batch_of(size) for size in reversed(buckets(scheduler.max_num_seqs))]
        runner.rooms.logits(max(batch.most_rows(*limits) for batch in batches))  # all will share it
        rehearse_passes(
            runner,
            set(self._speculator.proposers.values()),
            scheduler.max_num_seqs,
            scheduler.max_batched_tokens,
            self._intake.limits.max_model_len,
        )
        for batch in batches:
            batch.rehearse(*limits)
        if runner.device.type == "cuda":  # recording a graph would wait for all of this to be returned
            torch.cuda.empty_cache()

    def nodes(self, depth: int) -> int:
        """That a round drafts for every seat, where the most that somebody wants is so many."""
        drafter = self._batch_of(1).drafter
        return drafter.shape(depth).nodes if drafter else 0

    def step(self) -> list[StepOutput] | None:
        """What the oldest round under way has brought, the next one having been launched; None: the host's turn."""
        running = self._scheduler.running
        if not running:
            self._leave()
        outputs = self._next(running) if running else None
        if outputs is None:
            self._turns.rounds = 0
            decoding = [sequence for sequence in running if sequence.num_uncomputed == 1]
            if self._turns.goes_on(running) and not self._is_for_few(decoding):
                # Drafts are for here: the host takes longer, and what it finds out about them it cannot time
                for sequence in decoding:
                    sequence.depth = 0
        return outputs

    def _next(self, running: Seq[Sequence]) -> list[StepOutput] | None:
        if not self._is_steady(running):
            return self._come_home()
        if not self._seats:
            self._board(running)
        if not self._launch(running):
            return self._come_home()
        self._turns.rounds += 1
        return self._land() if len(self._flights) > 1 else []

    def _is_steady(self, running: Seq[Sequence]) -> bool:
        if self._seats and (
            len(running) <= len(self._seats) // 2 or not all(sequence.id in self._seated for sequence in running)
        ):
            return False
        return self._turns.is_devices(running)

    def _is_for_few(self, decoding: Seq[Sequence]) -> bool:
        """A round is as large for all as for the largest: where few are drafted for, the host's ragged pass is cheaper. Not for
        a probe, now and then, of one node: twice the rows take less than coming home."""
        depths = [sequence.depth for sequence in decoding if sequence.depth]
        if not depths or 2 * sum(depths) >= max(depths) * len(decoding):
            return False
        drafter = self._batch_of(bucket(len(decoding))).drafter
        is_small = drafter is not None and drafter.shape(max(depths)).nodes == 1
        return not (is_small and len(depths) <= PROBED)

    @property
    def _batch(self) -> DeviceBatch:
        """Of the size that the seats need."""
        return self._batch_of(bucket(len(self._seats)))

    def _batch_of(self, size: int) -> DeviceBatch:
        if size not in self._batches:
            self._batches[size] = DeviceBatch(self._runner, self._proposer, size, self._max_depth)
        return self._batches[size]

    def _board(self, running: Seq[Sequence]) -> None:
        self._seats, self._seated = list(running), {sequence.id for sequence in running}
        batch = self._batch
        batch.board([Seat(s.ids, s.sampling, s.seed, s.choice) for s in self._seats])
        if batch.drafter is not None:
            batch.drafter.board(self._seats)

    def _launch(self, running: Seq[Sequence]) -> bool:
        """Behind whatever is under way. False, and nothing happens, if it needs the host."""
        self._speculator.decide(running)
        batch = self._batch
        drafter, most = batch.drafter, self._scheduler.max_batched_tokens // batch.size - 1
        for sequence in running:  # one that the host could not draft for either keeps nobody on the ground
            if sequence.depth and drafter is not None and not drafter.has_room(sequence):
                sequence.depth = 0
        depth = min(most, max([sequence.depth for sequence in running]))
        if depth > 0 and (drafter is None or not drafter.can_draft(running) or self._is_for_few(running)):
            return False
        # The next larger shape may be too large for a pass
        shapes = (drafter.shape(less) for less in range(depth, 0, -1)) if drafter else ()
        shape = next((shape for shape in shapes if shape.nodes <= most), NOTHING)
        # A round computes its nodes, and commits a path of them and one token more
        ahead = sum(flight.shape.levels + 1 for flight in self._flights) + shape.nodes + 1
        window, tables = self._intake.limits.max_model_len, self._scheduler.tables
        if max([len(s.ids) for s in running]) + ahead > window:
            return False
        if not all(tables.grow(s.id, len(s.ids) + ahead) for s in running):
            return False
        self._flights.append(batch.launch(shape, *self._booked(drafter, shape, ahead)))
        self._speculator.went_ahead()
        return True

    def _booked(
        self, drafter: DeviceDrafter | None, shape: DraftShape, ahead: int
    ) -> tuple[list[int | None], list[Seq[int]], list[Seq[int]]]:
        """By seat, for a round that ends so many tokens ahead at most: nodes granted, blocks, and blocks of the draft."""
        limits: list[int | None] = []
        blocks: list[Seq[int]] = []
        draft_blocks: list[Seq[int]] = []
        tables, running = self._scheduler.tables, Status.RUNNING
        for sequence in self._seats:
            if sequence.status is not running:
                limits.append(None)
                blocks.append(())
                draft_blocks.append(())
                continue
            lent = drafter.lend(sequence, len(sequence.ids) + ahead, shape) if drafter else None
            limits.append(min(sequence.depth, shape.nodes) if lent else 0)
            blocks.append(tables.blocks(sequence.id))
            draft_blocks.append(lent or ())
        return limits, blocks, draft_blocks

    def _land(self) -> list[StepOutput]:
        """Commit the oldest round under way."""
        self.num_rounds += 1
        flight = self._flights.popleft()
        landed = self.last_landed = flight.land()
        verdicts: list[tuple[Sequence, Verdict, int]] = []
        rounds, context = [], 0
        for seat, (sequence, limit) in enumerate(zip(self._seats, flight.limits, strict=True)):
            if limit is None or sequence.status is not Status.RUNNING:  # it ended, or was cancelled, under way
                continue
            accepted, size = landed.accepted[seat], len(sequence.ids)
            context += size
            sequence.num_computed = size + accepted
            if limit:
                path = landed.paths[seat]
                rounds.append(
                    SpeculatedRound(sequence, limit, landed.levels[seat], accepted, num_nodes=limit, path=path)
                )
            origins = _origins(accepted, landed.is_bonus[seat]) if limit else PLAIN
            tokens = tuple(landed.tokens[seat][: accepted + 1])
            verdicts.append((sequence, Verdict(chain_path(accepted), tokens, origins), limit))
        outputs = self._commit(verdicts)
        seats = self._batch.size
        self._speculator.record(
            rounds,
            batch=len(outputs),
            seats=seats,
            rows=seats * (flight.shape.nodes + 1),
            draft_seconds=landed.draft_seconds,
            verify_seconds=landed.verify_seconds + landed.sample_seconds,
            context=context,
            is_timed=flight.is_timed,
        )
        return outputs

    def _come_home(self) -> list[StepOutput] | None:
        """Land what is under way and hand the sequences back to the host; None if there was nothing."""
        if not self._seats:
            return None
        outputs = [output for _ in range(len(self._flights)) for output in self._land()]
        running = self._scheduler.running
        if running:
            self._speculator.came_home()
        for sequence in running:
            self._scheduler.tables.shrink(sequence.id, sequence.num_computed)
        if (drafter := self._batch.drafter) is not None:
            drafter.take_back([sequence for sequence in running if sequence.id in self._seated])
        self._leave()
        self._speculator.look_ahead(running, has_room=not self._scheduler.is_full)
        return outputs or None

    def _leave(self) -> None:
        """Forget who was here. Rounds still under way write only to blocks that no later launch reads before writing."""
        while self._flights:
            self._flights.popleft().land()
        self._seats, self._seated = [], set()
        self._turns.forget()


@cache
def _origins(accepted: int, is_bonus: bool) -> tuple[Origin, ...]:
    """Of the tokens of a round with drafts."""
    return (*(Origin.ACCEPTED,) * accepted, Origin.BONUS if is_bonus else Origin.RECOVERED)
