"""A decoder that is used while its weights are still loading: a pass waits for each layer when it reaches that layer."""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.kernels.formats.linear import LinearWeight
from paceline.models.decoder import DecoderModel, Layer
from paceline.models.families.spec import DecoderSpec
from paceline.models.manifest.parts import Parts, Piece


class StreamedWeights:
    """Parts of a model by number. Loader threads put them in any order; passes wait for the parts they need."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._pieces: dict[int, Mapping[str, Piece]] = {}
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def put(self, part: int, pieces: Mapping[str, Piece]) -> None:
        """Add a part. A part that was added before is ignored."""
        with self._changed:
            self._pieces.setdefault(part, pieces)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """End the stream: `wait` for a missing part raises `error`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self, part: int) -> Mapping[str, Piece]:
        """The weights of a part. Blocks until it is loaded; raises the error of `fail`."""
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
        """Number of loaded layers."""
        return sum(self.parts.is_layer(part) for part in list(self._pieces))


class StreamedModel(DecoderModel):
    """`DecoderModel` over streamed weights. The constructor waits for the part `tables`."""

    def __init__(
        self,
        config: DecoderSpec,
        device: torch.device,
        dtype: torch.dtype,
        streamed: StreamedWeights,
        weight_bytes: int,
    ) -> None:
        """`weight_bytes` is the size of all matrices, including those not loaded yet."""
        nn.Module.__init__(self)
        self.config, self.device, self.dtype = config, device, dtype
        self._streamed, self._weight_bytes = streamed, weight_bytes
        tables = streamed.wait(streamed.parts.tables)
        self.embedding = _matrix(tables["embedding"])
        self.head = self.embedding if config.tie_embeddings else _matrix(tables["head"])
        self.layers = [StreamedLayer(config, streamed, tables, i) for i in range(config.num_layers)]
        final_norm = tables["final_norm"]
        assert isinstance(final_norm, torch.Tensor)
        self._set_norms_and_rotary_table(final_norm)

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    @property
    def is_complete(self) -> bool:
        return self._streamed.is_complete


class StreamedLayer(Layer):
    """A layer whose norms are loaded. Its matrices are attributes that are set at first access, which waits for them."""

    def __init__(
        self, config: DecoderSpec, streamed: StreamedWeights, tables: Mapping[str, Piece], number: int
    ) -> None:
        prefix = f"layers.{number}."
        vectors = {name.removeprefix(prefix): piece for name, piece in tables.items() if name.startswith(prefix)}
        super().__init__(config, number, vectors)
        self._streamed, self._part = streamed, streamed.parts.layer(number)

    def __getattr__(self, name: str) -> Any:
        if name not in self.config.matrix_names(self.number):
            raise AttributeError(name)
        pieces = self._streamed.wait(self._part)
        vars(self).update(pieces)
        return pieces[name]


def _matrix(piece: Piece) -> LinearWeight:
    assert not isinstance(piece, torch.Tensor)
    return piece
