"""A cluster of target workers, seen from a gateway as one model."""

from collections.abc import Sequence
from types import TracebackType

from paceline.core.cluster_config import ClusterConfig
from paceline.core.config import EngineConfig
from paceline.core.errors import EngineClosed
from paceline.core.request import Request
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import ClusterStatus, WorkerStatus
from paceline.engine.loop import Listener, Tracer
from paceline.engine.stats.snapshot import EngineSnapshot
from paceline.engine.validator import Intake, Limits
from paceline.models.loading.load import open_checkpoint
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.runtime.deploy.directory import Directory
from paceline.runtime.gateway_client.past_reports import PastReports
from paceline.runtime.gateway_client.target_pool import TargetPool
from paceline.runtime.target_worker.reports import merged_snapshot
from paceline.runtime.wire.keys import KeyPair


class ClusterLLM:
    """What `LLM` is to one engine: checks requests here, has them generated there. Closing it leaves the workers up."""

    def __init__(
        self,
        config: ClusterConfig,
        directory: Directory,
        own: KeyPair | None = None,
        tokenizer: Tokenizer | None = None,
        start_seconds: float = 600.0,
    ) -> None:
        """Blocks until the first worker is ready, `start_seconds` at the most. `tokenizer`: None reads the model's."""
        self.config: EngineConfig = config.engines()[f"{config.targets[0].name}-0"]
        self.tokenizer = tokenizer or open_checkpoint(self.config.model).read_tokenizer()
        self.pool = TargetPool(config, directory, own)
        self._past = PastReports()
        try:
            welcome = self.pool.wait_ready(start_seconds)
            if welcome is None:
                raise EngineClosed(
                    f"no target worker was ready within {start_seconds:.0f} s: `paceline status` and the workers' logs say more"
                )
        except BaseException:
            self.pool.close()
            raise
        self._intake = Intake(
            Limits(welcome.vocab_size, welcome.max_model_len),
            self.config.speculation,
            welcome.default_method,
            tuple(welcome.methods),
            self.tokenizer,
        )

    @property
    def is_running(self) -> bool:
        return self.pool.is_running

    @property
    def is_ready(self) -> bool:
        return self.pool.is_running and any(line.takes_streams for line in self.pool.lines().values())

    @property
    def max_model_len(self) -> int:
        return self._intake.limits.max_model_len

    @property
    def seats(self) -> int:
        return self.pool.seats

    def submit(self, request: Request, listener: Listener) -> None:
        self._intake.validate(request)
        self.pool.submit(request, listener)

    def cancel(self, request_id: str) -> None:
        self.pool.cancel(request_id)

    def validate(self, request: Request) -> None:
        self._intake.validate(request)

    def validate_flags(self, flags: SpeculationFlags) -> None:
        self._intake.validate_flags(flags)

    def set_flags(self, flags: SpeculationFlags) -> None:
        self._intake.validate_flags(flags)
        self._intake.flags = flags
        self.pool.set_flags(flags)

    def snapshot(self) -> EngineSnapshot:
        reports = self.pool.reports()
        return merged_snapshot(reports, self._past.besides(reports))

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(sorted(self._intake.methods))

    def trace(self, tracer: Tracer) -> None:
        """Nothing is followed here: the context travels with a request, and workers follow it themselves."""

    def workers(self) -> Sequence[WorkerStatus]:
        return self.pool.workers()

    def cluster_status(self) -> ClusterStatus:
        return ClusterStatus(tuple(self.pool.workers()), self.pool.continued)

    def close(self) -> None:
        self.pool.close()

    def __enter__(self) -> "ClusterLLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
