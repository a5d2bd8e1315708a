"""A pass over spans of any lengths on a GPU, recorded: prompts, alone or beside sequences that decode. A small model computes
one in less time than the host takes to launch its kernels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.kernels.layout import AttentionLayout
from paceline.models.architectures.output import ForwardOutput
from paceline.models.cuda_graph import Graph, Stamp, staging
from paceline.models.gpu.decoder import gpu_forward, head_logits
from paceline.models.gpu.forward_pass import PassKind
from paceline.models.gpu.ragged_size import MAX_RAGGED_ROWS, MAX_RAGGED_SEQUENCES, RaggedSize
from paceline.models.runner import Span

if TYPE_CHECKING:
    from paceline.models.gpu.runner import GpuRunner

_ALIGNED = 4
"""Numbers of 32 bits between places that kernels take for aligned."""


class RaggedInputs:
    """Where all ragged passes of a runner find what they are told: they follow one another."""

    def __init__(self, device: torch.device, table_width: int) -> None:
        self._width = table_width
        longs, ints = 3 * MAX_RAGGED_ROWS, MAX_RAGGED_SEQUENCES * (2 + table_width) + 3 * _ALIGNED
        self._longs = torch.zeros(longs, dtype=torch.int64, device=device)
        self._ints = torch.zeros(ints, dtype=torch.int32, device=device)
        self._host_longs = staging(longs, dtype=torch.int64, device=device)
        self._host_ints = staging(ints, dtype=torch.int32, device=device)
        self._done = Stamp(device)

    def on_device(self, size: RaggedSize) -> "_Views":
        return _Views(self._longs, self._ints, size, self._width)

    def on_host(self, size: RaggedSize) -> "_Views":
        return _Views(self._host_longs, self._host_ints, size, self._width)

    def wait(self) -> None:
        """Until the last pass was told everything: then the host's may be written to."""
        self._done.wait()

    def told(self) -> None:
        """The device was given all there is to copy."""
        self._done.record()


class _Views:
    """Inputs of one size, which lie together: one copy takes them all over."""

    def __init__(self, longs: Tensor, ints: Tensor, size: RaggedSize, table_width: int) -> None:
        starts, contexts = _aligned(size.sequences + 1), _aligned(size.sequences)
        self.longs = longs[: 3 * size.rows]
        self.ints = ints[: starts + contexts + size.sequences * table_width]
        self.tokens, self.positions, self.ancestors = self.longs.view(3, size.rows)
        self.starts = self.ints[: size.sequences + 1]
        self.contexts = self.ints[starts : starts + size.sequences]
        self.tables = self.ints[starts + contexts :].view(size.sequences, table_width)

    def copy(self, other: "_Views", sequences: int) -> None:
        """Tables are the most of it: those of the first so many."""
        used = len(self.ints) - (len(self.tables) - sequences) * self.tables.shape[1]
        self.longs.copy_(other.longs, non_blocking=True)
        self.ints[:used].copy_(other.ints[:used], non_blocking=True)

    def write(self, spans: Sequence[Span]) -> tuple[int, list[int]]:
        """On the host. How many rows there are, and which of them want logits."""
        parts = self.tokens, self.positions, self.ancestors, self.starts, self.contexts, self.tables
        tokens, positions, ancestors, starts, contexts, tables = (part.numpy() for part in parts)
        ids, places, firsts, wanted = list[int](), list[int](), list[int](), list[int]()
        for s, span in enumerate(spans):
            row, first = len(ids), span.context_len
            ids.extend(span.tokens)
            end = len(ids)
            places.extend(range(first, first + end - row) if span.positions is None else span.positions)
            ancestors[row:end] = -1 if span.ancestors is None else span.ancestors
            firsts.append(row)
            held = min(len(span.blocks), tables.shape[1])
            tables[s, :held] = span.blocks[:held]
            wanted.extend(range(end - span.num_logits, end))
        rows = len(ids)
        tokens[:rows], positions[:rows] = ids, places
        starts[: len(spans)], contexts[: len(spans)] = firsts, [span.context_len for span in spans]
        starts[len(spans) :] = rows  # the others have none
        tokens[rows:] = 0  # HAZARD: embedded all the same, and a pass of another size may have left anything here
        return rows, wanted


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


class RaggedGraph:
    """As `PassGraph`, but only logits that are wanted are computed, after it: of a prompt's rows hardly any are."""

    def __init__(self, runner: "GpuRunner", inputs: RaggedInputs, size: RaggedSize, kind: PassKind) -> None:
        self.size = size
        self._runner, self._inputs, self._kind = runner, inputs, kind
        self._told, self._host = told, host = inputs.on_device(size), inputs.on_host(size)
        inputs.wait()
        host.write([])
        told.copy(host, size.sequences)
        layout = AttentionLayout(
            slots=told.tokens,  # found in the tables where there are so many rows
            starts=told.starts,
            context_lens=told.contexts,
            block_tables=told.tables,
            ancestors=told.ancestors if kind.is_tree else None,
        )
        plan = runner.plan(size.rows, size.sequences, size.rows)
        room = runner.rooms.states(len(kind.capture) + 1, size.rows)
        attended = runner.rooms.attended(size.rows)
        model, cache, capture = runner.model, runner.cache, kind.capture

        def compute() -> ForwardOutput:
            output = gpu_forward(
                model,
                told.tokens,
                told.positions,
                layout,
                cache,
                None,
                capture,
                last_hidden=True,
                plan=plan,
                attended=attended,
            )
            assert output.last_hidden is not None
            inner = {layer: place.copy_(output.inner[layer]) for layer, place in zip(capture, room[:-1], strict=True)}
            return ForwardOutput(None, room[-1].copy_(output.last_hidden), inner)

        self._graph = Graph(compute, runner.device, runner.memory_pool)
        self._wanted = torch.empty(0, dtype=torch.int64)

    def run(self, spans: Sequence[Span]) -> ForwardOutput:
        """As `ModelRunner.forward`."""
        self._inputs.wait()
        count, wanted = self._host.write(spans)
        self._told.copy(self._host, len(spans))
        self._inputs.told()
        self._wanted = torch.tensor(wanted, dtype=torch.int64).to(self._runner.device, non_blocking=True)
        output = self.replay()
        states = output.last_hidden
        return ForwardOutput(
            output.logits,
            states[:count].clone() if self._kind.last_hidden and states is not None else None,
            {layer: rows[:count].clone() for layer, rows in output.inner.items()},
        )

    def replay(self) -> ForwardOutput:
        """Run it again as it was. States are good until the next run, of all rows."""
        output = self._graph.replay()
        assert output.last_hidden is not None
        logits = head_logits(self._runner.model, output.last_hidden[self._wanted]) if len(self._wanted) else None
        return ForwardOutput(logits, output.last_hidden, output.inner)
