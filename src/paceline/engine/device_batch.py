"""A batch that decodes on the device by itself: one round is draft K, verify, accept, three CUDA graphs and no wait.

What a round needs to know of each sequence (how long it is, its last two tokens) stays on the device and is moved on by the
round itself, so that the host may launch the next one before it has seen what the last one brought. The host keeps the
books: blocks, depths and who is still there go up with every launch.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.kernels.gpu.accept import Accepted, DeviceState, accept_chains, accepted_buffers
from paceline.kernels.gpu.pick import PickScratch, pick, pick_greedy, pick_scratch, pick_truncated
from paceline.kernels.gpu.rows import place_rows
from paceline.kernels.layout import AttentionLayout
from paceline.models.gpu_decoder import gpu_forward, plan_pass
from paceline.models.gpu_runner import GpuRunner
from paceline.models.graph import Graph, Stamp, staging
from paceline.speculation.noise import Purpose, stream

Sampling = Literal["greedy", "sampled", "truncated"]
Part = Literal["draft", "verify", "accept"]
IN_FLIGHT = 2
"""Rounds that may be under way at once: one being computed, one behind it."""


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """One sequence as it boards."""

    ids: Seq[int]
    sampling: SamplingParams
    seed: int
    choice: int


@dataclass(frozen=True, slots=True)
class Landed:
    """What a round brought, by seat, and what it cost the device."""

    accepted: list[int]
    tokens: list[list[int]]  # -1 past the last
    draft_seconds: float
    verify_seconds: float
    sample_seconds: float


class _Launch:
    """Host memory and events of a round under way."""

    def __init__(self, batch: int, max_depth: int, ints: int, device: torch.device) -> None:
        self.control = staging(ints, dtype=torch.int32, device=device)
        self.counts = staging(batch, dtype=torch.int32, device=device)
        self.tokens = staging(batch * (max_depth + 1), dtype=torch.int64, device=device)
        self.begin, self.drafted, self.verified, self.end = (Stamp(device) for _ in range(4))

    def tokens_at(self, depth: int) -> Tensor:
        """[B, depth + 1]"""
        return self.tokens[: len(self.counts) * (depth + 1)].view(-1, depth + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A round under way."""

    depth: int
    launch: _Launch

    def land(self) -> Landed:
        """Wait for it."""
        launch = self.launch
        launch.end.wait()
        return Landed(
            launch.counts.tolist(),
            launch.tokens_at(self.depth).tolist(),
            launch.drafted.seconds_since(launch.begin),
            launch.verified.seconds_since(launch.drafted),
            launch.end.seconds_since(launch.verified),
        )


class DeviceBatch:
    """Rounds over up to `size` sequences. Drafts are chains of `drafter`, a model whose tokens lie below `num_proposable`."""

    def __init__(
        self, target: GpuRunner, drafter: GpuRunner | None, num_proposable: int, size: int, max_depth: int
    ) -> None:
        self.target, self.drafter, self.num_proposable = target, drafter, num_proposable
        self.size, self.max_depth = size, max_depth
        self.device = target.device
        width = target.table_width
        self.draft_width = drafter.table_width if drafter else 0
        # Goes up with every launch: active, depth limits, the target's tables, the draft's
        self._control = torch.zeros(size * (2 + width + self.draft_width), dtype=torch.int32, device=self.device)
        parts = self._control.split([size, size, size * width, size * self.draft_width])
        self._active, self._limits = parts[0], parts[1]
        self._tables, self._draft_tables = parts[2].view(size, width), parts[3].view(size, self.draft_width)
        self._launches = [_Launch(size, max_depth, len(self._control), self.device) for _ in range(IN_FLIGHT)]
        self._count = 0
        # Goes up when a batch boards
        self.state = DeviceState(
            torch.full((size,), 2, dtype=torch.int32, device=self.device),
            torch.zeros(size, 2, dtype=torch.int64, device=self.device),
        )
        self._streams = torch.zeros(size, dtype=torch.int64, device=self.device)
        self._heat = torch.zeros(size, dtype=torch.float32, device=self.device)
        self._top_k = torch.zeros(size, dtype=torch.int64, device=self.device)
        self._top_p = torch.ones(size, dtype=torch.float64, device=self.device)
        self._min_p = torch.zeros(size, dtype=torch.float32, device=self.device)
        self._sampling: Sampling = "greedy"
        self._drafts = torch.zeros(size, max_depth, dtype=torch.int64, device=self.device)
        self._graphs: dict[tuple[Part, int, Sampling | None], Graph[None]] = {}
        self._passes: dict[int, _Rows] = {}
        self._logits: dict[int, Tensor] = {}
        self._results: dict[int, tuple[Tensor, Tensor]] = {}

    def board(self, seats: Seq[Seat]) -> None:
        """Start anew with these sequences, in this order."""
        padding = self.size - len(seats)
        params = [seat.sampling for seat in seats]
        self.state.lengths.copy_(_tensor([len(seat.ids) for seat in seats] + [2] * padding, torch.int32))
        self.state.last.copy_(_tensor([list(seat.ids[-2:]) for seat in seats] + [[0, 0]] * padding, torch.int64))
        streams = [stream(Purpose.SHARED, seat.seed, seat.choice) for seat in seats]
        self._streams.copy_(_tensor([s - (1 << 64) if s >> 63 else s for s in streams] + [0] * padding, torch.int64))
        self._heat.copy_(_tensor([0.0 if p.is_greedy else p.temperature for p in params] + [0.0] * padding))
        self._top_k.copy_(_tensor([p.top_k for p in params] + [0] * padding, torch.int64))
        self._top_p.copy_(_tensor([p.top_p for p in params] + [1.0] * padding, torch.float64))
        self._min_p.copy_(_tensor([p.min_p for p in params] + [0.0] * padding))
        if all(p.is_greedy for p in params):
            self._sampling = "greedy"
        else:
            is_whole = all(p.is_greedy or not (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0) for p in params)
            self._sampling = "sampled" if is_whole else "truncated"

    @torch.inference_mode()
    def launch(self, depth: int, limits: Seq[int | None], tables: Seq[Seq[int]], draft_tables: Seq[Seq[int]]) -> Flight:
        """One more round at `depth`. By seat: how many drafts it wants (None: it is empty), and its blocks."""
        launch = self._launches[self._count % IN_FLIGHT]
        self._count += 1
        self._write(launch.control.numpy(), limits, tables, draft_tables)
        self._control.copy_(launch.control, non_blocking=True)
        launch.begin.record()
        if depth:
            self._graph("draft", depth).replay()
        launch.drafted.record()
        self._graph("verify", depth).replay()
        launch.verified.record()
        self._graph("accept", depth).replay()
        counts, tokens = self._results[depth]
        launch.counts.copy_(counts, non_blocking=True)
        launch.tokens_at(depth).copy_(tokens, non_blocking=True)
        launch.end.record()
        return Flight(depth, launch)

    def _write(
        self, control: np.ndarray[Any, Any], limits: Seq[int | None], tables: Seq[Seq[int]], draft_tables: Seq[Seq[int]]
    ) -> None:
        size, width = self.size, self.target.table_width
        control[: 2 * size] = 0
        own = control[2 * size : (2 + width) * size].reshape(size, width)
        drafts = control[(2 + width) * size :].reshape(size, self.draft_width)
        own[:] = self.target.scratch_block
        if self.drafter:
            drafts[:] = self.drafter.scratch_block
        for seat, limit in enumerate(limits):
            if limit is None:
                continue
            control[seat], control[size + seat] = 1, limit
            own[seat, : len(tables[seat])] = tables[seat]
            if draft_tables:
                drafts[seat, : len(draft_tables[seat])] = draft_tables[seat]

    def _graph(self, part: Part, depth: int) -> Graph[None]:
        # A pass is the same however its rows are picked from
        key = part, depth, None if part == "verify" else self._sampling
        if key not in self._graphs:
            # Capturing runs the part once for real: what it does to the sequences must not count
            kept = self.state.lengths.clone(), self.state.last.clone(), self._drafts.clone()
            make = {"draft": self._draft_part, "verify": self._verify_part, "accept": self._accept_part}
            self._graphs[key] = Graph(make[part](depth), self.device, self.target.memory_pool)
            self.state.lengths.copy_(kept[0])
            self.state.last.copy_(kept[1])
            self._drafts.copy_(kept[2])
        return self._graphs[key]

    def _draft_part(self, depth: int) -> Callable[[], None]:
        """Draft `depth` tokens a sequence into `_drafts`.

        The first pass takes the last two committed tokens: after a full acceptance the draft has not seen the one before
        last, and computing it again otherwise changes nothing.
        """
        assert self.drafter is not None
        known = self.num_proposable
        passes = [_Rows(self.drafter, self._draft_tables, self.size, rows) for rows in (2, 1)]
        choose = self._picker(1)

        def compute() -> None:
            for step in range(depth):
                if step == 0:
                    rows, tokens = passes[0], self.state.last.flatten()
                else:
                    rows, tokens = passes[1], self._drafts[:, step - 1].contiguous()
                if known < self.target.model.config.vocab_size:  # any token stands in for one it does not have
                    tokens = torch.where(tokens < known, tokens, 0)
                logits = rows.forward(tokens, self.state.lengths, -2 if step == 0 else step - 1, last_only=True)
                self._drafts[:, step] = choose(logits[:, :known], rows.next_positions())

        return compute

    def _verify_part(self, depth: int) -> Callable[[], None]:
        """The target's pass over the last committed token and `_drafts`."""
        if depth not in self._passes:
            self._passes[depth] = _Rows(self.target, self._tables, self.size, depth + 1)
        rows = self._passes[depth]

        def compute() -> None:
            tokens = torch.cat((self.state.last[:, 1:], self._drafts[:, :depth]), 1).flatten()
            self._logits[depth] = rows.forward(tokens, self.state.lengths, -1)

        return compute

    def _accept_part(self, depth: int) -> Callable[[], None]:
        """The target's picks, how far the drafts agree with them, and the state moved on by that."""
        rows, choose = self._passes[depth], self._picker(depth + 1)
        if depth not in self._results:
            buffers = accepted_buffers(self.size, depth, self.device)
            self._results[depth] = buffers.counts, buffers.tokens
        accepted = Accepted(*self._results[depth])

        def compute() -> None:
            picks = choose(self._logits[depth], rows.positions + 1).view(self.size, depth + 1)
            accept_chains(self._drafts[:, :depth].contiguous(), picks, self._limits, self._active, self.state, accepted)

        return compute

    def _picker(self, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
        """(logits [size * rows, V], positions of what is picked) -> tokens, `rows` of each sequence together."""
        scratch: dict[int, PickScratch] = {}
        sampling = self._sampling

        def spread(values: Tensor) -> Tensor:
            return values if rows == 1 else values.repeat_interleave(rows)

        def choose(logits: Tensor, positions: Tensor) -> Tensor:
            width = logits.shape[1]
            if width not in scratch:
                scratch[width] = pick_scratch(self.size * rows, width, self.device)
            if sampling == "greedy":
                return pick_greedy(logits, scratch[width])
            noise = spread(self._heat), spread(self._streams), positions
            if sampling == "sampled":
                return pick(logits, *noise, scratch[width])
            limits = spread(self._top_k), spread(self._top_p), spread(self._min_p)
            return pick_truncated(logits, *noise, *limits, scratch[width])

        return choose


class _Rows:
    """Passes of one model over `rows` rows of every sequence of a batch, placed by how long the sequences are."""

    def __init__(self, runner: GpuRunner, tables: Tensor, batch: int, rows: int) -> None:
        device = runner.device
        self._runner, self._tables, self._rows = runner, tables, rows
        self.positions = torch.zeros(batch * rows, dtype=torch.int64, device=device)
        self._slots = torch.zeros_like(self.positions)
        self._contexts = torch.zeros(batch, dtype=torch.int32, device=device)
        starts = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device)
        self._layout = AttentionLayout(self._slots, starts, self._contexts, tables)
        self._every = torch.arange(batch * rows, device=device)
        self._last = self._every[rows - 1 :: rows].contiguous()
        self._plan = plan_pass(runner.model, batch * rows, batch, rows)

    def forward(self, tokens: Tensor, lengths: Tensor, offset: int, last_only: bool = False) -> Tensor:
        """Logits of all rows, or of each sequence's last; the first row lies at logical index length + offset."""
        place_rows(lengths, offset, self._tables, self._contexts, self.positions, self._slots)
        wanted = self._last if last_only else self._every
        runner = self._runner
        output = gpu_forward(runner.model, tokens, self.positions, self._layout, runner.cache, wanted, plan=self._plan)
        assert output.logits is not None
        return output.logits

    def next_positions(self) -> Tensor:
        """Of the tokens that follow each sequence's last row."""
        return self.positions[self._rows - 1 :: self._rows] + 1


def _tensor(values: list[Any], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)
