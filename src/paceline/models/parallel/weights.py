"""Weights that rank 0 sends to the other ranks, and that it collects from them to send to another worker."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from paceline.core.errors import RankLost, UnsupportedModel
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.llama import DecoderModel
from paceline.models.loading.load import LoadedModel
from paceline.models.loading.streamed_weights import StreamedModel, StreamedWeights
from paceline.models.loading.weight_manifest import (
    ExportedWeights,
    Manifest,
    PartForm,
    assemble,
    empty_part,
    piece_form,
    piece_tensors,
    tensor_bytes,
)
from paceline.models.loading.weight_parts import Parts, Piece, part_of, tokenizer_from_tensor
from paceline.models.parallel.commands import RankSpec
from paceline.models.parallel.pieces import BIAS, MATRICES, PieceSplit, can_join
from paceline.models.parallel.ranks import Ranks
from paceline.models.parallel.shards import Shard, check_split, shard_config


class RankWeights(StreamedWeights):
    """Receives the parts of a whole model, sends every rank its share and keeps that of rank 0. A thread that puts a part
    waits until it is sent, so that few whole parts are in memory."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(Parts.of(ranks.config))
        self._ranks, self._split = ranks, PieceSplit(ranks.config, ranks.spec)
        self._sending = threading.Lock()

    def put(self, part: int, pieces: Mapping[str, Piece]) -> None:
        if part == self.parts.tokenizer:
            super().put(part, pieces)
            return
        try:
            with self._sending:
                if self.has(part):
                    return
                own, *others = self._split.divide(pieces)
                for connection, share in zip(self._ranks.weights, others, strict=True):
                    connection.send(part)
                    send_pieces(connection, share)
                super().put(part, to_device(own, self._ranks.spec.device_of(0)))
        except OSError as error:
            self.fail(RankLost(f"a rank ended while it loaded its weights: {error!r}; restart the engine"))
        except Exception as error:  # a pass that waits for the part must end
            self.fail(error)


def load_from(
    spec: RankSpec, config: ModelConfig, name: str, start: Callable[[StreamedWeights], None]
) -> tuple[LoadedModel, Ranks]:
    """Like `load_parallel`, with weights from elsewhere: `start` begins to put all parts of the whole model in any order.
    `config` is the configuration of the whole model. Returns when all ranks have loaded."""
    check_split(config, spec.size)
    ranks = Ranks.start(spec, config, sends_weights=True)
    try:
        streamed = RankWeights(ranks)
        start(streamed)
        streamed.wait_all()
        shard = Shard(0, spec.size, ranks.group.sum)
        model = build_shard(streamed, config, spec, shard)
        data = streamed.wait(streamed.parts.tokenizer)["tokenizer"]
        assert isinstance(data, Tensor)
        ranks.join()
    except BaseException:
        ranks.close()
        raise
    return LoadedModel(name, model.config, model, tokenizer_from_tensor(data)), ranks


def build_shard(streamed: StreamedWeights, config: ModelConfig, spec: RankSpec, shard: Shard) -> DecoderModel:
    """The model of one rank from its share of all parts."""
    pieces = [piece for part in range(1, streamed.parts.count) for piece in streamed.wait(part).values()]
    matrices = {id(piece): piece for piece in pieces if not isinstance(piece, Tensor)}.values()
    size = sum(tensor.nbytes for matrix in matrices for tensor in piece_tensors(matrix))
    device = spec.device_of(shard.rank)
    model = StreamedModel(shard_config(config, shard.size), device, spec.dtype, streamed, size)
    for layer in model.layers:
        layer.reduce = shard.reduce
    return model


def receive_model(connection: Connection, config: ModelConfig, spec: RankSpec, shard: Shard) -> DecoderModel:
    """The model of a rank from 1 on, from the parts that `RankWeights` sends."""
    parts = Parts.of(config)
    streamed = StreamedWeights(parts)
    streamed.put(parts.tokenizer, {})
    for _ in range(parts.count - 1):
        part: int = connection.recv()
        pieces = receive_pieces(connection, spec.device_of(shard.rank))
        if part == parts.tables:  # only rank 0 computes logits
            pieces["head"] = pieces["embedding"]
        streamed.put(part, pieces)
    return build_shard(streamed, config, spec, shard)


def serve_weights(connection: Connection, model: DecoderModel) -> None:
    """Send the divided pieces of each part that rank 0 asks for, until the connection closes. On a thread of a rank."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            pieces = part_of(model, connection.recv())
            send_pieces(connection, {name: piece for name, piece in pieces.items() if _is_divided(name, piece)})


class RankExport(ExportedWeights):
    """Weights of a model that is divided among ranks, in the format of one rank."""

    def __init__(
        self, loaded: LoadedModel, ranks: Ranks, form: str, fingerprint: str, manifest: Manifest | None = None
    ) -> None:
        super().__init__(replace(loaded, config=ranks.config), form, fingerprint, manifest)
        self._ranks, self._split = ranks, PieceSplit(ranks.config, ranks.spec)
        self._asking = threading.Lock()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")  # shares are joined on demand

    @cached_property
    def manifest(self) -> Manifest:
        """Raises `UnsupportedModel` if the shares cannot be joined to the weights of one rank."""
        if not can_join(part_of(self._loaded.model, self._parts.layer(0))):
            raise UnsupportedModel(
                f"{self._ranks.size} ranks divide groups of quantised inputs that have one scale, and their shares cannot be "
                "joined: use fewer ranks"
            )
        return super().manifest

    def _pieces(self, part: int) -> dict[str, Piece]:
        if part == self._parts.tokenizer:
            return super()._pieces(part)
        own = part_of(self._loaded.model, part)
        with self._asking:
            for connection in self._ranks.weights:
                connection.send(part)
            others = [receive_pieces(connection, torch.device("cpu")) for connection in self._ranks.weights]
        return self._split.join([own, *others])


def send_pieces(connection: Connection, pieces: Mapping[str, Piece]) -> None:
    """Send weights as they are in memory."""
    connection.send(PartForm(tuple(piece_form(name, piece) for name, piece in pieces.items()), sum=""))
    for piece in pieces.values():
        for tensor in piece_tensors(piece):
            connection.send_bytes(tensor_bytes(tensor.contiguous().cpu()))


def receive_pieces(connection: Connection, device: torch.device) -> dict[str, Piece]:
    """The weights of one call of `send_pieces`."""
    form: PartForm = connection.recv()
    tensors = empty_part(form)
    for tensor in tensors:
        connection.recv_bytes_into(tensor_bytes(tensor))
    return assemble(form, tensors, device)


def to_device(pieces: Mapping[str, Piece], device: torch.device) -> dict[str, Piece]:
    if device.type == "cpu":
        return dict(pieces)
    form = PartForm(tuple(piece_form(name, piece) for name, piece in pieces.items()), sum="")
    return assemble(form, [tensor for piece in pieces.values() for tensor in piece_tensors(piece)], device)


def _is_divided(name: str, piece: Piece) -> bool:
    return name.endswith(BIAS) if isinstance(piece, Tensor) else name in MATRICES
