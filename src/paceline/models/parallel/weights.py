"""The weights of a tensor-parallel model: rank 0 sends them to the other ranks, and collects them to send to another worker.

`PieceSplit` divides parts of a model among ranks and joins them again: weights as they are in memory, see
`models/manifest/parts.py`. Workers exchange weights in the format of one rank. A rank's share is the one that `ShardedWeights`
reads from a checkpoint.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from multiprocessing.connection import Connection
from typing import TypeVar

import torch
from torch import Tensor

from paceline.core.errors import RankLost, UnsupportedModel
from paceline.kernels.formats.four_bit import FourBitWeight, pack
from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.kernels.formats.packing import TILE, PackedWeight
from paceline.kernels.formats.quantized import QuantizedWeight
from paceline.kernels.formats.weights import Dense, FourBit, Grouped, Weight, columns, concat, rows
from paceline.kernels.linear import prepare
from paceline.models.decoder import DecoderModel
from paceline.models.families.spec import DecoderSpec
from paceline.models.families.tensors import Divided, PieceSpec, TensorSpec
from paceline.models.loading import LoadedModel, StreamedModel, StreamedWeights
from paceline.models.manifest.manifest import (
    ExportedWeights,
    Manifest,
    PartForm,
    assemble,
    empty_part,
    piece_form,
    piece_tensors,
    tensor_bytes,
)
from paceline.models.manifest.parts import Parts, Piece, part_of, tokenizer_from_tensor
from paceline.models.parallel.commands import RankSpec
from paceline.models.parallel.ranks import Ranks
from paceline.models.shards import Shard, check_split, rank_ranges, shard_config

T = TypeVar("T")


class PieceSplit:
    """Division of a model with `config` among the ranks of `spec`."""

    def __init__(self, config: DecoderSpec, spec: RankSpec) -> None:
        self._spec = spec
        self._copies = max(1, spec.size // config.num_kv_heads)
        """Ranks that have the same key-value heads."""
        self._pieces = divided_pieces(config)
        self._ranges = [rank_ranges(config, spec.size, rank) for rank in range(spec.size)]

    def divide(self, pieces: Mapping[str, Piece]) -> list[dict[str, Piece]]:
        """Every rank's share of a part of the whole model, on the device of `pieces`. Only rank 0 has the head."""
        shares: list[dict[str, Piece]] = [{} for _ in range(self._spec.size)]
        for name, piece in pieces.items():
            divided = self._pieces.get(_attribute(name))
            weight = None if isinstance(piece, Tensor) or divided is None else unpack(piece)
            for rank, share in enumerate(shares):
                if divided is not None and weight is not None:
                    share[name] = self._prepare(self._divide_matrix(divided, weight, rank))
                elif divided is not None and isinstance(piece, Tensor):
                    share[name] = torch.cat([piece[start:stop] for start, stop in self._outputs(divided, rank)])
                elif name != "head" or rank == 0:
                    share[name] = piece
        return shares

    def _divide_matrix(self, piece: PieceSpec, weight: Weight, rank: int) -> Weight:
        if piece.inputs is not None:
            return columns(weight, *self._ranges[rank][piece.inputs])
        return concat([rows(weight, start, stop) for start, stop in self._outputs(piece, rank)])

    def join(self, shares: Sequence[Mapping[str, Piece]]) -> dict[str, Piece]:
        """A part of the whole model from the shares of all ranks, in host memory. Pieces that are not divided may be missing in
        all shares but the first."""
        found: dict[str, Piece] = {}
        for name, piece in shares[0].items():
            divided = self._pieces.get(_attribute(name))
            if isinstance(piece, Tensor):
                vectors = [vector for share in shares if divided and isinstance(vector := share[name], Tensor)]
                found[name] = torch.cat(self._in_order(divided, vectors, _slice)) if divided else piece.cpu()
                continue
            if divided is None:
                found[name] = on_host(piece)
                continue
            weights = [unpack(on_host(_matrix(share[name]))) for share in shares]
            if divided.inputs is not None:
                found[name] = self._prepare(_concat_columns(weights))
            else:
                found[name] = self._prepare(concat(self._in_order(divided, weights, rows)))
        return found

    def _outputs(self, piece: PieceSpec, rank: int) -> list[tuple[int, int]]:
        """Outputs of the whole piece that the rank has, of each weight that is joined in it."""
        found, first = [], 0
        for tensor in piece.tensors:
            start, stop = self._ranges[rank][_divided(tensor)]
            found.append((first + start, first + stop))
            first += tensor.shape[0]
        return found

    def _in_order(self, piece: PieceSpec, shares: Sequence[T], part: Callable[[T, int, int], T]) -> list[T]:
        """The outputs of each joined weight of all ranks, one weight after the other. Ranks with the same key-value heads give
        theirs once."""
        found, first = [], 0
        for tensor in piece.tensors:
            divided = _divided(tensor)
            start, stop = self._ranges[0][divided]
            distinct = shares[:: self._copies] if divided == "key_value" else shares
            found += [part(share, first, first + stop - start) for share in distinct]
            first += stop - start
        return found

    def _prepare(self, weight: Weight) -> LinearWeight:
        """The weight in the format of the ranks' device, where it is."""
        dtype = self._spec.dtype
        if self._spec.device.type == "cpu":
            return prepare(weight, "cpu", dtype)
        if isinstance(weight, QuantizedWeight):
            return weight
        packed = pack(weight, weight.codes.device) if isinstance(weight, FourBit) else None
        if packed is not None:
            return packed
        return DenseWeight((weight.values if isinstance(weight, Dense) else weight.dequantize()).to(dtype))


def divided_pieces(config: DecoderSpec) -> dict[str, PieceSpec]:
    """The pieces of a layer that are divided among ranks, by attribute."""
    pieces = (piece for number in range(config.num_layers) for piece in config.pieces(number))
    return {piece.attribute: piece for piece in pieces if piece.outputs is not None or piece.inputs is not None}


def _divided(tensor: TensorSpec) -> Divided:
    assert tensor.outputs is not None
    return tensor.outputs


def _attribute(name: str) -> str:
    """The attribute of a layer that a piece belongs to: that of `layers.3.qkv_bias` is `qkv_bias`."""
    return name.rpartition(".")[2]


def _slice(vector: Tensor, start: int, stop: int) -> Tensor:
    return vector[start:stop].cpu()


def can_join(pieces: Mapping[str, Piece]) -> bool:
    """Whether shares like this one of a layer can be joined. A division that cut groups of inputs with one scale left values
    instead of codes in `output` or `down`."""
    has_codes = [_has_codes(_matrix(pieces[name])) for name in ("qkv", "gate_up")]
    return not any(has_codes) or all(_has_codes(_matrix(pieces[name])) for name in ("output", "down"))


def _has_codes(piece: LinearWeight) -> bool:
    return not isinstance(piece, DenseWeight) and (not isinstance(piece, PackedWeight) or len(piece.tensors) > 1)


def unpack(piece: LinearWeight) -> Weight:
    """The weight before `linear.prepare`."""
    if isinstance(piece, DenseWeight):
        return Dense(piece.values)
    if isinstance(piece, QuantizedWeight):
        return piece
    if isinstance(piece, FourBitWeight):
        return piece.unpack()
    codes, *scales = piece.tensors
    outputs, inputs = piece.shape
    if codes.dtype is torch.uint8:  # [N/32, K/8, 32, 4]
        values = torch.cat([codes & 15, codes >> 4], 3).transpose(1, 2)
    else:  # [N/32, K/4, 32, 4], or [N/32, K, 32]
        values = codes.transpose(1, 2)
    values = values.reshape(len(codes) * TILE, -1)[:outputs, :inputs].contiguous()
    if not scales:
        return Dense(values)
    group = piece.form.group
    flat = [scale.transpose(1, 2).flatten(0, 1)[:outputs, : inputs // group].float().contiguous() for scale in scales]
    offsets = flat[1] if len(flat) > 1 else None
    return Grouped(values, flat[0], offsets, group, "int8" if piece.form.rounds_activations else "float32")


def on_host(piece: LinearWeight) -> LinearWeight:
    if isinstance(piece, DenseWeight):
        return DenseWeight(piece.values.cpu())
    if isinstance(piece, QuantizedWeight):
        return QuantizedWeight(piece.values.cpu(), piece.scales.cpu())
    return piece.to("cpu") if isinstance(piece, FourBitWeight) else piece


def _concat_columns(weights: Sequence[Weight]) -> Weight:
    """One matrix with the inputs of all, in order. All have the same format."""
    first = weights[0]
    if isinstance(first, Dense):
        return Dense(torch.cat([weight.values for weight in weights if isinstance(weight, Dense)], 1))
    scales = [weight.scales for weight in weights if not isinstance(weight, Dense)]
    if isinstance(first, Grouped):
        parts = [weight for weight in weights if isinstance(weight, Grouped)]
        offsets = [part.offsets for part in parts if part.offsets is not None]
        codes = torch.cat([part.codes for part in parts], 1)
        return replace(
            first, codes=codes, scales=torch.cat(scales, 1), offsets=torch.cat(offsets, 1) if offsets else None
        )
    values = torch.cat(
        [weight.values.view(torch.uint8) for weight in weights if isinstance(weight, QuantizedWeight)], 1
    )
    has_one = first.scales.shape[1] == 1 and all(torch.equal(first.scales, scale) for scale in scales)
    return QuantizedWeight(values.view(first.values.dtype), first.scales if has_one else torch.cat(scales, 1))


def _matrix(piece: Piece) -> LinearWeight:
    assert not isinstance(piece, Tensor)
    return piece


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
    spec: RankSpec, config: DecoderSpec, name: str, start: Callable[[StreamedWeights], None]
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


def build_shard(streamed: StreamedWeights, config: DecoderSpec, spec: RankSpec, shard: Shard) -> DecoderModel:
    """The model of one rank from its share of all parts."""
    pieces = [piece for part in range(1, streamed.parts.count) for piece in streamed.wait(part).values()]
    matrices = {id(piece): piece for piece in pieces if not isinstance(piece, Tensor)}.values()
    size = sum(tensor.nbytes for matrix in matrices for tensor in piece_tensors(matrix))
    device = spec.device_of(shard.rank)
    model = StreamedModel(shard_config(config, shard.size), device, spec.dtype, streamed, size)
    for layer in model.layers:
        layer.reduce = shard.reduce
    return model


def receive_model(connection: Connection, config: DecoderSpec, spec: RankSpec, shard: Shard) -> DecoderModel:
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
    """Send the divided pieces of each part that rank 0 asks for, until the connection closes. It runs on a thread of a rank."""
    divided = divided_pieces(model.config)
    with contextlib.suppress(EOFError, OSError):
        while True:
            pieces = part_of(model, connection.recv())
            send_pieces(connection, {name: piece for name, piece in pieces.items() if _attribute(name) in divided})


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
