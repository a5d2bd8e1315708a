"""Trees that hide the true continuation among wrong guesses, drafted on the device without any model."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from paceline.core.sequence import Sequence as Running
from paceline.engine.graph.drafter import DraftPart, DraftShape, DraftTensors
from paceline.engine.graph.slots import DeviceSlots
from paceline.speculation.drafts.drafts import DraftPrefill, depths
from paceline.speculation.proposer import ProposerTraits
from tests.fakes import FakeProposer

SHAPES = (DraftShape(3, 2), DraftShape(7, 4))


class OracleProposer(FakeProposer):
    """On the host it drafts nothing. `text` is what each request will say."""

    def __init__(self, text: Mapping[tuple[str, int], Sequence[int]], seed: int = 0) -> None:
        super().__init__(lambda progress: ([], []), traits=ProposerTraits(is_tree=True))
        self.text, self.random = text, random.Random(seed)

    def drafter(
        self, _: object, slots: DeviceSlots, vocab_size: int, prefills: object, max_depth: int
    ) -> "OracleDrafter":
        """In place of `make_drafter`."""
        return OracleDrafter(self, slots, vocab_size)

    def tree(self, truth: Sequence[int], shape: DraftShape, vocab_size: int) -> tuple[list[int], list[int]]:
        length = self.random.randint(0, min(shape.levels, len(truth)))
        path = sorted(self.random.sample(range(shape.nodes), length))
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(shape.nodes):
            if node in path:
                place = path.index(node)
                tokens.append(truth[place])
                parents.append(path[place - 1] if place else -1)
            else:
                shallow = [-1, *(i for i, depth in enumerate(depths(parents)) if depth < shape.levels)]
                parents.append(self.random.choice(shallow))
                tokens.append(self.random.randrange(vocab_size))
        return tokens, parents


class OracleDrafter:
    state_layers: tuple[int, ...] = ()
    wants_states = edits_logits = False
    is_idle = False
    table_width, scratch_block = 1, 0
    state: tuple[torch.Tensor, ...] = ()

    def __init__(self, proposer: OracleProposer, slots: DeviceSlots, vocab_size: int) -> None:
        self._proposer, self._slots, self._vocab_size = proposer, slots, vocab_size
        self._drafts: dict[DraftShape, DraftTensors] = {}
        self._sequences: Sequence[Running] = ()

    def bind(self, tables: torch.Tensor) -> None: ...

    def shape(self, depth: int) -> DraftShape:
        return next(shape for shape in SHAPES if shape.nodes >= depth)

    def load(self, sequences: Sequence[Running]) -> DraftPrefill:
        self._sequences = sequences
        return DraftPrefill()

    def forget(self, sequence_ids: Iterable[int]) -> None: ...

    def has_room(self, sequence: Running) -> bool:
        return True

    def can_draft(self, sequences: Sequence[Running]) -> bool:
        return True

    def reserve_blocks(self, sequence: Running, num_tokens: int, shape: DraftShape) -> Sequence[int] | None:
        return [0]

    def begin(self, shape: DraftShape) -> tuple[DraftPart, ...]:
        """Drafts here and now, on the host: that waits, as a graph never could."""
        if shape.nodes:
            drafts = self.drafts(shape)
            for slot, sequence in enumerate(self._sequences):
                said = int(self._slots.state.lengths[slot]) - sequence.num_prompt
                truth = self._proposer.text[sequence.request_id, sequence.choice][said:]
                tokens, parents = self._proposer.tree(truth, shape, self._vocab_size)
                drafts.tokens[slot] = torch.tensor(tokens)
                drafts.parents[slot] = torch.tensor(parents, dtype=torch.int32)
        return ()

    def parts(self, shape: DraftShape) -> tuple[DraftPart, ...]:
        return ()

    def work(self, part: DraftPart, sampling: object) -> Callable[[], None]:
        raise AssertionError

    def drafts(self, shape: DraftShape) -> DraftTensors:
        if shape not in self._drafts:
            tokens = torch.zeros(self._slots.size, shape.nodes, dtype=torch.int64, device=self._slots.device)
            self._drafts[shape] = DraftTensors(tokens, torch.full_like(tokens, -1, dtype=torch.int32))
        return self._drafts[shape]

    def keep_states(self, *args: object) -> None: ...

    def return_sequences(self, running: Sequence[Running]) -> None: ...
