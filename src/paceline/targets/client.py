"""The gateway's interface to an engine: validates requests and submits them to target workers."""

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from paceline.core.cluster_config import ClusterConfig
from paceline.core.config import EngineConfig
from paceline.core.errors import EngineClosed
from paceline.core.output import OutputListener
from paceline.core.request import Request, SpeculationFlags, ValidatedRequest
from paceline.core.sequence import BLOCK_SIZE
from paceline.core.status import ClusterStatus, DraftStatus, EngineStatus, WeightsStatus
from paceline.model_files.tokenizer import Tokenizer, load_tokenizer
from paceline.requests import Limits, RequestValidator, SchemaChecker
from paceline.targets.pool import TargetPool
from paceline.targets.status import ReportHistory, merge_status
from paceline.wire.gateway_messages import ChangeWeights, SwapDraft, TokensReply, Welcome
from paceline.wire.keys import KeyPair
from paceline.wire.worker_spec import Directory

START_SECONDS = 600.0
CHECK_SECONDS = 0.1
"""Interval of `check_workers` while no worker is ready."""


class TargetClient:
    """The target workers of a cluster, or the engine process of `paceline serve`.

    Every method is thread-safe. No method but `close` blocks; `close` leaves the workers up.
    """

    def __init__(
        self,
        config: ClusterConfig,
        directory: Directory,
        own: KeyPair | None = None,
        *,
        engine: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        start_seconds: float = START_SECONDS,
        check_workers: Callable[[], None] = lambda: None,
        failure: Callable[[], str | None] = lambda: None,
        is_shared: bool = False,
    ) -> None:
        """Blocks until the first worker is ready, at most `start_seconds`. `engine` holds the settings of the workers. If it is
        None, those of the first target pool are used. If `tokenizer` is None, that of the model is read. `check_workers` raises
        if no worker will become ready. `failure` returns why the workers keep failing, if they do. `is_shared` says that the
        cluster has draft workers of other models, which are no part of this client's status."""
        self.config = engine or config.engines()[f"{config.targets[0].name}-0"]
        self.tokenizer = tokenizer or load_tokenizer(self.config.model)
        self.pool = TargetPool(config, directory, own)
        self._failure, self._is_shared = failure, is_shared
        self._history = ReportHistory()
        try:
            welcome = self._wait_ready(start_seconds, check_workers)
        except BaseException:
            self.pool.close()
            raise
        self._schemas = SchemaChecker(self.tokenizer.to_json, self.tokenizer.eos_ids, welcome.vocab_size)
        self._validator = RequestValidator(
            Limits(welcome.vocab_size, welcome.max_model_len, welcome.max_depth),
            self.config.speculation.verification,
            welcome.default_method,
            tuple(welcome.methods),
            self.tokenizer,
            self._schemas.check,
        )

    @property
    def is_running(self) -> bool:
        """False once the client is closed."""
        return self.pool.is_running

    @property
    def is_ready(self) -> bool:
        """Whether a request would start now. A running client may have no ready worker for a while."""
        return self.pool.is_running and any(target.takes_streams for target in self.pool.targets().values())

    @property
    def is_overloaded(self) -> bool:
        """Whether the memory of all workers that take streams is full."""
        targets = [target for target in self.pool.targets().values() if target.takes_streams]
        return bool(targets) and all(target.is_overloaded for target in targets)

    @property
    def failure(self) -> str | None:
        """The reason why requests will not be served without an operator. None if they are served, or may be soon."""
        if not self.is_running:
            return "the engine has stopped: restart the server"
        return None if self.is_ready else self._failure()

    @property
    def fingerprint(self) -> str:
        """Digest of what the texts of all usable targets depend on. Empty if they differ, or if one is not known."""
        return self.pool.fingerprint

    @property
    def max_model_len(self) -> int:
        return self._validator.limits.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once; further sequences wait."""
        return self.pool.max_num_seqs

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV caches of all workers hold. 0 before the first report of a worker."""
        return BLOCK_SIZE * sum(report.status.kv_total for report in self.pool.reports())

    @property
    def max_depth(self) -> int:
        """Most tokens drafted per round, before flags."""
        return self._validator.limits.max_depth

    @property
    def methods(self) -> tuple[str, ...]:
        """Speculation methods that a request or a flag may name."""
        return tuple(sorted(self._validator.methods))

    def validate(self, request: Request) -> ValidatedRequest:
        """The request with its seed, or `InvalidRequest`. Another process checks a JSON schema, which may take a while."""
        return self._validator.validate(request)

    def submit(self, request: ValidatedRequest, listener: OutputListener) -> None:
        """Start a request. `listener` receives the outputs, on the pool's thread. Raises `InvalidRequest` if the request is too
        large for a message, or its id is in use."""
        self.pool.submit(request, listener)

    def request_tokens(self, key: str) -> "Future[TokensReply | None]":
        """The tokens of a resumable stream of any gateway. None if no worker knows its key. The stream ends where it runs."""
        return self.pool.request_tokens(key)

    def cancel(self, request_id: str) -> None:
        """Stop a request; its listener receives nothing more. An unknown or finished request is not an error."""
        self.pool.cancel(request_id)

    def validate_flags(self, flags: SpeculationFlags) -> None:
        """Raise `InvalidRequest` if `set_flags` would."""
        self._validator.validate_flags(flags)

    def set_flags(self, flags: SpeculationFlags) -> None:
        """Apply the operator's flags to running and new requests."""
        self._validator.set_flags(flags)
        self.pool.set_flags(flags)

    def drafts(self) -> dict[str, DraftStatus]:
        """The draft inside the engine of each usable target that has one, by worker."""
        return {report.name: report.status.draft for report in self.pool.reports() if report.status.draft is not None}

    def swap_draft(self, draft: str, seconds: float, period: float) -> int:
        """Let every target with a draft of its own try another draft. Returns the number of the swap, which `drafts` reports.
        An empty `draft` ends the trials."""
        number = secrets.randbits(62)
        self.pool.swap_draft(SwapDraft(number, draft, seconds, period))
        return number

    def weights(self) -> dict[str, WeightsStatus | None]:
        """The last change of the weights of each usable target, by worker. None if there was none."""
        return {report.name: report.status.weights for report in self.pool.reports()}

    def change_weights(self, folder: str, peer: str, seconds: float) -> int:
        """Let every target use other weights, from a folder or a peer. Requests that run are finished first; those that are not
        after `seconds` end. Returns the number of the change, which `weights` reports."""
        number = secrets.randbits(62)
        self.pool.change_weights(ChangeWeights(number, folder, peer, seconds))
        return number

    def settle_weights(self, is_kept: bool) -> None:
        """The change is over. If it is kept, targets that join later or start again make it too."""
        self.pool.settle_weights(is_kept)

    def engine_status(self) -> EngineStatus:
        """Status of all target workers as one engine."""
        reports = self.pool.reports()
        return merge_status([report.status for report in reports], self._history.missing(reports))

    def cluster_status(self) -> ClusterStatus:
        """Status of every worker."""
        workers = [worker for worker in self.pool.workers() if not (self._is_shared and worker.refusal)]
        return ClusterStatus(tuple(workers), self.pool.num_continued)

    def close(self) -> None:
        """Cancel running requests and disconnect from the workers."""
        self.pool.close()
        self._schemas.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_ready(self, seconds: float, check_workers: Callable[[], None]) -> Welcome:
        deadline = time.monotonic() + seconds
        while (welcome := self.pool.wait_ready(CHECK_SECONDS)) is None:
            check_workers()
            if time.monotonic() > deadline:
                raise EngineClosed(
                    f"no target worker was ready within {seconds:.0f} s: run `paceline status` and read the workers' logs"
                )
        return welcome
