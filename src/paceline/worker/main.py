"""Makes a worker from its specification, and runs it as a process: `python -m paceline.worker.main SPEC`."""

import logging
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn, Protocol
from urllib.parse import urlsplit

import torch

from paceline.core.config import EngineConfig
from paceline.core.errors import PacelineError
from paceline.core.machine import PhaseReport, freeze_loaded_objects, reporting_to, usable_cores
from paceline.drafting import DraftLimits, DraftWorker, ModelDraftBackend, PoolControl, PoolProposer, load_draft_model
from paceline.engine import Engine, EngineLoop
from paceline.engine.sizing import calibrate, size_engine
from paceline.engine.start import build_engine, pick_device
from paceline.kernels.cpu import native
from paceline.model_files.tokenizer import fingerprint
from paceline.models import make_runner
from paceline.models.loading import LoadedModel, load_model
from paceline.models.parallel import load_parallel
from paceline.speculation.proposers import NgramProposer
from paceline.telemetry import log_as
from paceline.transfer import TransferServer, channels_for, device_memory
from paceline.transfer.weights import Activity, WeightManager
from paceline.wire.draft_messages import TO_DRAFT_WORKER
from paceline.wire.gateway_messages import TO_TARGET_WORKER
from paceline.wire.keys import KEY_ROLE_OF, KeyFolder, Security
from paceline.wire.kv_events import KvPublisher
from paceline.wire.transport import Listener, require_keys
from paceline.wire.worker_spec import WorkerAddresses, WorkerSpec, write_addresses, write_error
from paceline.worker.handoff import Handoffs, PrefillService
from paceline.worker.server import (
    AlternatingDraftTrial,
    DraftSwaps,
    EngineBackend,
    WeightsChanges,
    WorkerHung,
    WorkerOverload,
    WorkerServer,
    weights_loader,
)
from paceline.worker.upstream import make_upstream_worker

logger = logging.getLogger("paceline.worker.main")  # `__name__` is `__main__` here

DRAFT_SPIN_SECONDS = 0.001
"""How long threads of a draft worker wait for the next pass before they sleep: longer than the pauses between passes. A pass of
one sequence then takes 1.13 ms instead of 1.36 on eight cores of a GPU server."""

HANDS_OFF = (
    "this worker exchanges cache blocks with other workers, which may hold blocks of the weights in use: change weights in a "
    "cluster without prefill pools and shared caches, or use `paceline rollout`"
)


class _PoolBuilder:
    """Builds the proposer of a draft pool when the target is loaded, and keeps it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.proposer: PoolProposer | None = None

    def __call__(self, target: LoadedModel) -> PoolProposer:
        self.proposer = PoolProposer(
            (),
            fingerprint(target.tokenizer),
            target.config.vocab_size,
            name=self._name,
            fallback=NgramProposer(),
            verifies_trees=target.model.device.type == "cpu",
        )
        return self.proposer


def build_target_worker(
    spec: WorkerSpec, security: Security | None, weights: WeightManager, channels: Sequence[str] | None
) -> WorkerServer:
    """A target or prefill worker. Its later layers may still be loading; `weights` warms it up when they are there."""
    pool, draft_trial = _PoolBuilder(spec.name), AlternatingDraftTrial()
    engine = _build_engine(spec, weights, pool, draft_trial)
    tracing = None
    if spec.trace_endpoint is not None:
        from paceline.telemetry import Tracing

        tracing = Tracing.to(spec.trace_endpoint, spec.name)
    loop = EngineLoop(engine, tracing)
    if spec.weights is None:
        loop.run(engine.warm_up)
    engine.validator.prepare_grammars()
    own = None if security is None else security.own
    drafts = None if pool.proposer is None else PoolControl(pool.proposer, loop, own)
    listener = Listener(spec.address, TO_TARGET_WORKER, security)
    publisher = _publisher(spec, listener.address, security)
    handoffs = None if spec.handoff_threshold is None else Handoffs(loop, own, spec.handoff_threshold, channels)
    prefill_service = _prefill_service(spec, loop, engine, listener.address, security, channels)
    weights.start(
        lambda: loop.run(lambda: _warm_up(engine, spec.engine)), lambda: Activity(engine.has_work, engine.num_steps)
    )
    backend = EngineBackend(
        spec.name,
        loop,
        drafts=drafts,
        publisher=publisher,
        weights=weights,
        handoffs=handoffs,
        prefill_service=prefill_service,
        draft_swaps=DraftSwaps.of(draft_trial, loop, spec.engine),
        weights_changes=WeightsChanges(
            loop,
            weights_loader(spec.engine, loop, weights),
            weights,
            HANDS_OFF if handoffs is not None or prefill_service is not None else "",
        ),
        tracing=tracing,
    )
    overload = WorkerOverload(spec.engine.worker_memory_bytes)
    return WorkerServer(spec.name, listener, backend, overload=overload)


def _build_engine(
    spec: WorkerSpec, weights: WeightManager, pool: _PoolBuilder, draft_trial: AlternatingDraftTrial
) -> Engine:
    return build_engine(
        spec.engine,
        pool if spec.uses_drafts else None,
        load_model if spec.weights is None else weights.load,
        hooks=(draft_trial,),
        load_ranks=load_parallel if spec.weights is None else weights.load_ranks,
    )


def _publisher(spec: WorkerSpec, address: str, security: Security | None) -> KvPublisher | None:
    """Publishes KV cache events on a free port of the worker's host."""
    if not spec.publishes:
        return None
    host = address.rpartition(":")[0]
    return KvPublisher(f"{host}:0", f"{spec.name}@{secrets.token_hex(8)}", security)


def _prefill_service(
    spec: WorkerSpec,
    loop: EngineLoop,
    engine: Engine,
    address: str,
    security: Security | None,
    channels: Sequence[str] | None,
) -> PrefillService | None:
    """Sends KV blocks to target workers: of prompts that it computes, or of its cache."""
    if spec.role != "prefill" and not spec.shares_cache:
        return None
    server = TransferServer(urlsplit(address).hostname or "", security, channels)
    memory = device_memory(engine.runner.device, channels)
    return PrefillService(loop, server, computes=spec.role == "prefill", memory=memory)


def _warm_up(engine: Engine, config: EngineConfig) -> None:
    """Capture graphs and measure costs, once all layers are loaded."""
    engine.warm_up()
    calibrate(engine, config)


def build_draft_worker(spec: WorkerSpec, security: Security | None, weights: WeightManager) -> DraftWorker:
    """The whole cache is allocated here, for all sequences that the worker will accept. Further sequences get `Busy`, so it
    does not run out of memory later."""
    config = spec.engine
    device = pick_device(config.device)
    if device.type == "cpu":
        native.set_spin_seconds(DRAFT_SPIN_SECONDS)
    loaded, tables = load_draft_model(spec, device, weights)
    sizing = size_engine(config, tables or loaded, loaded if tables else None, device)
    logger.info("%s", sizing.description)
    limits, num_blocks = sizing.limits, sizing.memory.num_blocks
    size = loaded.config.vocab_size
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else None
    backend = ModelDraftBackend(make_runner(loaded.model, num_blocks, kv_dtype), limits.max_batched_tokens, size, size)
    backend.warm_up(limits.max_num_seqs, sizing.window)
    draft_limits = DraftLimits(max_sequences=limits.max_num_seqs, max_tokens=sizing.memory.kv_tokens)
    listener = Listener(spec.address, TO_DRAFT_WORKER, security)
    tokenizer = fingerprint(loaded.tokenizer)
    worker = DraftWorker(spec.name, backend, listener, tokenizer, size, draft_limits, weights=weights)

    def activity() -> Activity:
        status = worker.status()
        return Activity(status.sequences > 0, status.rounds)

    weights.start(lambda: None, activity)
    return worker


SWITCH_SECONDS = 0.0005
"""Longest wait of a thread for the interpreter lock. With the default of 5 ms, the first token of a request would wait until
the engine's thread has prepared its drafts, and a finished pass until a batch of requests is received."""


class Worker(Protocol):
    """A target or draft worker. The constructor binds its address; `run` serves until `stop`, which is thread-safe."""

    @property
    def address(self) -> str: ...

    @property
    def weight_address(self) -> str:
        """Address of its weight server. It is empty without a weight server."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether it loads or warms up."""
        ...

    def run(self) -> None: ...

    def stop(self) -> None: ...

    def drain(self, seconds: float) -> None:
        """Take no new work; `run` returns when the rest is done, at most `seconds` from now. It is thread-safe."""
        ...


def make_worker(spec: WorkerSpec) -> Worker:
    """Load the model and listen. The later layers of a target may still be loading; its heartbeat reports that."""
    if spec.upstream is not None:
        return make_upstream_worker(spec)
    torch.set_num_threads(spec.threads or min(torch.get_num_threads(), usable_cores()))
    if spec.threads is not None:
        native.set_num_threads(spec.threads)
    keys = None if spec.keys is None else KeyFolder(Path(spec.keys))
    security = None if keys is None else keys.server_security(KEY_ROLE_OF[spec.role])
    require_keys(spec.address, security)  # before the model is loaded
    channels = channels_for(spec.transfer)
    weights = WeightManager(
        spec.weights, None if keys is None else keys.peer_security(KEY_ROLE_OF[spec.role]), channels
    )
    try:
        if spec.role == "draft":
            return build_draft_worker(spec, security, weights)
        return build_target_worker(spec, security, weights, channels)
    except BaseException:
        weights.close()
        raise


class Process:
    """This process, as signals and its parent control it. SIGTERM and SIGINT drain the worker within `drain_seconds`, and a
    second signal stops it at once. The parent's lines on standard input are `drain SECONDS`; the end of the input stops it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._worker: Worker | None = None
        self._is_draining = False

    @property
    def worker(self) -> Worker | None:
        """The worker. None until it listens."""
        return self._worker

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def serve(self) -> None:
        """Load the model and run the worker until it has stopped or drained."""
        logger.info("loading %s", self._spec.engine.model)
        self._worker = make_worker(self._spec)
        logger.info("listening on %s", self._worker.address)
        if self._spec.address_file is not None:
            addresses = WorkerAddresses(self._worker.address, self._worker.weight_address)
            write_addresses(Path(self._spec.address_file), addresses)
        freeze_loaded_objects()
        sys.setswitchinterval(SWITCH_SECONDS)
        self._worker.run()

    def stop(self) -> None:
        if self._worker is None or self._worker.is_loading:
            _kill_group()  # loading and compiling cannot be interrupted, and hold nothing
        self._worker.stop()

    def drain(self, seconds: float) -> None:
        if self._worker is None or self._worker.is_loading or self._is_draining:
            self.stop()
        else:
            self._is_draining = True
            self._worker.drain(seconds)

    def handle_signal(self, *_: object) -> None:
        self.drain(self._spec.drain_seconds)

    def follow_parent(self) -> None:
        """Read the parent's commands until it is gone, then stop. Its private folder is removed."""
        text = b""
        while data := os.read(0, 4096):  # not sys.stdin: its lock would block the exit
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                self.drain(float(line.removeprefix(b"drain ")))
        if self._spec.error_file is not None:
            shutil.rmtree(Path(self._spec.error_file).parent, ignore_errors=True)
        self.stop()


def main(text: str) -> int:
    spec = WorkerSpec.from_json(text)
    log_as(spec.name, spec.log_level)
    process = Process(spec)
    with reporting_to(_write_report) if spec.reports_phases else nullcontext():
        return _run(process, spec)


def _write_report(report: PhaseReport) -> None:
    sys.stderr.write(report.to_json() + "\n")
    sys.stderr.flush()


def _run(process: Process, spec: WorkerSpec) -> int:
    """Serve until the worker has stopped. Returns the exit status."""
    signal.signal(signal.SIGTERM, process.handle_signal)
    signal.signal(signal.SIGINT, process.handle_signal)
    threading.Thread(target=process.follow_parent, daemon=True).start()
    try:
        process.serve()
    except Exception as error:
        if isinstance(error, WorkerHung):
            logger.critical("%s", error)
        if spec.error_file is not None:
            write_error(Path(spec.error_file), error)
        if isinstance(error, WorkerHung):  # the engine's thread would keep the process
            _kill_group()
        elif isinstance(error, PacelineError) and spec.error_file is None:  # otherwise the parent reports it
            logger.error("%s", error)
        if not isinstance(error, PacelineError):
            raise
        return 1
    logger.info("stopped")
    return 0


def _kill_group() -> NoReturn:
    """End this process at once, with the processes that it started if it leads their group."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
