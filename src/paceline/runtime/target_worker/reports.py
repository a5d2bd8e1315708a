"""The reports of a target worker to gateways: its welcome, heartbeats and status."""

from dataclasses import dataclass, replace

from paceline.cluster.health import StepProgress
from paceline.core.status.engine import Symptom
from paceline.engine.engine import Engine
from paceline.models.drafts.compatibility import fingerprint
from paceline.runtime.draft_pool.control import PoolControl
from paceline.runtime.handoff.handoffs import Handoffs
from paceline.runtime.handoff.prefill_service import PrefillService
from paceline.runtime.kv_events.publisher import KvPublisher
from paceline.runtime.target_worker.draft_swaps import DraftSwaps
from paceline.runtime.target_worker.jobs import GatewaySession
from paceline.runtime.weights.manager import WeightManager
from paceline.runtime.wire.messages import VERSION
from paceline.runtime.wire.target_messages import Heartbeat, StatusReport, Welcome


@dataclass(frozen=True, slots=True)
class WorkerReports:
    """Reads the parts of one worker. The thread of the worker calls it."""

    name: str
    epoch: int
    weights_id: str
    """Checksum of the weights and their formats."""
    engine: Engine
    drafts: PoolControl | None
    publisher: KvPublisher | None
    weights: WeightManager | None
    handoffs: Handoffs | PrefillService | None
    prefill_service: PrefillService | None
    draft_swaps: DraftSwaps | None

    def welcome(self) -> Welcome:
        engine, publisher = self.engine, self.publisher
        assert engine.tokenizer is not None
        limits = engine.validator.limits
        return Welcome(
            version=VERSION,
            epoch=self.epoch,
            name=self.name,
            vocabulary=fingerprint(engine.tokenizer).vocabulary,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=engine.scheduler.max_num_seqs,
            max_depth=limits.max_depth,
            methods=sorted(engine.speculator.proposers),
            default_method=engine.status.snapshot().flags.method or "",
            events_port=publisher.port if publisher else 0,
            replay_port=publisher.replay_port if publisher else 0,
            weights=self.weights_id,
            memory=None if self.prefill_service is None else self.prefill_service.cache_memory,
        )

    def heartbeat(self, nonce: int, gateway: GatewaySession, is_draining: bool) -> Heartbeat:
        snapshot, progress = self.engine.status.snapshot(), self.progress()
        return Heartbeat(
            nonce=nonce,
            epoch=self.epoch,
            steps=progress.steps,
            is_busy=progress.is_busy,
            running=snapshot.running,
            waiting=snapshot.waiting,
            kv_used=snapshot.kv_used,
            kv_total=snapshot.kv_total,
            prompt_tokens=self.engine.scheduler.num_prompt_tokens,
            loading=None if self.weights is None else self.weights.progress,
            step_seconds=progress.step_seconds,
            attempts=gateway.attempts,
            is_draining=is_draining,
        )

    def status(self, symptoms: tuple[Symptom, ...]) -> StatusReport:
        """`symptoms` are those that the worker itself has found."""
        snapshot, drafts = self.engine.status.snapshot(), self.drafts
        status = replace(
            snapshot,
            drafters=() if drafts is None else tuple(drafts.drafters()),
            symptoms=(*(() if drafts is None else drafts.symptoms()), *symptoms, *snapshot.audit.symptoms),
            handoffs=None if self.handoffs is None else self.handoffs.counts(),
            draft=None if self.draft_swaps is None else self.draft_swaps.status,
        )
        return StatusReport(self.epoch, self.name, status)

    def progress(self) -> StepProgress:
        """Of the engine's steps. A wait for a layer that is still loading is not a stall."""
        engine, is_loading = self.engine, self.weights is not None and self.weights.progress is not None
        return StepProgress(self.epoch, engine.num_steps, engine.has_work and not is_loading, engine.watch.step_seconds)
