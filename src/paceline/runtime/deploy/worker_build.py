"""Builds target and draft workers from their specifications."""

import logging
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

import torch

from paceline.core.config import EngineConfig
from paceline.core.errors import PacelineError
from paceline.engine.build import build_engine, calibrate, pick_device
from paceline.engine.engine import Engine
from paceline.engine.loop import EngineLoop
from paceline.engine.sizing.sizing import size_engine
from paceline.kernels.cpu import native
from paceline.models.drafts.compatibility import fingerprint
from paceline.models.loading.checksums import quick_checksum
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.parallel.runner import load_parallel
from paceline.models.runners import make_runner
from paceline.runtime.deploy.worker_spec import WorkerSpec
from paceline.runtime.draft_pool.control import PoolControl
from paceline.runtime.draft_pool.proposer import PoolProposer
from paceline.runtime.draft_worker.model import load_draft_model
from paceline.runtime.draft_worker.model_core import ModelDraftBackend
from paceline.runtime.draft_worker.scheduler import DraftLimits
from paceline.runtime.draft_worker.worker import DraftWorker
from paceline.runtime.handoff.handoffs import Handoffs
from paceline.runtime.handoff.prefill_service import PrefillService
from paceline.runtime.kv_events.publisher import KvPublisher
from paceline.runtime.target_worker.draft_swaps import DraftSwaps
from paceline.runtime.target_worker.draft_switchback import AlternatingDraftTrial
from paceline.runtime.target_worker.worker import TargetWorker
from paceline.runtime.transfer.device_memory import device_memory
from paceline.runtime.transfer.server import TransferServer
from paceline.runtime.weights.manager import WeightManager
from paceline.runtime.weights.send_rate import Activity
from paceline.runtime.wire.gateway_messages import TO_TARGET_WORKER
from paceline.runtime.wire.keys import Security
from paceline.runtime.wire.messages import TO_DRAFT_WORKER
from paceline.runtime.wire.transport import Listener
from paceline.speculation.proposers.ngram import NgramProposer

logger = logging.getLogger(__name__)
DRAFT_SPIN_SECONDS = 0.001
"""How long threads of a draft worker wait for the next pass before they sleep: longer than the pauses between passes. A pass of
one sequence then takes 1.13 ms instead of 1.36 on eight cores of a GPU server."""


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
) -> TargetWorker:
    """A target or prefill worker. Its later layers may still be loading; `weights` warms it up when they are there."""
    pool, draft_trial = _PoolBuilder(spec.name), AlternatingDraftTrial()
    engine = _build_engine(spec, weights, pool, draft_trial)
    tracing = None
    if spec.trace_endpoint is not None:
        from paceline.runtime.tracing import Tracing

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
    return TargetWorker(
        spec.name, loop, listener, drafts, publisher, weights, handoffs, prefill_service, tracing,
        weights_id=_weights_id(spec.engine), draft_swaps=DraftSwaps.of(draft_trial, loop, spec.engine),
    )  # fmt: skip


def _build_engine(
    spec: WorkerSpec, weights: WeightManager, pool: _PoolBuilder, draft_trial: AlternatingDraftTrial
) -> Engine:
    weights_id = ""
    if spec.role == "prefill" or spec.handoff_threshold is not None:  # blocks of another checkpoint must not be used
        weights_id = f"{quick_checksum(spec.engine.model)[:32]}/{spec.engine.quantization}/{spec.engine.activations}"
    return build_engine(
        spec.engine,
        pool if spec.uses_drafts else None,
        load_model if spec.weights is None else weights.load,
        hooks=(draft_trial,),
        weights_id=weights_id,
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


def _weights_id(config: EngineConfig) -> str:
    """Checksum of the weights, and the formats that decide the text. Empty on a machine without the model's files."""
    try:
        checksum = quick_checksum(config.model)[:32]
    except PacelineError:
        return ""
    return f"{checksum}/{config.dtype}/{config.quantization}/{config.activations}/{config.kv_dtype}"


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
