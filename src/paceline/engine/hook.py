"""What listens to the steps of an engine."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from paceline.core.sequence import Sequence
    from paceline.engine.speculator import Speculator
    from paceline.engine.step.step import Schedule, StepResult
    from paceline.models.decoder import ForwardOutput
    from paceline.models.runner import ModelRunner
    from paceline.requests import Grammar
    from paceline.speculation.drafts import Draft

AfterLayer = Callable[[int], None]
"""Called with the index of a layer as soon as the pass has computed it."""


Hook = TypeVar("Hook", bound="StepHook")


class EngineParts(Protocol):
    """The parts of an engine that a hook may read."""

    @property
    def runner(self) -> "ModelRunner": ...

    @property
    def speculator(self) -> "Speculator": ...


class RunnerAndSpeculator(NamedTuple):
    """These parts of an engine, without the engine."""

    runner: "ModelRunner"
    speculator: "Speculator"


class StepHook:
    """Base class: every method does nothing. The engine calls them on its own thread, in the order of its hooks.

    What a hook receives belongs to the engine: it may read it during the call and must copy what it keeps.
    """

    needs_logits = False
    """Whether `SequenceResult.logits` is set for every verified sequence."""

    @property
    def needs_host_prefill(self) -> bool:
        """Whether the host executor has to compute prompts: the hook reads logits, hidden states or layers of their passes."""
        return self.needs_logits

    def attach(self, engine: EngineParts) -> None:
        """The parts that it may read are complete. It is called once, before any other method."""

    def sequence_added(self, sequence: "Sequence", grammar: "Grammar | None") -> None:
        """The sequence waits for its first step."""

    def before_step(self) -> None:
        """A step begins."""

    def scheduled(self, schedule: "Schedule") -> None:
        """The step will compute this schedule. Of a graph step it holds the prompts alone."""

    def hidden_layers(self, schedule: "Schedule") -> Collection[int]:
        """Layers whose hidden states the pass must return."""
        return ()

    def before_pass(self, schedule: "Schedule") -> AfterLayer | None:
        """The target's pass begins. Returns a function to call after each layer, or None."""
        return None

    def after_pass(self, schedule: "Schedule", drafts: "Mapping[int, Draft]", output: "ForwardOutput") -> None:
        """The host has launched the pass; nothing is committed yet."""

    def verified(self, result: "StepResult") -> None:
        """The step is verified and not committed yet. Steps of the host and of the graph executor arrive here."""

    def committed(self, result: "StepResult") -> None:
        """The step is committed and learned from; proposers are informed next."""

    def after_step(self) -> None:
        """The step is over."""

    def sequence_finished(self, sequence: "Sequence") -> None:
        """The sequence ended or was cancelled."""

    def weights_changed(self) -> None:
        """The target has other weights from the next step on. No sequence runs."""

    def request_cancelled(self, request_id: str) -> None:
        """The request was cancelled; `sequence_finished` was called for its unfinished sequences."""

    @property
    def has_idle_work(self) -> bool:
        """Whether `use_idle_time` has something to do."""
        return False

    def use_idle_time(self) -> None:
        """Do a few milliseconds of background work; the engine has no requests."""

    def close(self) -> None:
        """The engine generates no more."""


class StepHooks:
    """The hooks of one engine. An iteration uses the hooks as of its start, so `add` and `remove` are safe from any thread."""

    def __init__(self, hooks: Iterable[StepHook], engine: EngineParts) -> None:
        """Attaches the hooks to `engine`."""
        self._hooks = tuple(hooks)
        self._engine = engine
        for hook in self._hooks:
            hook.attach(engine)

    def __iter__(self) -> Iterator[StepHook]:
        return iter(self._hooks)

    def get(self, kind: type[Hook]) -> Hook:
        """The hook of this class. Raises LookupError if the engine has none."""
        for hook in self._hooks:
            if isinstance(hook, kind):
                return hook
        raise LookupError(kind.__name__)

    def add(self, hook: StepHook) -> None:
        self._hooks = (*self._hooks, hook)

    def remove(self, hook: StepHook) -> None:
        self._hooks = tuple(other for other in self._hooks if other is not hook)

    @contextmanager
    def listening(self, hook: StepHook) -> Iterator[None]:
        """Attach `hook` and call it for every step until the context ends."""
        hook.attach(self._engine)
        self.add(hook)
        try:
            yield
        finally:
            self.remove(hook)

    @property
    def has_idle_work(self) -> bool:
        """Whether `use_idle_time` has something to do."""
        return any(hook.has_idle_work for hook in self)

    def use_idle_time(self) -> None:
        """Do a few milliseconds of background work while there are no requests."""
        for hook in self:
            hook.use_idle_time()

    def finish_idle_work(self) -> None:
        """Do all background work now, so that none of it falls into a measurement."""
        while self.has_idle_work:
            self.use_idle_time()
