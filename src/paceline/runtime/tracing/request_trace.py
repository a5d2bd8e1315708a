"""The spans of one request in the engine's process.

generate
  queue            until the first scheduled step
  prompt           until the first token
  round            one draft-and-verify round of one choice, or a plain step
    draft            time of drafting, for the whole batch of the step
    verify           time of the target's pass, for the whole batch
"""

import time

from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request


class RequestTrace:
    """Call `add` for every output, then `end` once, on one thread."""

    def __init__(self, tracer: Tracer, context: Context, request: Request, clock: Clock) -> None:
        self._tracer, self._clock = tracer, clock
        self._submitted = clock.now()
        # Spans have wall-clock times; steps have times of the engine's clock
        self._offset = time.time_ns() - int(1e9 * self._submitted)
        attributes: dict[str, str | int] = {
            "paceline.category": request.category,
            "paceline.prompt_tokens": len(request.prompt_ids),
            "paceline.choices": len(request.unfinished),
            "paceline.continued": bool(request.committed),
        }
        self._span = tracer.start_span("generate", context, attributes=attributes, start_time=self._at(self._submitted))
        self._context = set_span_in_context(self._span)
        self._started: set[int] = set()
        self._tokens = self._drafted = self._accepted = 0

    def add(self, output: StepOutput) -> None:
        now, times = self._clock.now(), output.times
        self._tokens += len(output.tokens)
        if output.choice not in self._started:
            self._started.add(output.choice)
            scheduled = self._submitted + output.waited
            self._child("queue", self._submitted, scheduled, {"paceline.choice": output.choice})
            attributes = {"paceline.choice": output.choice, "paceline.cached_tokens": output.num_cached}
            self._child("prompt", scheduled, now, attributes)
        elif times is not None:
            self._drafted += output.drafted
            self._accepted += output.accepted
            self._round(output, times.began, times.drafted, times.verified, now)
        if output.finish_reason is not None:
            reason = output.finish_reason.value
            self._span.add_event(
                "finished",
                {"paceline.choice": output.choice, "paceline.finish_reason": reason},
                self._at(now),
            )

    def end(self, error: PacelineError | None = None) -> None:
        self._span.set_attributes(
            {
                "paceline.output_tokens": self._tokens,
                "paceline.drafted": self._drafted,
                "paceline.accepted": self._accepted,
            }
        )
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self._span.end(self._at(self._clock.now()))

    def _round(self, output: StepOutput, began: float, drafted: float, verified: float, now: float) -> None:
        attributes: dict[str, str | int] = {
            "paceline.choice": output.choice,
            "paceline.method": output.method if output.drafted else "plain",
            "paceline.depth": output.drafted,
            "paceline.accepted": output.accepted,
            "paceline.tokens": len(output.tokens),
        }
        span = self._tracer.start_span("round", self._context, attributes=attributes, start_time=self._at(began))
        inside = set_span_in_context(span)
        if output.drafted:
            self._tracer.start_span("draft", inside, start_time=self._at(began)).end(self._at(drafted))
        self._tracer.start_span("verify", inside, start_time=self._at(drafted)).end(self._at(verified))
        span.end(self._at(now))

    def _child(self, name: str, start: float, end: float, attributes: dict[str, int]) -> None:
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=self._at(start))
        span.end(self._at(end))

    def _at(self, seconds: float) -> int:
        return self._offset + int(1e9 * seconds)
