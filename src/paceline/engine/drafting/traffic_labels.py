"""The traffic class of every sequence, with a label while another draft is tried for its method."""

from collections.abc import Collection, Iterable, Mapping

from paceline.core.sequence import Sequence
from paceline.core.status.engine import TrafficStatus
from paceline.engine.stats import TrafficClasses, traffic_class
from paceline.speculation.depth.acceptance import PRIOR_ALPHA
from paceline.speculation.proposer import Proposer


class TrafficLabels:
    """A draft on trial is learned in classes whose names end with a label. At the end of the trial they are discarded or
    adopted."""

    def __init__(self, proposers: Mapping[str, Proposer], traffic: TrafficClasses) -> None:
        self._proposers, self._traffic = proposers, traffic
        self._labels: dict[str, str] = {}
        """Labels by method; empty or missing: none is tried."""

    def class_of(self, sequence: Sequence) -> str:
        """The traffic class of a sequence with the draft that is in use."""
        name = traffic_class(sequence) + self._labels.get(sequence.method, "")
        label = self._proposers[sequence.method].traits.label
        return name if label is None else name + label(sequence.id)

    def set(self, methods: Iterable[str], label: str) -> None:
        """Use the classes that end with `label` for sequences of these methods. With an empty label, use the classes of
        before."""
        self._labels.update(dict.fromkeys(methods, label))

    def forget(self, methods: Collection[str], label: str) -> dict[str, float]:
        """Discard what was learned under `label`. Returns the classes to restart, with the new acceptance of each."""
        return {f"{status.method}/{status.category}": PRIOR_ALPHA for status in self._labelled(methods, label)}

    def adopt(self, methods: Collection[str], label: str) -> dict[str, float]:
        """Let what was learned under `label` hold for the classes without it. Returns the same as `forget`."""
        return {
            f"{status.method}/{status.category.removesuffix(label)}": status.alphas[0]
            for status in self._labelled(methods, label)
            if status.alphas
        }

    def _labelled(self, methods: Collection[str], label: str) -> list[TrafficStatus]:
        report = self._traffic.report()
        return [status for status in report if status.method in methods and status.category.endswith(label)]
