"""One request as its gateway knows it: the token ids that were committed, wherever that was."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline.cluster.routing.peer_hints import PeerHint
from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.runtime.wire.request import from_output
from paceline.runtime.wire.stream_messages import Output

Event = StepOutput | PacelineError
StreamListener = Callable[[Event], None]


class Gap(Exception):
    """An output does not begin where the last one ended: something was lost on the way."""


@dataclass(slots=True)
class _Choice:
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


class Stream:
    """Collects a request's outputs and says how to go on from them."""

    def __init__(self, request: Request, listener: StreamListener, pinned: str | None = None) -> None:
        """`request` has a seed. `pinned` names the one worker that may serve it."""
        assert request.sampling.seed is not None
        self.request = request
        self.listener = listener
        self.pinned = pinned
        self.worker: str | None = None
        """Who generates for it now."""
        self.peer: PeerHint | None = None
        """Who else has its prompt cached."""
        self.attempt = 0
        self.heard = 0
        """The last attempt that anything came of."""
        self.moves = 0
        """Workers it has lost since it last got further."""
        self._choices = [_Choice() for _ in range(request.sampling.n)]
        self._num_cached: int | None = None

    @property
    def is_finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    @property
    def num_unfinished(self) -> int:
        return sum(not choice.finished for choice in self._choices)

    def take(self, output: Output) -> StepOutput:
        """What `output` adds, for the listener. Raises `Gap` if it cannot be what follows."""
        if output.choice >= len(self._choices):
            raise Gap(f"there is no choice {output.choice}")
        choice = self._choices[output.choice]
        if choice.finished or output.start != len(choice.tokens):
            raise Gap(f"choice {output.choice} has {len(choice.tokens)} tokens, the output begins at {output.start}")
        try:
            step = from_output(output, self.request.id)
        except ValueError as error:
            raise Gap(str(error)) from None
        self.moves = 0
        choice.tokens.extend(step.tokens)
        choice.finished = step.finish_reason is not None
        if self._num_cached is None:  # on the second worker it would count what the first had generated
            self._num_cached = step.num_cached
        return replace(step, num_cached=self._num_cached)

    def rest(self) -> Request:
        """The request as another worker has to be asked: from the committed ids on."""
        if not any(choice.tokens or choice.finished for choice in self._choices):
            return self.request
        committed = tuple(None if choice.finished else tuple(choice.tokens) for choice in self._choices)
        return replace(self.request, committed=committed)
