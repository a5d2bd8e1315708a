"""Requests that gateways have submitted to a target worker: passes them to the engine, cancels them, and gives the tokens of
resumable streams."""

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace

from paceline.core.errors import GenerationFailed, InvalidRequest, PacelineError
from paceline.core.request import Request
from paceline.engine.loop import EngineLoop
from paceline.runtime.handoff.handoffs import Handoffs
from paceline.runtime.target_worker.gateways import GatewaySessions
from paceline.runtime.target_worker.grammar_thread import GrammarThread
from paceline.runtime.target_worker.jobs import GatewaySession, Submission
from paceline.runtime.target_worker.kept_streams import ResumableStreams
from paceline.runtime.wire.gateway_messages import Submit, TokensRequest, check_limits
from paceline.runtime.wire.target_messages import TokensReply
from paceline.runtime.wire.transport import Peer

logger = logging.getLogger(__name__)

EXPIRY_SECONDS = 1.0
"""Interval at which the tokens of resumable streams are checked for their age."""


class Submissions:
    """The thread that owns the worker's listener uses it."""

    def __init__(
        self, loop: EngineLoop, handoffs: Handoffs | None, gateways: GatewaySessions, wake: Callable[[], None]
    ) -> None:
        """`handoffs` is a client of prefill workers, which passes the requests to the engine. `wake` ends the wait of the
        thread that calls `poll`."""
        self._loop, self._handoffs, self._gateways = loop, handoffs, gateways
        self._requests: Handoffs | EngineLoop = handoffs or loop
        self._numbers = itertools.count()
        self._kept = ResumableStreams()
        self._next_expiry = 0.0
        self._grammars = GrammarThread(loop.engine.validator, wake)

    def submit(self, peer: Peer, gateway: GatewaySession, message: Submit) -> None:
        """Start a request that the worker accepts. A grammar is compiled first, on another thread."""
        request = replace(message.request, id=f"{next(self._numbers)}")
        job = gateway.jobs[message.attempt] = Submission(peer, message.attempt, request)
        if request.resume_key:
            job.kept = self._kept.keep(request, lambda: gateway.jobs.get(job.attempt) is job)
        if request.sampling.json_schema is None:
            self._start(gateway, job, request, message)
            return

        def start(error: PacelineError | None) -> None:
            if gateway.jobs.get(job.attempt) is not job:  # cancelled meanwhile
                return
            if error is None:
                self._start(gateway, job, request, message)
            else:
                del gateway.jobs[job.attempt]
                gateway.fail(job.attempt, error)

        self._grammars.compile(request, start)

    def _start(self, gateway: GatewaySession, job: Submission, request: Request, message: Submit) -> None:
        """Pass the request to the engine."""
        try:
            check_limits(request)
            if self._handoffs is None:
                self._loop.submit(request, self._gateways.listener_of(job))
            else:
                self._handoffs.submit(request, self._gateways.listener_of(job), message.peer)
        except PacelineError as error:
            gateway.jobs.pop(job.attempt, None)
            gateway.fail(message.attempt, error)
        except Exception as error:  # No request may end the worker for the remaining requests
            logger.exception("a request could not be started")
            gateway.jobs.pop(job.attempt, None)
            text = f"the request cannot be served ({type(error).__name__}): change its parameters"
            gateway.fail(message.attempt, InvalidRequest(text))

    def cancel(self, gateway: GatewaySession, attempt: int) -> None:
        """Stop a request. An unknown or finished one is not an error."""
        job = gateway.jobs.pop(attempt, None)
        if job is not None and self._loop.is_running:
            self._requests.cancel(job.request_id)

    def cancel_all(self, gateway: GatewaySession) -> None:
        for attempt in list(gateway.jobs):
            self.cancel(gateway, attempt)

    def reply_with_tokens(self, message: TokensRequest) -> TokensReply:
        """The tokens of a resumable stream. If it still runs, for a gateway that its client has left, it ends."""
        stream = self._kept.find(message.key)
        if stream is None:
            return TokensReply(message.number, None, [])
        for gateway in self._gateways.values():
            for attempt in [attempt for attempt, job in gateway.jobs.items() if job.kept is stream]:
                self.cancel(gateway, attempt)
                gateway.fail(attempt, GenerationFailed("its client has resumed it through another gateway"))
        return TokensReply(message.number, stream.seed, [list(tokens) for tokens in stream.choices])

    def poll(self, now: float) -> None:
        """Start the requests whose grammars are compiled, and drop the tokens of streams that ended long ago."""
        self._grammars.run_finished()
        if now >= self._next_expiry:
            self._next_expiry = now + EXPIRY_SECONDS
            self._kept.expire(now)

    def close(self) -> None:
        """Requests that wait for a grammar are dropped."""
        self._grammars.close()
