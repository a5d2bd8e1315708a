"""A model that is loaded while it is already in use: from workers that have it, from disk where nobody has."""

import logging
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from paceline.core.errors import EngineClosed, PacelineError
from paceline.kernels.quantized import Quantization
from paceline.models.loading.arriving import Arrivals, ArrivingModel
from paceline.models.loading.load import LoadedModel, open_checkpoint
from paceline.models.loading.weight_manifest import Manifest, config_from_json, piece_tensors, weight_form
from paceline.models.loading.weight_parts import Parts
from paceline.models.loading.weight_size import check_room
from paceline.models.loading.weight_stock import WeightStock, tokenizer_from_tensor
from paceline.models.loading.weights_sum import checkpoint_sum
from paceline.runtime.transfer.client import Courier
from paceline.runtime.weights.peer import SourceLost, WeightPeer
from paceline.runtime.weights.queue import PartQueue
from paceline.runtime.weights.sources import DiskSource, Supply
from paceline.runtime.weights.spec import PeerAddress
from paceline.runtime.wire.keys import Security

logger = logging.getLogger(__name__)

MAX_PEERS = 8
"""Asked by one worker that starts; of more, as many drawn at random."""


class WeightsUnavailable(PacelineError):
    """No peer has the model, or has it any longer, and it is not on this machine."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    layers: int
    """That are there."""
    total: int
    peers: int
    """That they come from; 0: from disk."""


class WeightLoader:
    """One load. `load` returns when the model can be used; the rest arrives behind its back."""

    def __init__(
        self, peers: Sequence[PeerAddress], security: Security | None, kinds: Sequence[str] | None = None
    ) -> None:
        """`security.own` identifies this worker; peers show the same key, being workers of the same role."""
        self._peers = peers if len(peers) <= MAX_PEERS else random.sample(list(peers), MAX_PEERS)
        self._security = None if security is None else Security(security.own, security.own.public)
        self._courier = Courier(security, kinds)
        self._arrivals: Arrivals | None = None
        self._supply: Supply | None = None
        self._manifest: Manifest | None = None
        self._form = self._fingerprint = ""

    def load(
        self, name: str, device: torch.device, dtype: torch.dtype, quantization: Quantization | None
    ) -> LoadedModel:
        """Like `load_model`. What the model is asked to compute waits for the layers it gets to."""
        self._form = weight_form(device, dtype, quantization)
        local = _Local(name, device, dtype, quantization)
        self._fingerprint = local.fingerprint
        peers = self._ask(device)
        if peers:
            return self._load_from(peers, device, dtype, local)
        return self._load_stored(local)

    @property
    def progress(self) -> LoadProgress | None:
        """None before it began and when all is there."""
        if self._arrivals is None or self._supply is None or self._arrivals.is_complete:
            return None
        return LoadProgress(self._arrivals.num_layers, self._arrivals.parts.num_layers, self._supply.num_peers)

    @property
    def error(self) -> Exception | None:
        """Why the rest will never come."""
        return None if self._arrivals is None else self._arrivals.error

    def stock(self, loaded: LoadedModel) -> WeightStock:
        """What was loaded, for others to take. Waits until all is there, and raises when that never will be."""
        assert self._arrivals is not None
        self._arrivals.wait_all()
        return WeightStock(loaded, self._form, self._fingerprint, self._manifest)

    def close(self) -> None:
        """Stop loading. A pass that waits for a layer ends with `EngineClosed`. Safe to call twice."""
        if self._supply is not None:
            self._supply.close(EngineClosed("the worker was stopped while it was loading"))
        self._courier.close()

    def _load_stored(self, local: "_Local") -> LoadedModel:
        if local.absent is not None:
            tried = ", ".join(peer.name for peer in self._peers)
            raise WeightsUnavailable(f"{local.absent}; and no peer gives it{f' ({tried} were asked)' if tried else ''}")
        checkpoint = open_checkpoint(local.name, local.device, local.dtype)
        check_room(local.name, checkpoint, local.device, local.dtype, local.quantization is not None, ranks=1)
        parts = Parts.of(checkpoint.config)
        self._arrivals = arrivals = Arrivals(parts)
        arrivals.put(parts.tokenizer, {})  # read below, on this thread
        queue = PartQueue([part for part in range(parts.count) if part != parts.tokenizer])
        self._supply = Supply(arrivals, queue)
        self._supply.add(DiskSource(checkpoint, local.device, local.dtype, local.quantization))
        tokenizer = checkpoint.read_tokenizer()
        model = ArrivingModel(checkpoint.config, local.device, local.dtype, arrivals, _stored_bytes(arrivals))
        return LoadedModel(checkpoint.name, checkpoint.config, model, tokenizer)

    def _load_from(
        self, peers: Sequence[WeightPeer], device: torch.device, dtype: torch.dtype, local: "_Local"
    ) -> LoadedModel:
        self._manifest = manifest = peers[0].manifest
        self._fingerprint = manifest.fingerprint
        logger.info("taking %s from %s", manifest.name, ", ".join(peer.name for peer in peers))
        config = config_from_json(manifest.config)
        self._arrivals = arrivals = Arrivals(Parts.of(config))
        queue = PartQueue(list(range(arrivals.parts.count)))
        self._supply = Supply(arrivals, queue, lambda: local.source(manifest))
        self._supply.add(*peers, *(peer.second() for peer in peers))
        data = arrivals.wait(arrivals.parts.tokenizer)["tokenizer"]
        assert isinstance(data, torch.Tensor)
        tokenizer = tokenizer_from_tensor(data)
        model = ArrivingModel(config, device, dtype, arrivals, manifest.weight_bytes)
        return LoadedModel(manifest.name, config, model, tokenizer)

    def _ask(self, device: torch.device) -> list[WeightPeer]:
        """Peers that have the model, and agree on what it is."""
        if not self._peers:
            return []
        with ThreadPoolExecutor(len(self._peers)) as pool:
            answers = pool.map(lambda address: self._ask_one(address, device), self._peers)
        groups: dict[tuple[object, ...], list[WeightPeer]] = {}
        for peer in answers:
            if peer is not None:
                found = peer.manifest
                groups.setdefault((found.config, found.fingerprint, found.parts), []).append(peer)
        ranked = sorted(groups.values(), key=len, reverse=True)
        if len(ranked) > 1:
            names = " against ".join(", ".join(peer.name for peer in group) for group in ranked)
            logger.error("peers hold different weights under the same name: %s; see which of them are right", names)
            if len(ranked[0]) == len(ranked[1]):
                ranked.insert(0, [])  # nobody can tell who is wrong
        for peer in (one for group in ranked[1:] for one in group):
            peer.close()
        return ranked[0] if ranked else []

    def _ask_one(self, address: PeerAddress, device: torch.device) -> WeightPeer | None:
        peer = WeightPeer(address, self._security, self._courier, device)
        try:
            peer.ask(self._form, self._fingerprint)
        except SourceLost as lost:
            logger.info("no weights from %s: %s", address.name, lost)
            peer.close()
            return None
        return peer


class _Local:
    """The model on this machine, if it is there."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, quantization: Quantization | None) -> None:
        self.name, self.device, self.dtype, self.quantization = name, device, dtype, quantization
        self.fingerprint = ""
        self.absent: PacelineError | None = None
        try:
            self.fingerprint = checkpoint_sum(name)
        except PacelineError as error:
            self.absent = error

    def source(self, manifest: Manifest) -> DiskSource:
        if self.absent is not None:
            raise WeightsUnavailable(f"no peer is left that gives {manifest.name}, and {self.absent}")
        checkpoint = open_checkpoint(self.name, self.device, self.dtype)
        return DiskSource(checkpoint, self.device, self.dtype, self.quantization, manifest)


def _stored_bytes(arrivals: Arrivals) -> int:
    """Of all matrices, before most of them are read. Layer 0 stands for all: quantisers give no other more bits."""
    parts = arrivals.parts
    tables, layer = arrivals.wait(parts.tables), arrivals.wait(parts.layer(0)).values()
    matrices = (tables[name] for name in ("embedding", "head") if name in tables)
    own = sum(tensor.nbytes for piece in matrices for tensor in piece_tensors(piece))
    return own + parts.num_layers * sum(tensor.nbytes for piece in layer for tensor in piece_tensors(piece))
