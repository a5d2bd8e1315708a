"""Hidden states of chosen rows of a pass, by layer."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor


class HiddenStates(Mapping[int, Tensor]):
    """States [n, D] by layer. They stay in the memory of the pass, where native code reads them, until a layer is asked for."""

    __slots__ = ("layers", "rows", "states")

    def __init__(self, states: Tensor, layers: Sequence[int], rows: Sequence[int]) -> None:
        self.states = states  # [L, T, D], contiguous
        self.layers = layers
        """Layers of `states`, in order."""
        self.rows = rows
        """Chosen rows of T, ascending."""

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def take(self, rows: slice) -> "HiddenStates":
        """A part of the rows."""
        return HiddenStates(self.states, self.layers, self.rows[rows])

    def choose(self, rows: Sequence[int]) -> "HiddenStates":
        """Other rows of the same pass, ascending."""
        return HiddenStates(self.states, self.layers, rows)

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the pass, so that no other states stay in memory with them."""
        return len(self.rows) == self.states.shape[1]

    @classmethod
    def join(cls, parts: Sequence["HiddenStates"]) -> "HiddenStates":
        """The rows of several passes, one after the other, in their own memory."""
        states = torch.cat([part._chosen(part.states) for part in parts], 1)
        return cls(states, parts[0].layers, range(states.shape[1]))

    def copy(self) -> "HiddenStates":
        """Returns the states in memory of their own, copied if necessary."""
        own = self._chosen(self.states)
        own = own.clone() if own.untyped_storage().data_ptr() == self.states.untyped_storage().data_ptr() else own
        return HiddenStates(own.contiguous(), self.layers, range(len(self.rows)))

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self.layers:
            raise KeyError(layer)
        return self._chosen(self.states[self.layers.index(layer)].unsqueeze(0)).squeeze(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def _chosen(self, states: Tensor) -> Tensor:
        rows = self.rows
        if rows and rows[-1] - rows[0] == len(rows) - 1:  # they increase
            return states[:, rows[0] : rows[-1] + 1]
        return states[:, torch.tensor(list(rows), dtype=torch.int64)]
