"""Speculation flags that change while an engine runs."""

from typing import Protocol

from paceline.core.sequence import Sequence
from paceline.core.speculation import SpeculationFlags
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.engine.validator import RequestValidator


class AssignedMethods(Protocol):
    """Chooses the method of requests that name none."""

    @property
    def default_method(self) -> str:
        """The method of a sequence that starts now."""
        ...

    def method_of(self, sequence: Sequence) -> str:
        """The method of a sequence under the present flags."""
        ...


class RunTimeFlags:
    """The engine's thread changes them; any thread may read or check them."""

    def __init__(
        self,
        validator: RequestValidator,
        scheduler: Scheduler,
        speculator: Speculator,
        assignment: AssignedMethods | None,
    ) -> None:
        """`assignment` is None if requests that name no method get the validator's default."""
        self._validator, self._scheduler, self._speculator = validator, scheduler, speculator
        self._assignment = assignment

    @property
    def effective(self) -> SpeculationFlags:
        """What holds for a request that names nothing."""
        return SpeculationFlags(self._speculator.enabled, self._offered_method, self._validator.offered_depth)

    def validate(self, flags: SpeculationFlags) -> None:
        """Raise `InvalidRequest` if `apply` would."""
        self._validator.validate_flags(flags)

    def apply(self, flags: SpeculationFlags) -> None:
        """Change how to speculate from the next step on. Running sequences continue under the new flags."""
        self._validator.set_flags(flags)
        self._speculator.set_enabled(flags.enabled)
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            method = self._method_of(sequence)
            if method != sequence.method:
                self._speculator.set_method(sequence, method)
        self._speculator.prepare_next(self._scheduler.running)

    def _method_of(self, sequence: Sequence) -> str:
        """The method of a sequence under the present flags."""
        if self._assignment is not None:
            return self._assignment.method_of(sequence)
        return self._validator.method(sequence.speculation)

    @property
    def _offered_method(self) -> str:
        """The method of a request that names none."""
        if self._assignment is None or self._validator.flags.method is not None:
            return self._validator.offered_method
        return self._assignment.default_method
