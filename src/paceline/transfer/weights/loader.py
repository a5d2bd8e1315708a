"""A worker's weights: loading them, from peers that have them or otherwise from disk, and serving them to other workers.

`WeightLoader` loads a model while it is already in use. `WeightManager` owns the loader and the server of a worker.
"""

import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from paceline.core.errors import EngineClosed, PacelineError, UnsupportedModel
from paceline.kernels.formats.quantized import Quantization
from paceline.kernels.formats.weights import Activations
from paceline.model_files import quick_checksum
from paceline.models.families.spec_json import spec_from_json
from paceline.models.loading import LoadedModel, StreamedModel, StreamedWeights, check_memory, open_checkpoint
from paceline.models.manifest.manifest import ExportedWeights, Manifest, piece_tensors, weight_form
from paceline.models.manifest.parts import Parts, tokenizer_from_tensor
from paceline.models.parallel import RankExport, Ranks, RankSpec, load_from, load_parallel
from paceline.models.weights import Checkpoint
from paceline.transfer import DeviceMemory, TransferClient, device_memory
from paceline.transfer.weights.peers import PeerSource, SourceFailed
from paceline.transfer.weights.server import Activity, WeightServer
from paceline.transfer.weights.sources import DiskSource, PartQueue, WeightSources
from paceline.wire.gateway_messages import LoadProgress
from paceline.wire.keys import Security
from paceline.wire.worker_spec import PeerAddress, WeightSpec

logger = logging.getLogger(__name__)

MAX_PEERS = 8
"""Most peers that one worker loads from. They are chosen at random if there are more."""


class WeightsUnavailable(PacelineError):
    """No peer has the model, or no peer is left, and it is not on this machine."""


class WeightLoader:
    """Loads one model. `load` returns when the model can be used, and the remaining layers load in the background."""

    def __init__(
        self,
        peers: Sequence[PeerAddress],
        security: Security | None,
        channels: Sequence[str] | None = None,
        memory_of: Callable[[torch.device], DeviceMemory | None] | None = None,
    ) -> None:
        """`security.own` authenticates this worker. Its peers have the same role and hence the same key. `memory_of` returns
        the memory of a device that may be copied from peers. If it is None, `device_memory` is used."""
        self._peers = peers if len(peers) <= MAX_PEERS else random.sample(list(peers), MAX_PEERS)
        self._security = None if security is None else Security(security.own, security.own.public)
        self._client = TransferClient(security, channels)
        self._memory_of = memory_of or partial(device_memory, channels=channels)
        self._streamed: StreamedWeights | None = None
        self._sources: WeightSources | None = None
        self._manifest: Manifest | None = None
        self._ranks: Ranks | None = None
        self._form = self._fingerprint = ""
        self._in_place: set[str] = set()
        """Names of the peers whose device memory is copied."""

    def load(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None,
        activations: Activations = "int8",
    ) -> LoadedModel:
        """Like `load_model`. A forward pass waits for every layer when it gets there."""
        self._form = weight_form(device, dtype, quantization, activations)
        local = _LocalCheckpoint(name, device, dtype, quantization, activations)
        self._fingerprint = local.fingerprint
        peers = self._connect(device)
        if peers:
            return self._load_from_peers(peers, device, dtype, local)
        return self._load_from_disk(local)

    def load_ranks(self, spec: RankSpec) -> tuple[LoadedModel, Ranks]:
        """Like `load_parallel`. Peers send whole parts, whatever their number of ranks is, and this process sends every rank
        its share. Without peers every rank reads the checkpoint."""
        device, dtype = spec.device_of(0), spec.dtype
        self._form = weight_form(device, dtype, spec.quantization, spec.activations)
        local = _LocalCheckpoint(spec.model, device, dtype, spec.quantization, spec.activations)
        self._fingerprint = local.fingerprint
        peers = self._connect(torch.device("cpu"))
        if not peers:
            self._check_local(local)
            loaded, self._ranks = load_parallel(spec)
            return loaded, self._ranks
        manifest = self._use(peers)

        def start(streamed: StreamedWeights) -> None:
            self._start(streamed, peers, local, manifest)

        loaded, self._ranks = load_from(spec, spec_from_json(manifest.config), manifest.name, start)
        return replace(loaded, checksum=self._fingerprint), self._ranks

    @property
    def progress(self) -> LoadProgress | None:
        """None before loading starts and when all layers are loaded."""
        if self._streamed is None or self._sources is None or self._streamed.is_complete:
            return None
        peers = self._sources.active_peers
        loaded, total = self._streamed.num_layers, self._streamed.parts.num_layers
        return LoadProgress(loaded, total, len(peers), len(peers & self._in_place))

    @property
    def error(self) -> Exception | None:
        """The error that ended loading."""
        return None if self._streamed is None else self._streamed.error

    def wait(self, loaded: LoadedModel) -> ExportedWeights:
        """Wait until all weights are loaded and return them for a weight server. Raises if loading failed."""
        if self._ranks is not None:
            return RankExport(loaded, self._ranks, self._form, self._fingerprint, self._manifest)
        assert self._streamed is not None
        self._streamed.wait_all()
        return ExportedWeights(loaded, self._form, self._fingerprint, self._manifest)

    def export(self, loaded: LoadedModel, checksum: str) -> ExportedWeights:
        """Other weights of the same model, for a weight server. They replaced those that were loaded here."""
        return ExportedWeights(replace(loaded, checksum=checksum), self._form, checksum)

    def close(self) -> None:
        """Stop loading. A step that waits for a layer ends with `EngineClosed`. Safe to call twice."""
        if self._sources is not None:
            self._sources.close(EngineClosed("the worker was stopped while it was loading"))
        self._client.close()

    def _load_from_disk(self, local: "_LocalCheckpoint") -> LoadedModel:
        self._check_local(local)
        checkpoint = open_checkpoint(local.name, local.device, local.dtype)
        check_memory(local.name, checkpoint, local.device, local.dtype, local.quantization is not None, ranks=1)
        parts = Parts.of(checkpoint.config)
        self._streamed = streamed = StreamedWeights(parts)
        streamed.put(parts.tokenizer, {})  # read below, on this thread
        queue = PartQueue([part for part in range(parts.count) if part != parts.tokenizer])
        self._sources = WeightSources(streamed, queue)
        self._sources.add(local.disk(checkpoint))
        tokenizer = checkpoint.read_tokenizer()
        model = StreamedModel(checkpoint.config, local.device, local.dtype, streamed, _matrix_bytes(streamed))
        return LoadedModel(checkpoint.name, checkpoint.config, model, tokenizer, self._fingerprint)

    def _load_from_peers(
        self, peers: Sequence[PeerSource], device: torch.device, dtype: torch.dtype, local: "_LocalCheckpoint"
    ) -> LoadedModel:
        manifest = self._use(peers)
        config = spec_from_json(manifest.config)
        streamed = StreamedWeights(Parts.of(config))
        self._start(streamed, peers, local, manifest)
        data = streamed.wait(streamed.parts.tokenizer)["tokenizer"]
        assert isinstance(data, torch.Tensor)
        tokenizer = tokenizer_from_tensor(data)
        model = StreamedModel(config, device, dtype, streamed, manifest.weight_bytes)
        return LoadedModel(manifest.name, config, model, tokenizer, self._fingerprint)

    def _use(self, peers: Sequence[PeerSource]) -> Manifest:
        self._manifest = manifest = peers[0].manifest
        self._fingerprint = manifest.fingerprint
        self._in_place = {peer.name for peer in peers if peer.is_in_place}
        names = (f"{peer.name}{' in place' if peer.is_in_place else ''}" for peer in peers)
        logger.info("loading %s from %s", manifest.name, ", ".join(names))
        return manifest

    def _start(
        self, streamed: StreamedWeights, peers: Sequence[PeerSource], local: "_LocalCheckpoint", manifest: Manifest
    ) -> None:
        """Start to load all parts into `streamed`."""
        self._streamed = streamed
        queue = PartQueue(list(range(streamed.parts.count)))
        self._sources = WeightSources(streamed, queue, lambda: local.source(manifest))
        self._sources.add(*peers, *(peer.duplicate() for peer in peers))

    def _check_local(self, local: "_LocalCheckpoint") -> None:
        if local.error is not None:
            tried = ", ".join(peer.name for peer in self._peers)
            raise WeightsUnavailable(f"{local.error}; and no peer has it{f' (tried {tried})' if tried else ''}")

    def _connect(self, device: torch.device) -> list[PeerSource]:
        """Peers that have the model and agree on its weights."""
        if not self._peers:
            return []
        with ThreadPoolExecutor(len(self._peers)) as pool:
            peers = pool.map(lambda address: self._connect_peer(address, device), self._peers)
        groups: dict[tuple[object, ...], list[PeerSource]] = {}
        for peer in peers:
            if peer is not None:
                found = peer.manifest
                groups.setdefault((found.config, found.fingerprint, found.parts), []).append(peer)
        ranked = sorted(groups.values(), key=len, reverse=True)
        if len(ranked) > 1:
            names = " differ from ".join(", ".join(peer.name for peer in group) for group in ranked)
            logger.error("peers hold different weights of the same model: %s; restart those with wrong weights", names)
            if len(ranked[0]) == len(ranked[1]):
                ranked.insert(0, [])  # a tie: no group can be trusted
        for group in ranked[1:]:
            for peer in group:
                peer.close()
        return ranked[0] if ranked else []

    def _connect_peer(self, address: PeerAddress, device: torch.device) -> PeerSource | None:
        peer = PeerSource(address, self._security, self._client, device, self._memory_of(device))
        try:
            peer.connect(self._form, self._fingerprint)
        except SourceFailed as failed:
            logger.info("cannot load weights from %s: %s", address.name, failed)
            peer.close()
            return None
        return peer


class _LocalCheckpoint:
    """The checkpoint on this machine, if there is one."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None,
        activations: Activations,
    ) -> None:
        self.name, self.device, self.dtype = name, device, dtype
        self.quantization, self.activations = quantization, activations
        self.fingerprint = ""
        self.error: PacelineError | None = None
        """The error that shows why this machine has no copy of the model. None if it has a copy."""
        try:
            self.fingerprint = quick_checksum(name)
        except PacelineError as error:
            self.error = error

    def source(self, manifest: Manifest) -> DiskSource:
        if self.error is not None:
            raise WeightsUnavailable(f"no peer is left that has {manifest.name}, and {self.error}")
        checkpoint = open_checkpoint(self.name, self.device, self.dtype)
        return self.disk(checkpoint, manifest)

    def disk(self, checkpoint: Checkpoint, manifest: Manifest | None = None) -> DiskSource:
        return DiskSource(checkpoint, self.device, self.dtype, self.quantization, self.activations, manifest)


def _matrix_bytes(streamed: StreamedWeights) -> int:
    """Bytes of all matrices, before most are read. Every layer counts as layer 0: no layer has more bits than it."""
    parts = streamed.parts
    tables, layer = streamed.wait(parts.tables), streamed.wait(parts.layer(0)).values()
    matrices = (tables[name] for name in ("embedding", "head") if name in tables)
    own = sum(tensor.nbytes for piece in matrices for tensor in piece_tensors(piece))
    return own + parts.num_layers * sum(tensor.nbytes for piece in layer for tensor in piece_tensors(piece))


class WeightManager:
    """Created before the model and closed before the engine. Call `load` or `load_ranks` once, then `start`."""

    def __init__(
        self, spec: WeightSpec | None, security: Security | None, channels: Sequence[str] | None = None
    ) -> None:
        """If `spec` is None, the model is loaded from disk and nothing is served. `security` holds the keys that workers of one
        role use among themselves."""
        self._loader = WeightLoader(() if spec is None else spec.peers, security, channels)
        self._security, self._channels = security, channels
        self._server = None if spec is None else WeightServer(spec.address, security, spec.bytes_per_second, channels)
        self._loaded: LoadedModel | None = None
        self._thread: threading.Thread | None = None
        self._is_ready = False

    @property
    def address(self) -> str:
        """Address of the weight server. It is empty without a weight server."""
        return "" if self._server is None else self._server.address

    @property
    def is_serving(self) -> bool:
        """Whether other workers can load from this worker."""
        return self._server is not None and self._server.is_open

    @property
    def progress(self) -> LoadProgress | None:
        """Progress of loading. None when the worker is ready."""
        progress = self._loader.progress
        if progress is None and self._loaded is not None and not self._is_ready:
            layers = self._loaded.config.num_layers
            return LoadProgress(layers, layers, 0)
        return progress

    @property
    def error(self) -> Exception | None:
        """The error that ended loading; the worker cannot serve then."""
        return self._loader.error

    def load(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None,
        activations: Activations = "int8",
    ) -> LoadedModel:
        """The model, as `build_engine` expects it. Layers may still be loading."""
        self._loaded = self._loader.load(name, device, dtype, quantization, activations)
        return self._loaded

    def load_ranks(self, spec: RankSpec) -> tuple[LoadedModel, Ranks]:
        """The model of several ranks, completely loaded, as `build_engine` expects it."""
        self._loaded, ranks = self._loader.load_ranks(spec)
        return self._loaded, ranks

    def fetch(
        self,
        address: str,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None,
        activations: Activations = "int8",
    ) -> LoadedModel:
        """The weights that another worker serves, whatever checkpoint they are of. Blocks until all have arrived."""
        loader = WeightLoader([PeerAddress(address, address)], self._security, self._channels)
        try:
            loaded = loader.load(f"the weights of {address}", device, dtype, quantization, activations)
            loader.wait(loaded)
            return loaded
        finally:
            loader.close()

    def withhold(self) -> None:
        """Serve nothing until `replaced`."""
        if self._server is not None:
            self._server.withhold()

    def replaced(self, checksum: str, activity: Callable[[], Activity]) -> None:
        """Serve the weights that replaced those of the model, with this checksum. First reads all of them."""
        if self._server is None or self._loaded is None:
            return
        weights = self._loader.export(self._loaded, checksum)
        self._server.open(weights, activity, device_memory(weights.device, self._channels))

    def wait(self) -> None:
        """Wait until all weights are loaded. Raises if loading failed."""
        assert self._loaded is not None
        self._loader.wait(self._loaded)

    def start(self, on_loaded: Callable[[], None], activity: Callable[[], Activity]) -> None:
        """Call `on_loaded`, on another thread, when all weights are loaded; then serve them, paced by `activity`."""
        if self._loaded is None:  # nothing was loaded here
            self._is_ready = True
            return
        self._thread = threading.Thread(
            target=self._finish, args=(on_loaded, activity), name="paceline-weights", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop loading and serving. A step that waits for a layer fails."""
        self._loader.close()
        if self._server is not None:
            self._server.close()
        if self._thread is not None:
            self._thread.join()

    def _finish(self, on_loaded: Callable[[], None], activity: Callable[[], Activity]) -> None:
        assert self._loaded is not None
        try:
            weights = self._loader.wait(self._loaded)
        except Exception:  # reported by `error`
            return
        logger.info("all %d layers are loaded", self._loaded.config.num_layers)
        try:
            on_loaded()
            if self._server is not None:
                self._server.open(weights, activity, device_memory(weights.device, self._channels))
        except EngineClosed:  # the worker stopped meanwhile
            pass
        except UnsupportedModel as error:
            logger.warning("other workers cannot load the weights from here: %s", error)
        except Exception:
            logger.exception("the weights are loaded, but other workers cannot load them from here")
        finally:
            self._is_ready = True
