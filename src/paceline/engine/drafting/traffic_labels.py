"""The traffic class of every sequence, with a label while another draft is tried for its method."""

from collections.abc import Collection, Iterable, Mapping

from paceline.core.sequence import Sequence
from paceline.core.worker_status import TrafficStatus
from paceline.engine.stats import TrafficClasses, traffic_class
from paceline.speculation.depth.acceptance import PRIOR_ALPHA
from paceline.speculation.depth.policy import DepthPolicy
from paceline.speculation.proposer import Proposer


class TrafficLabels:
    """A draft on trial is learned in classes whose names end with a label. At the end of the trial they are discarded or
    adopted."""

    def __init__(self, proposers: Mapping[str, Proposer], traffic: TrafficClasses, depth: DepthPolicy) -> None:
        self._proposers, self._traffic, self._depth = proposers, traffic, depth
        self._labels: dict[str, str] = {}
        """Labels by method; empty or missing: none is tried."""

    def class_of(self, sequence: Sequence) -> str:
        """The traffic class of a sequence with the draft that is in use."""
        name = traffic_class(sequence) + self._labels.get(sequence.method, "")
        label = self._proposers[sequence.method].traits.label
        return name if label is None else name + label(sequence.id)

    def set(self, methods: Iterable[str], label: str) -> None:
        """Use the classes that end with `label` for sequences of these methods; empty: the classes of before."""
        self._labels.update(dict.fromkeys(methods, label))

    def forget(self, methods: Collection[str], label: str) -> None:
        """Discard what was learned under `label`."""
        for status in self._labelled(methods, label):
            self._restart(f"{status.method}/{status.category}", PRIOR_ALPHA)

    def adopt(self, methods: Collection[str], label: str) -> None:
        """Let what was learned under `label` hold for the classes without it."""
        for status in self._labelled(methods, label):
            if status.alphas:
                self._restart(f"{status.method}/{status.category.removesuffix(label)}", status.alphas[0])

    def _labelled(self, methods: Collection[str], label: str) -> list[TrafficStatus]:
        report = self._traffic.report()
        return [status for status in report if status.method in methods and status.category.endswith(label)]

    def _restart(self, category: str, alpha: float) -> None:
        self._traffic.restart(category)
        self._depth.restart(category, alpha)
