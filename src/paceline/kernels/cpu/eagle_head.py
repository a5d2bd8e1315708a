"""An EAGLE head as native calls: one for a pass over rows, one for the trees of a batch. The interpreter and small operations
cost as much as the products of a level.
"""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.kernels.cpu import native
from paceline.kernels.cpu.decoder import DecoderLayers, DecoderShape, LayerWeights, Pass
from paceline.kernels.formats.layout import PassRows
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.formats.sampling import log_min_p

MAX_BRANCHES = 8
"""Most children of a node."""
MAX_TREE_SLOTS = 64
"""Most nodes of a tree that get children: one bit each in a mask."""
_MAX_NODES = 63


class _Head(ctypes.Structure):
    """`head_t` in cpu/eagle.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("decoder", "layer", "embedding", "fc", "vocabulary")),
        *((name, c_void_p) for name in ("input_norm", "hidden_norm", "cos", "sin", "ids")),
        ("is_residual_normed", c_int64),
        ("is_output_normed", c_int64),
    )


class _Root(ctypes.Structure):
    """`rooted_t` in cpu/eagle_trees.c."""

    _fields_ = (
        *((name, c_int64) for name in ("budget", "max_levels", "num_cached", "position", "next_token")),
        *((name, c_int64) for name in ("is_greedy", "is_noisy", "top_k")),
        ("stream", c_uint64),
        *((name, c_double) for name in ("top_p", "temperature", "floor")),
    )


class _Trees(ctypes.Structure):
    """`trees_t` in cpu/eagle_trees.c."""

    _fields_ = (
        *((name, c_int64) for name in ("sequences", "max_blocks", "width", "branches")),
        *((name, c_void_p) for name in ("roots", "tables", "states", "counts", "tokens", "parents")),
    )


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """Weights of a head: the layers, and what surrounds them."""

    shape: DecoderShape
    layers: tuple[LayerWeights, ...]
    """The `next_norm` of the last is the norm before `vocabulary`."""
    embedding: PackedWeight  # [V, D]
    fc: PackedWeight  # [D, N D]
    vocabulary: PackedWeight  # [V', D]
    input_norm: Tensor  # [D]
    hidden_norm: Tensor  # [D]
    cos: Tensor  # [max_position, hd / 2]
    sin: Tensor
    ids: Tensor | None  # [V'] int64: the token of each column. None if it is the number of the column
    is_residual_normed: bool
    is_output_normed: bool
    """Whether the state of a drafted token is the output after the last norm."""
    has_plain_states: bool
    """Whether `fc` reads the target's states as they are, each of D values."""


@dataclass(frozen=True, slots=True)
class InnerRows:
    """Hidden states of the target, by address: of each row those of all layers that `fc` joins. Each has at least D float32
    values. The caller keeps their memory."""

    addresses: Sequence[int]
    num_layers: int


@dataclass(frozen=True, slots=True)
class TreeRoot:
    """A sequence whose committed slots are in the head's cache, and the rules of its tree."""

    blocks: Sequence[int]
    """Blocks of its cached slots, then blocks for the slots of the tree."""
    num_cached: int
    position: int
    """Rotary position of the last cached slot."""
    next_token: int
    """Position of the token after the last committed one."""
    budget: int
    """Nodes of the tree."""
    max_levels: int
    sampling: SamplingParams
    stream: int
    """Stream of its noise."""
    is_noisy: bool
    """Whether a request that samples ranks by score and noise."""


class EagleHead:
    """The head of one model over one cache of keys and values."""

    def __init__(self, weights: HeadWeights) -> None:
        self._weights = weights  # keeps the memory behind the addresses
        self._layers = DecoderLayers(weights.shape, weights.layers)
        self._limits = weights.embedding.shape[0], len(weights.cos)
        self._head = _Head(
            ctypes.addressof(self._layers.decoder),
            ctypes.addressof(self._layers.table),
            weights.embedding.address,
            weights.fc.address,
            weights.vocabulary.address,
            weights.input_norm.data_ptr(),
            weights.hidden_norm.data_ptr(),
            weights.cos.data_ptr(),
            weights.sin.data_ptr(),
            None if weights.ids is None else weights.ids.data_ptr(),
            weights.is_residual_normed,
            weights.is_output_normed,
        )

    @property
    def has_plain_states(self) -> bool:
        """Whether a call may be given the target's states by address."""
        return self._weights.has_plain_states

    def forward(self, states: Tensor | InnerRows, rows: PassRows) -> Tensor:
        """[T, D]: the states of the next slots, from states [T, D], or from those of the target's layers that `fc` joins. The
        positions are those of the states, the tokens those after them."""
        if isinstance(states, Tensor):
            hidden, inner = states.clone(memory_format=torch.contiguous_format), InnerRows((), 0)
        else:
            hidden, inner = torch.empty(len(rows.tokens), self._weights.shape.hidden_size), states
        call = _Call.of(rows, inner, self._limits, hidden.data_ptr())
        _functions().paceline_eagle(ctypes.byref(self._head), *call.arguments)
        return hidden

    def grow(
        self, states: Tensor, roots: Sequence[TreeRoot], width: int, branches: int
    ) -> list[tuple[list[int], list[int]]]:
        """Returns (tokens, parents) of each tree, best node first, from the states of the last cached slots [S, D]. `width`
        nodes of a level get children, `branches` children each."""
        assert states.is_contiguous()
        assert states.dtype is torch.float32
        forest = self._forest(roots, width, branches, states.data_ptr())
        _functions().paceline_eagle_trees(ctypes.byref(self._head), ctypes.byref(forest.trees))
        return forest.drafts()

    def draft(
        self,
        inner: InnerRows,
        rows: PassRows,
        last_rows: Sequence[int],
        roots: Sequence[TreeRoot],
        width: int,
        branches: int,
    ) -> list[tuple[list[int], list[int]]]:
        """`forward` over committed tokens, then `grow` from its states of `last_rows`, in one call."""
        call, forest = _Call.of(rows, inner, self._limits, None), self._forest(roots, width, branches, None)
        last = array("q", last_rows)
        _functions().paceline_eagle_draft(
            ctypes.byref(self._head), *call.arguments, last.buffer_info()[0], ctypes.byref(forest.trees)
        )
        return forest.drafts()

    def _forest(self, roots: Sequence[TreeRoot], width: int, branches: int, states: int | None) -> "_Forest":
        columns = self._weights.vocabulary.shape[0]
        widest = max(len(root.blocks) for root in roots)
        tables = array("i")
        for root in roots:
            tables.extend(root.blocks)
            tables.extend([0] * (widest - len(root.blocks)))
        count = len(roots)
        table = (_Root * count)(*(_root(root, columns, self._limits[1]) for root in roots))
        nodes = array("q", bytes(8 * count * (1 + 2 * _MAX_NODES)))  # counts, tokens, parents
        first = nodes.buffer_info()[0]
        trees = _Trees(
            count,
            widest,
            width,
            min(branches, MAX_BRANCHES, columns),
            ctypes.addressof(table),
            tables.buffer_info()[0],
            states,
            first,
            first + 8 * count,
            first + 8 * count * (1 + _MAX_NODES),
        )
        return _Forest(trees, nodes, (table, tables))


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Arguments of a native pass, and the memory behind them."""

    arguments: tuple[object, ...]
    memory: tuple[object, ...]

    @classmethod
    def of(cls, rows: PassRows, inner: InnerRows, limits: tuple[int, int], hidden: int | None) -> "_Call":
        for values, limit in zip((rows.tokens, rows.positions), limits, strict=True):
            if min(values) < 0 or max(values) >= limit:  # native code would read beyond a table
                raise IndexError(f"token ids and positions must be in [0, {limit})")
        count, sequences = len(rows.tokens), len(rows.context_lens)
        longs = array("q", rows.tokens)
        for more in (rows.positions, rows.slots, inner.addresses, rows.ancestors):
            longs.extend(more)
        ints = array("i", rows.starts)
        ints.extend(rows.context_lens)
        ints.extend(rows.block_tables)
        first, first_int = longs.buffer_info()[0], ints.buffer_info()[0]
        description = Pass(
            count,
            sequences,
            rows.max_blocks,
            slots=first + 16 * count,
            starts=first_int,
            context_lens=first_int + 4 * (sequences + 1),
            tables=first_int + 4 * (2 * sequences + 1),
            ancestors=first + 8 * (3 * count + len(inner.addresses)) if rows.ancestors else None,
            hidden=hidden,
        )
        sources = first + 24 * count
        arguments = (ctypes.byref(description), first, first + 8 * count, sources, inner.num_layers)
        return cls(arguments, (longs, ints))


@dataclass(frozen=True, slots=True, eq=False)
class _Forest:
    """The trees of a native call, and the memory behind them."""

    trees: _Trees
    nodes: "array[int]"
    memory: tuple[object, ...]

    def drafts(self) -> list[tuple[list[int], list[int]]]:
        """(tokens, parents) of each tree."""
        count, nodes = self.trees.sequences, self.nodes
        drafts = []
        for i in range(count):
            first, size = count + i * _MAX_NODES, nodes[i]
            behind = first + count * _MAX_NODES
            drafts.append((nodes[first : first + size].tolist(), nodes[behind : behind + size].tolist()))
        return drafts


def _root(root: TreeRoot, columns: int, max_position: int) -> _Root:
    params = root.sampling
    # The slots of level l have the position `position + l`
    levels = min(root.max_levels, max_position - root.position)
    return _Root(
        min(root.budget, _MAX_NODES),
        levels,
        root.num_cached,
        root.position,
        root.next_token,
        params.is_greedy,
        root.is_noisy,
        min(params.top_k or columns, columns),
        root.stream,
        params.top_p if params.top_p < 1.0 else torch.inf,
        params.temperature or 1.0,
        log_min_p(params),
    )


def _functions() -> ctypes.CDLL:
    loaded = native.library()
    assert loaded is not None  # packed weights imply native kernels
    return loaded.long
