"""The target workers of a cluster as one target."""

from types import TracebackType
from typing import Self

from paceline.core.cluster_config import ClusterConfig
from paceline.core.config import EngineConfig
from paceline.core.errors import EngineClosed
from paceline.core.output import OutputListener
from paceline.core.request import Request, ValidatedRequest
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import ClusterStatus, EngineStatus
from paceline.engine.validator import Limits, RequestValidator
from paceline.models.tokenizer.load import load_tokenizer
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.runtime.deploy.directory import Directory
from paceline.runtime.gateway_client.merged_status import ReportHistory, merge_status
from paceline.runtime.gateway_client.target_pool import TargetPool
from paceline.runtime.wire.keys import KeyPair


class ClusterTarget:
    """A `TargetClient` that validates requests and submits them to a `TargetPool`. `close` leaves the workers up."""

    def __init__(
        self,
        config: ClusterConfig,
        directory: Directory,
        own: KeyPair | None = None,
        tokenizer: Tokenizer | None = None,
        start_seconds: float = 600.0,
    ) -> None:
        """Blocks until the first worker is ready, at most `start_seconds`. `tokenizer`: None reads the model's."""
        self.config: EngineConfig = config.engines()[f"{config.targets[0].name}-0"]
        self.tokenizer = tokenizer or load_tokenizer(self.config.model)
        self.pool = TargetPool(config, directory, own)
        self._history = ReportHistory()
        try:
            welcome = self.pool.wait_ready(start_seconds)
            if welcome is None:
                raise EngineClosed(
                    f"no target worker was ready within {start_seconds:.0f} s: run `paceline status` and read the workers' logs"
                )
        except BaseException:
            self.pool.close()
            raise
        self._validator = RequestValidator(
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
        return self.pool.is_running and any(target.takes_streams for target in self.pool.targets().values())

    @property
    def max_model_len(self) -> int:
        return self._validator.limits.max_model_len

    @property
    def max_num_seqs(self) -> int:
        return self.pool.max_num_seqs

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(sorted(self._validator.methods))

    def validate(self, request: Request) -> ValidatedRequest:
        return self._validator.validate(request)

    def submit(self, request: Request, listener: OutputListener) -> None:
        self.pool.submit(self._validator.validate(request), listener)

    def cancel(self, request_id: str) -> None:
        self.pool.cancel(request_id)

    def validate_flags(self, flags: SpeculationFlags) -> None:
        self._validator.validate_flags(flags)

    def set_flags(self, flags: SpeculationFlags) -> None:
        self._validator.set_flags(flags)
        self.pool.set_flags(flags)

    def engine_status(self) -> EngineStatus:
        reports = self.pool.reports()
        return merge_status([report.status for report in reports], self._history.missing(reports))

    def cluster_status(self) -> ClusterStatus:
        return ClusterStatus(tuple(self.pool.workers()), self.pool.num_continued)

    def close(self) -> None:
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
