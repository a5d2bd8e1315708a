"""The traffic class of every sequence, which is another one while a draft on trial drafts for it."""

from collections.abc import Collection, Iterable, Mapping

from paceline.core.sequence import Sequence
from paceline.core.traffic import TrafficClass
from paceline.engine.stats import TrafficStatistics
from paceline.speculation.depth.acceptance import PRIOR_ALPHA
from paceline.speculation.proposer import Proposer


class TrialTraffic:
    """A draft on trial is learned in classes of its own. At the end of the trial they are discarded or adopted."""

    def __init__(self, proposers: Mapping[str, Proposer], traffic: TrafficStatistics) -> None:
        self._proposers, self._traffic = proposers, traffic
        self._on_trial: set[str] = set()
        """Methods all of whose sequences use the draft on trial now."""

    def class_of(self, sequence: Sequence) -> TrafficClass:
        """The traffic class of a sequence with the draft that is in use."""
        method = sequence.method
        traffic = TrafficClass(method, sequence.category, method in self._on_trial)
        refine = self._proposers[method].traits.traffic_class
        return traffic if refine is None else refine(traffic, sequence.id)

    def set(self, methods: Iterable[str], on_trial: bool) -> None:
        """Say whether all sequences of these methods use the draft on trial from now on."""
        if on_trial:
            self._on_trial.update(methods)
        else:
            self._on_trial.difference_update(methods)

    def forget(self, methods: Collection[str]) -> dict[TrafficClass, float]:
        """Discard what was learned on trial. Returns the classes to restart, with the new acceptance of each."""
        return {traffic: PRIOR_ALPHA for traffic, _ in self._alphas(methods)}

    def adopt(self, methods: Collection[str]) -> dict[TrafficClass, float]:
        """Let what was learned on trial hold for the draft in use. Returns the same as `forget`."""
        alphas = self._alphas(methods)
        return {traffic._replace(on_trial=False): alpha for traffic, alpha in alphas if alpha is not None}

    def _alphas(self, methods: Collection[str]) -> list[tuple[TrafficClass, float | None]]:
        """The classes on trial with the recent acceptance of their first drafts."""
        alphas = self._traffic.first_alphas()
        return [(traffic, alpha) for traffic, alpha in alphas.items() if traffic.on_trial and traffic.method in methods]
