"""A worker from its specification, and as a process: `python -m paceline.runtime.deploy.worker SPEC`, SPEC as JSON."""

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import torch

from paceline.core.config import EngineConfig
from paceline.core.errors import PacelineError
from paceline.core.machine import freeze_loaded_objects
from paceline.engine.build import (
    build_engine,
    calibrate,
    fit_models,
    pick_device,
    window_of,
)
from paceline.engine.engine import Engine
from paceline.engine.loop import EngineLoop
from paceline.kernels.cpu import native
from paceline.models.drafts.compatibility import fingerprint
from paceline.models.loading.checksums import quick_checksum
from paceline.models.loading.load import LoadedModel
from paceline.models.runners import make_runner
from paceline.runtime.deploy.worker_spec import WorkerSpec
from paceline.runtime.draft_pool.control import PoolControl
from paceline.runtime.draft_pool.proposer import PoolProposer
from paceline.runtime.draft_worker.model import load_draft_model
from paceline.runtime.draft_worker.model_core import ModelCore
from paceline.runtime.draft_worker.scheduler import DraftLimits
from paceline.runtime.draft_worker.worker import DraftWorker
from paceline.runtime.handoff.handoffs import Handoffs
from paceline.runtime.handoff.prefill_service import PrefillDesk
from paceline.runtime.json_log import log_as
from paceline.runtime.kv_events.publisher import KvPublisher
from paceline.runtime.target_worker.worker import TargetWorker
from paceline.runtime.transfer.channels.channel_pool import channels_for
from paceline.runtime.transfer.server import TransferServer
from paceline.runtime.weights.manager import WeightManager
from paceline.runtime.wire.keys import KEY_ROLE_OF, KeyFolder, Security
from paceline.runtime.wire.messages import TO_DRAFT_WORKER
from paceline.runtime.wire.stream_messages import TO_TARGET_WORKER
from paceline.runtime.wire.transport import Listener
from paceline.speculation.proposers.ngram import NgramProposer

logger = logging.getLogger(__name__)


class Worker(Protocol):
    """Either kind. The constructor listens; `run` serves until `stop`, which any thread may call."""

    @property
    def address(self) -> str: ...

    @property
    def weight_address(self) -> str:
        """Where it gives its weights to others; empty: nowhere."""
        ...

    def run(self) -> None: ...

    def stop(self) -> None: ...


def make_worker(spec: WorkerSpec) -> Worker:
    """Listens when the model can be used. Of a target, later layers may still be on their way: it says so."""
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
        native.set_num_threads(spec.threads)
    keys = None if spec.keys is None else KeyFolder(Path(spec.keys))
    security = None if keys is None else keys.server_security(KEY_ROLE_OF[spec.role])
    kinds = channels_for(spec.transfer)
    weights = WeightManager(spec.weights, None if keys is None else keys.peer_security(KEY_ROLE_OF[spec.role]), kinds)
    try:
        return _draft(spec, security, weights) if spec.role == "draft" else _target(spec, security, weights, kinds)
    except BaseException:
        weights.close()
        raise


def _target(
    spec: WorkerSpec, security: Security | None, weights: WeightManager, kinds: Sequence[str] | None
) -> TargetWorker:
    proposers: list[PoolProposer] = []

    def pool(target: LoadedModel) -> PoolProposer:
        vocabulary, size = fingerprint(target.tokenizer).vocabulary, target.config.vocab_size
        proposers.append(PoolProposer((), vocabulary, size, name=spec.name, fallback=NgramProposer()))
        return proposers[0]

    engine = build_engine(spec.engine, pool if spec.uses_drafts else None, weights.load)
    if (
        spec.role == "prefill" or spec.handoff_threshold is not None
    ):  # blocks of a model that was replaced must not be used
        engine.runner.identity = f"{quick_checksum(spec.engine.model)[:32]}/{spec.engine.quantization}"
    loop = EngineLoop(engine)
    own = None if security is None else security.own
    drafts = PoolControl(proposers[0], loop, own) if proposers else None
    listener = Listener(spec.address, TO_TARGET_WORKER, security)
    publisher = None
    if spec.publishes:
        host = listener.address.rpartition(":")[0]
        publisher = KvPublisher(f"{host}:0", f"{spec.name}@{secrets.token_hex(8)}", security)
    handoffs = None if spec.handoff_threshold is None else Handoffs(loop, own, spec.handoff_threshold, kinds)
    desk = None
    if spec.role == "prefill" or spec.gives:
        server = TransferServer(urlsplit(listener.address).hostname or "", security, kinds)
        desk = PrefillDesk(loop, server, computes=spec.role == "prefill")
    weights.start(lambda: loop.run(lambda: _warm_up(engine, spec.engine)), lambda: engine.has_work)
    tracing = None
    if spec.trace_endpoint is not None:
        from paceline.runtime.tracing.tracer import Tracing

        tracing = loop.tracer = Tracing.to(spec.trace_endpoint, spec.name)
    return TargetWorker(spec.name, loop, listener, drafts, publisher, weights, handoffs, desk, tracing)


def _warm_up(engine: Engine, config: EngineConfig) -> None:
    """All layers are there, and passes can be run for nobody."""
    engine.warm_up()
    calibrate(engine, config)


def _draft(spec: WorkerSpec, security: Security | None, weights: WeightManager) -> Worker:
    """Its cache is allocated here and now, for as many sequences as it will ever let in: targets that begin to speculate
    later find `Busy` where there is no room, never a worker that runs out of memory."""
    config = spec.engine
    device = pick_device(config.device)
    loaded, tables = load_draft_model(spec, device, weights)
    window = window_of(config, loaded.config)
    fit = fit_models(config, tables or loaded, loaded if tables else None, device, window)
    size = loaded.config.vocab_size
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else None
    core = ModelCore(make_runner(loaded.model, fit.num_blocks, kv_dtype), config.max_batched_tokens, size, size)
    core.warm_up(config.max_num_seqs, window)
    limits = DraftLimits(max_sequences=config.max_num_seqs, max_tokens=fit.kv_tokens)
    listener = Listener(spec.address, TO_DRAFT_WORKER, security)
    worker = DraftWorker(spec.name, core, listener, fingerprint(loaded.tokenizer).vocabulary, size, limits)
    weights.start(lambda: None, lambda: worker.status().sequences > 0)
    return _GivingWeights(worker, weights)


class _GivingWeights:
    """A draft worker beside the door where it gives its weights."""

    def __init__(self, worker: DraftWorker, weights: WeightManager) -> None:
        self._worker, self._weights = worker, weights

    @property
    def address(self) -> str:
        return self._worker.address

    @property
    def weight_address(self) -> str:
        return self._weights.address

    def run(self) -> None:
        try:
            self._worker.run()
        finally:
            self._weights.close()

    def stop(self) -> None:
        self._worker.stop()


def main(text: str) -> int:
    spec = WorkerSpec.from_json(text)
    log_as(spec.name)
    stopped = threading.Event()
    worker: list[Worker] = []

    def stop(*_: object) -> None:
        stopped.set()
        for one in worker:
            one.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=_until_left_alone, args=(stop,), daemon=True).start()
    try:
        logger.info("loading %s", spec.engine.model)
        worker.append(make_worker(spec))
        logger.info("listening on %s", worker[0].address)
        if stopped.is_set():
            worker[0].stop()
        freeze_loaded_objects()
        worker[0].run()
    except PacelineError as error:
        logger.error("%s", error)
        return 1
    logger.info("stopped")
    return 0


def _until_left_alone(stop: Callable[[], None]) -> None:
    """Whoever started us holds the other end of standard input: when it is gone, so are we."""
    while os.read(0, 4096):  # not sys.stdin: its lock, held here, would be in the way of ending
        pass
    stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
