"""Trees grown on the device are those that the host grows from the same states."""

from types import SimpleNamespace

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.engine.graph import tree_drafter
from paceline.engine.graph.slot_params import Slot
from paceline.engine.graph.slots import DeviceSlots
from paceline.engine.graph.tree_drafter import FRESH, ROOM, SHAPES, TreeDrafter
from paceline.kernels.gpu.speculation.accept_tree import path_buffers
from paceline.speculation.proposer import HiddenRows, SequenceProgress
from paceline.speculation.proposers.eagle import eagle_trees
from tests import public_heads
from tests.fakes import TINY, tiny_model
from tests.heads import eagle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = (0, 1, 2)
LENGTHS = (5, 18)
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.8, seed=3),
    "truncated": SamplingParams(temperature=1.2, top_k=12, top_p=0.9, min_p=0.01, seed=3),
}


def states(start: int, count: int, seed: int, layers: tuple[int, ...] = LAYERS) -> HiddenRows:
    generator = torch.Generator().manual_seed(1000 * seed + start)
    drawn = {layer: torch.randn(count, TINY.hidden_size, generator=generator).to(DEVICE) for layer in layers}
    return HiddenRows(start, drawn, None)


def progress(number: int, ids: list[int], nodes: int, params: SamplingParams, hidden: HiddenRows) -> SequenceProgress:
    return SequenceProgress(number, ids, nodes, params, 3, number, 2, "coupled", hidden=hidden)


class Case:
    """Two sequences, each drafted by the host and on the device."""

    def __init__(
        self, monkeypatch, nodes: int, params: SamplingParams, reduced: int | None = None, public: str | None = None
    ) -> None:
        shape = SHAPES[nodes]
        monkeypatch.setattr(eagle_trees, "DEVICE_LEVELS", shape.levels)
        monkeypatch.setattr(eagle_trees, "WIDTH", shape.width)
        monkeypatch.setattr(eagle_trees, "BRANCHES", shape.branches)
        self.nodes, self.params = nodes, params
        if public is None:
            model = tiny_model(device=DEVICE)
            self.host, self.lender = (eagle(model, reduced=reduced) for _ in range(2))
        else:
            model = public_heads.target(DEVICE)
            self.host, self.lender = (public_heads.public_proposer(public, model) for _ in range(2))
        self.layers = self.host.runner.model.config.state_layers
        self.host.grows_on_device = True
        self.ids = {n: [(5 * n + 3 * j) % TINY.vocab_size for j in range(length)] for n, length in enumerate(LENGTHS)}
        self.slots = DeviceSlots(2, torch.device(DEVICE))
        self.drafter = TreeDrafter(self.lender, self.slots)
        self.sequences = [SimpleNamespace(id=n, ids=ids, depth=nodes) for n, ids in self.ids.items()]
        self.tables = torch.zeros(2, self.drafter.table_width, dtype=torch.int32, device=DEVICE)
        self.drafter.bind(self.tables)
        self.observe({n: states(0, len(ids) - 1, n, self.layers) for n, ids in self.ids.items()})
        self.load()

    def observe(self, hidden: dict[int, HiddenRows], *others) -> None:
        for proposer in (self.host, self.lender)[: 1 if others else 2]:
            proposer.observe([progress(n, self.ids[n], self.nodes, self.params, part) for n, part in hidden.items()])

    def load(self) -> None:
        self.slots.load([Slot(ids, self.params, 3, n) for n, ids in self.ids.items()])
        self.drafter.load(self.sequences)

    def host_drafts(self) -> list[tuple[list[int], list[int]]]:
        drafts = self.host.collect(list(self.ids), 0.0).split()
        return [(list(drafts[n].tokens), list(drafts[n].parents)) for n in self.ids]

    @torch.inference_mode()
    def device_drafts(self) -> list[tuple[list[int], list[int]]]:
        shape = self.drafter.shape(self.nodes)
        for slot, sequence in enumerate(self.sequences):
            blocks = self.drafter.reserve_blocks(sequence, len(sequence.ids) + self.nodes, shape)
            self.tables[slot, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for part in self.drafter.begin(shape):
            self.drafter.work(part, self.slots.sampling)()
        drafts = self.drafter.drafts(shape)
        return list(zip(drafts.tokens.tolist(), drafts.parents.tolist(), strict=True))

    @torch.inference_mode()
    def commit(self, counts: list[int]) -> None:
        """Rounds in which so many nodes were accepted: random tokens with random states."""
        path = path_buffers(2, max(counts), DEVICE)
        hidden = {n: states(len(ids) - 1, counts[n] + 1, n, self.layers) for n, ids in self.ids.items()}
        inner = {layer: torch.cat([hidden[n].by_layer[layer] for n in self.ids]) for layer in self.layers}
        first = 0
        for n, ids in self.ids.items():
            new = [(11 * len(ids) + 7 * j) % TINY.vocab_size for j in range(counts[n] + 1)]
            path.counts[n] = counts[n]
            path.tokens[n, : len(new)] = torch.tensor(new)
            path.rows[n, : len(new)] = torch.arange(first, first + len(new))
            first += len(new)
            ids.extend(new)
            self.slots.state.lengths[n] += len(new)
        self.drafter.keep_states(inner, path, torch.ones(2, dtype=torch.int32, device=DEVICE))
        self.observe(hidden, "host only")


@pytest.mark.parametrize(
    ("nodes", "kind", "reduced"),
    [
        (1, "greedy", 24),
        (1, "truncated", 24),
        (3, "greedy", None),
        (3, "sampled", 24),
        (7, "greedy", 24),
        (15, "sampled", None),
        (7, "truncated", 24),
    ],
)
def test_round_after_round(monkeypatch, nodes, kind, reduced):
    case = Case(monkeypatch, nodes, PARAMS[kind], reduced)
    for counts in ([2, 0], [0, 1], None) if nodes == 7 else ([1, 2], None):
        assert case.device_drafts() == case.host_drafts()
        if counts:
            case.commit(counts)


@pytest.mark.parametrize("public", ["speculators qwen3 three layers", "sglang old norms", "eagle1 pickle", "deepspec"])
def test_rounds_of_published_heads(monkeypatch, public):
    case = Case(monkeypatch, 7, PARAMS["greedy"], public=public)
    for counts in ([2, 0], [0, 1], None):
        assert case.device_drafts() == case.host_drafts()
        if counts:
            case.commit(counts)


def test_rounds_without_drafts_are_caught_up_with(monkeypatch):
    case = Case(monkeypatch, 7, PARAMS["greedy"])
    follows = 0
    with torch.inference_mode():
        for _ in range(FRESH + 1):
            for part in case.drafter.begin(tree_drafter.DraftShape(0, 0)):
                assert part.name == "follow"
                follows += 1
                for slot, sequence in enumerate(case.sequences):
                    blocks = case.drafter.reserve_blocks(sequence, len(sequence.ids), tree_drafter.DraftShape(0, 0))
                    case.tables[slot, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
                case.drafter.work(part, case.slots.sampling)()
            case.commit([0, 0])
    assert follows == 1
    assert case.device_drafts() == case.host_drafts()


def test_back_to_the_host_and_out_again(monkeypatch):
    case = Case(monkeypatch, 7, PARAMS["greedy"])
    case.device_drafts()
    case.host_drafts()
    case.commit([2, 0])
    case.drafter.return_sequences(case.sequences[:1])
    case.lender.close([1])
    drafts = case.lender.collect([0], 0.0).split()[0]
    tokens, parents = case.host_drafts()[0]
    assert (list(drafts.tokens), list(drafts.parents)) == (tokens, parents)


def test_a_sequence_without_room_is_let_go(monkeypatch):
    case = Case(monkeypatch, 7, PARAMS["greedy"])
    shape = case.drafter.shape(7)
    assert case.drafter.reserve_blocks(case.sequences[0], 64 * 16, shape) is None
    assert case.drafter.reserve_blocks(case.sequences[1], 30, shape) is not None
    assert not case.drafter.can_draft(case.sequences)
    assert case.drafter.can_draft(case.sequences[1:])
    case.drafter.return_sequences(case.sequences)
    case.lender.close([1])
    assert case.lender.num_free_blocks == 64


def test_no_sequence_requests_drafts(monkeypatch):
    case = Case(monkeypatch, 7, PARAMS["greedy"])
    for sequence in case.sequences:
        sequence.depth = 0
    case.load()
    assert case.drafter.can_draft(case.sequences)
    assert case.drafter.reserve_blocks(case.sequences[0], 10, case.drafter.shape(7)) is None


def test_nothing_is_read_for_those_who_want_no_drafts(monkeypatch):
    case = Case(monkeypatch, 7, PARAMS["greedy"])
    case.drafter.return_sequences(case.sequences)
    case.sequences[1].depth = 0
    case.load()
    assert case.drafter.reserve_blocks(case.sequences[0], 10, case.drafter.shape(7)) is not None
    assert case.drafter.reserve_blocks(case.sequences[1], 30, case.drafter.shape(7)) is None
    assert case.drafter.can_draft(case.sequences)


@pytest.mark.parametrize(("depth", "nodes"), [(1, 1), (2, 3), (3, 3), (4, 7), (8, 7), (9, 15), (19, 31), (60, 31)])
def test_shapes(monkeypatch, depth, nodes):
    drafter = TreeDrafter(eagle(tiny_model(device=DEVICE)), DeviceSlots(1, torch.device(DEVICE)))
    assert drafter.shape(depth).nodes == nodes
    assert drafter.shape(depth).levels < FRESH <= ROOM
