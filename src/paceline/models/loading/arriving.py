"""A decoder whose weights arrive while it is already in use: a pass waits for a layer when it gets there, and not before."""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.kernels.linear import LinearWeight
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.llama import DecoderModel, Layer
from paceline.models.loading.weight_parts import MATRICES, Parts, Piece


class Arrivals:
    """Parts of a model by number. One side puts them in, in any order; the other waits for those it needs."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._pieces: dict[int, Mapping[str, Piece]] = {}
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def put(self, part: int, pieces: Mapping[str, Piece]) -> None:
        """What comes a second time is left alone."""
        with self._changed:
            self._pieces.setdefault(part, pieces)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """No more will come: whoever waits, or will wait for what is not there, gets `error`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self, part: int) -> Mapping[str, Piece]:
        with self._changed:
            self._changed.wait_for(lambda: part in self._pieces or self._error is not None)
            if part not in self._pieces:
                assert self._error is not None
                raise self._error
            return self._pieces[part]

    def wait_all(self) -> None:
        for part in range(self.parts.count):
            self.wait(part)

    def has(self, part: int) -> bool:
        return part in self._pieces

    @property
    def error(self) -> Exception | None:
        return self._error

    @property
    def is_complete(self) -> bool:
        return len(self._pieces) == self.parts.count

    @property
    def num_layers(self) -> int:
        """How many layers are there."""
        return sum(self.parts.is_layer(part) for part in list(self._pieces))


class ArrivingModel(DecoderModel):
    """`DecoderModel` over `arrivals`, of which the part `tables` must be there."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, arrivals: Arrivals, weight_bytes: int
    ) -> None:
        """`weight_bytes`: of all matrices, once they are there."""
        nn.Module.__init__(self)
        self.config, self.device, self.dtype = config, device, dtype
        self._arrivals, self._weight_bytes = arrivals, weight_bytes
        tables = arrivals.wait(arrivals.parts.tables)
        self.embedding = _matrix(tables["embedding"])
        self.head = self.embedding if config.tie_embeddings else _matrix(tables["head"])
        self.layers = [ArrivingLayer(config, arrivals, tables, i) for i in range(config.num_layers)]
        final_norm = tables["final_norm"]
        assert isinstance(final_norm, torch.Tensor)
        self._join(final_norm)

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    @property
    def is_complete(self) -> bool:
        return self._arrivals.is_complete


class ArrivingLayer(Layer):
    """Its norms are there from the beginning; its matrices are missing attributes until the first who wants one has waited."""

    def __init__(self, config: ModelConfig, arrivals: Arrivals, tables: Mapping[str, Piece], number: int) -> None:
        self.config, self.reduce = config, None
        self._arrivals, self._part = arrivals, arrivals.parts.layer(number)
        own = f"layers.{number}."
        vars(self).update({name.removeprefix(own): one for name, one in tables.items() if name.startswith(own)})

    def __getattr__(self, name: str) -> Any:
        if name not in MATRICES:
            raise AttributeError(name)
        pieces = self._arrivals.wait(self._part)
        vars(self).update(pieces)
        return pieces[name]


def _matrix(piece: Piece) -> LinearWeight:
    assert not isinstance(piece, torch.Tensor)
    return piece
