"""The loop of a learner: read samples, train, pass two gates, keep or refuse.

`decide_offline` is the offline gate: whether a candidate is better than the current draft on held-out samples. `has_shifted`
says whether traffic has changed since a training, by the tokens of its outputs. Both are pure. `plot_versions` draws alpha and
tokens per round over the versions of a learner.
"""

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, variance
from typing import Protocol

from paceline.core.errors import InvalidConfig, MissingDependency
from paceline.gateway.sessions import LearningSample, SampleBatch
from paceline.tools.learn.memory import SampleMemory
from paceline.tools.learn.server import ServerFailure, Trials
from paceline.tools.learn.versions import Activity, Lineage, TrialResult, VersionFolder
from paceline.tools.progress import Stopped, StopRequest, TrainingLog
from paceline.tools.train import FurtherTraining, LearnedDraft, Score


@dataclass(frozen=True, slots=True)
class OfflineLimits:
    margin: float = 0.01
    """Least gain in tokens per round, 0.01 for 1% more."""
    min_samples: int = 16
    errors: float = 1.645
    """Standard errors by which the gain must be above zero. 1.645 is 95% on one side."""


@dataclass(frozen=True, slots=True)
class OfflineDecision:
    is_better: bool
    gain: float | None
    """Relative gain in tokens per round. None if there are not enough samples."""
    reason: str


def decide_offline(
    current: Sequence[int], candidate: Sequence[int], limits: OfflineLimits | None = None
) -> OfflineDecision:
    """`current` and `candidate` are the rounds that each draft needs for the same held-out samples. Fewer rounds are better.

    The gain is the logarithm of the ratio of the two sums. Its error is that of paired samples, by the delta method.
    """
    limits = limits or OfflineLimits()
    pairs = [(old, new) for old, new in zip(current, candidate, strict=True) if old and new]
    count = len(pairs)
    if count < limits.min_samples:
        return OfflineDecision(False, None, f"{count} held-out samples, and {limits.min_samples} are needed")
    before, after = sum(old for old, _ in pairs), sum(new for _, new in pairs)
    gain = math.log(before / after)
    variance = count / (count - 1) * sum((old / before - new / after) ** 2 for old, new in pairs)
    error = math.sqrt(variance)
    relative = math.expm1(gain)
    text = f"{relative:+.1%} tokens per round on {count} held-out samples (standard error {error:.1%})"
    if gain - limits.errors * error <= 0.0:
        return OfflineDecision(False, relative, f"{text}: not certain to be better")
    if relative < limits.margin:
        return OfflineDecision(False, relative, f"{text}: less than the margin of {limits.margin:.1%}")
    return OfflineDecision(True, relative, text)


@dataclass(frozen=True, slots=True)
class ShiftLimits:
    min_samples: int = 8
    """Samples of each side that a test needs."""
    errors: float = 3.0
    """Standard errors by which the novelty of new samples must differ."""
    min_growth: float = 0.1
    """Least difference of novelty, as a share of tokens: many samples make any difference certain."""


def has_shifted(older: Sequence[LearningSample], newer: Sequence[LearningSample], limits: ShiftLimits) -> bool:
    """Whether outputs of `newer` are clearly more novel than those of `older` are to each other. The novelty of an output is
    the share of its tokens that no other output of `older` has."""
    holders = Counter[int]()
    for sample in older:
        holders.update(set(sample.output))
    usual = [_share(sample, holders, 1) for sample in older if sample.output]
    found = [_share(sample, holders, 0) for sample in newer if sample.output]
    if min(len(usual), len(found)) < max(2, limits.min_samples):
        return False
    growth = fmean(found) - fmean(usual)
    error = math.sqrt(variance(usual) / len(usual) + variance(found) / len(found))
    return growth > max(limits.min_growth, limits.errors * error)


def _share(sample: LearningSample, holders: Counter[int], most: int) -> float:
    """Share of the output's tokens that at most `most` samples have."""
    return sum(holders[token] <= most for token in sample.output) / len(sample.output)


PLOT = "learning.png"
COLOURS = {"kept": "#2a7f3f", "refused": "#b03030", "candidate": "#777777"}


def plot_versions(lineages: Sequence[Lineage], path: Path) -> None:
    """Every version has two marks: its parent on the same held-out samples, and itself."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise MissingDependency("matplotlib", "plotting", "bench") from None
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    pairs = (
        ("Alpha of the first draft", "alpha_before", "alpha_after"),
        ("Tokens per round, chain", "tokens_per_round_before", "tokens_per_round_after"),
    )
    for axis, (title, before, after) in zip(axes, pairs, strict=True):
        numbers = [lineage.version for lineage in lineages]
        axis.plot(
            numbers,
            [getattr(lineage, before) for lineage in lineages],
            "o",
            mfc="none",
            color="#777777",
            label="parent",
        )
        for status, colour in COLOURS.items():
            chosen = [lineage for lineage in lineages if lineage.status == status]
            if chosen:
                axis.plot(
                    [lineage.version for lineage in chosen],
                    [getattr(lineage, after) for lineage in chosen],
                    "o",
                    color=colour,
                    label=status,
                )
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("version")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


MAX_BACKOFF = 8
"""Largest factor on `new_tokens` after refusals in a row."""
MAX_COMPARED = 256
"""Newest samples that are compared with those of a refused training."""
TRIAL_POLL = 1.0
"""Seconds between two looks at a trial."""


class Samples(Protocol):
    def samples(self, after: int) -> SampleBatch:
        """Raises `ServerFailure`."""
        ...


@dataclass(frozen=True, slots=True)
class LearnerLimits:
    new_tokens: int = 16_384
    """Tokens of new samples that start a training. The number doubles with each refusal in a row."""
    min_held_out: int = 16
    margin: float = 0.01


class Learner:
    """One `tick` reads samples, and trains and offers a version if there are enough new samples."""

    def __init__(
        self,
        folder: VersionFolder,
        samples: Samples,
        trials: Trials,
        training: FurtherTraining,
        memory: SampleMemory,
        limits: LearnerLimits,
        progress: TrainingLog,
        sleep: Callable[[float], None],
        stop: StopRequest,
        plot: Callable[[Sequence[Lineage], Path], None] = plot_versions,
    ) -> None:
        """`sleep` pauses for some seconds. It may return early if `stop` was requested."""
        self._folder, self._samples, self._trials, self._training = folder, samples, trials, training
        self._memory, self._limits, self._progress = memory, limits, progress
        self._sleep, self._stop, self._plot_versions = sleep, stop, plot
        self._epoch, self._last = "", 0
        self._offered: int | None = None
        """Version that the server was last seen with. None if it is not known yet."""
        self._refusals = 0
        self._refused: Sequence[LearningSample] = ()
        """Samples of the last training."""
        self._newest = deque[LearningSample](maxlen=MAX_COMPARED)
        """Samples since that training."""
        self._failure = ""

    @property
    def tokens_wanted(self) -> int:
        """New tokens that start the next training."""
        return self._limits.new_tokens * min(MAX_BACKOFF, 2**self._refusals)

    def tick(self) -> None:
        """Errors of the server are reported once and tried again in the next tick."""
        if self._folder.state().is_paused:
            self._note("paused")
            return
        try:
            self._read_samples()
            self._restore()
            if self._is_due():
                self._learn()
            else:
                self._note("waiting for samples")
            self._failure = ""
        except ServerFailure as error:
            if not error.is_temporary:
                raise
            if str(error) != self._failure:
                self._progress.note(f"{error}; trying again")
            self._failure = str(error)
            self._note(self._failure)

    def _is_due(self) -> bool:
        new, least = self._memory.new_tokens, self._limits.new_tokens
        if len(self._memory.held_out()) < self._limits.min_held_out or new < least:
            return False
        if new < self.tokens_wanted and has_shifted(self._refused, self._newest, ShiftLimits()):
            self._progress.note("the traffic has changed: the next training does not wait for more samples")
            self._refusals = 0
        return new >= self.tokens_wanted

    def _read_samples(self) -> None:
        while not self._stop():
            with self._stop.interruptible():
                batch = self._samples.samples(self._last)
            if batch.epoch != self._epoch:
                self._epoch, is_first = batch.epoch, not self._epoch
                if self._last and not is_first:  # the gateway restarted: its numbers start again
                    self._last = 0
                    continue
            self._last = batch.last
            if not batch.samples:
                return
            self._memory.add(batch.samples)
            self._newest.extend(batch.samples)

    def _restore(self) -> None:
        """Returns the server to the current version if it uses another draft: after a restart of the server, and after
        `paceline learn rollback`. Raises `InvalidConfig` if the server uses a draft that is none of this folder."""
        current = self._folder.current()
        if self._offered == current:
            return
        in_use = self._trials.in_use()
        found = self._folder.find(in_use)
        if found is None and current == 0:
            raise InvalidConfig(
                f"the server drafts with {in_use}, not with {self._folder.draft(0)}: give --draft {in_use} and a new folder"
            )
        if found and found in self._folder.candidates():  # its trial ended while no learner ran
            self._folder.change(found, status="kept", note="kept by the server while no learner ran")
            current = found
        if found == current:
            self._offered = current
            return
        draft = self._folder.draft(current)
        self._progress.note(f"the server drafts with {in_use}: it changes to {draft}")
        verdict = self._trial(draft, is_tried=False)  # it was, before it became the current version
        if verdict is None:
            return
        self._offered = current
        if current:
            status = "kept" if verdict.is_passed else "refused"
            self._folder.change(current, online=verdict, status=status)
        if not verdict.is_passed:
            self._progress.note(f"the server keeps {in_use}: {verdict.reason}")

    def _learn(self) -> None:
        folder, memory = self._folder, self._memory
        samples, held_out = memory.training(), memory.held_out()
        number, parent = folder.next_version(), folder.current()
        self._note(f"training version {number}")
        self._progress.begin(f"training version {number}")
        with folder.new_version(number) as part:
            candidate = self._training.run(folder.draft(parent), samples, held_out, part, self._stop)
            if candidate is None:
                return
            memory.forget_new()
            self._refused = samples
            self._newest.clear()
            offline = decide_offline(
                [score.rounds for score in candidate.before],
                [score.rounds for score in candidate.after],
                OfflineLimits(self._limits.margin, self._limits.min_held_out),
            )
            verdict = TrialResult(offline.is_better, offline.gain, offline.reason)
            folder.add(_lineage(number, parent, len(samples), len(held_out), candidate, verdict))
        if not offline.is_better:
            is_promising = offline.gain is not None and offline.gain >= self._limits.margin
            self._refuse(number, None, offline.reason, is_promising)
            return
        self._progress.note(f"version {number}: {offline.reason}; offering it")
        self._note(f"trying version {number}")
        online = self._trial(folder.draft(number))
        if online is None:
            self._refuse(number, None, "the trial was interrupted")
            return
        if not online.is_passed:
            self._refuse(number, online, online.reason)
            return
        folder.change(number, status="kept", online=online)
        self._offered, self._refusals = number, 0
        self._progress.note(f"version {number} is kept: {online.reason}")
        self._plot()

    def _refuse(self, number: int, online: TrialResult | None, reason: str, is_promising: bool = False) -> None:
        """`is_promising` says that more samples may prove its gain, so that the next training does not wait longer."""
        self._refusals += not is_promising
        self._folder.change(number, status="refused", online=online, note=reason if online is None else "")
        self._folder.remove_weights(number)
        self._progress.note(f"version {number} is refused: {reason}")
        self._plot()

    def _trial(self, draft: Path, is_tried: bool = True) -> TrialResult | None:
        def wait() -> bool:
            self._sleep(TRIAL_POLL)
            return not self._stop()

        try:
            return self._trials.run(draft, wait, lambda text: self._progress.show(0.0, text), is_tried)
        except ServerFailure as error:
            if error.is_temporary:
                return TrialResult(False, None, str(error))
            raise
        except Stopped:
            return None

    def _plot(self) -> None:
        try:
            self._plot_versions(self._folder.lineages(), self._folder.path / PLOT)
        except MissingDependency:
            return

    def _note(self, doing: str) -> None:
        memory = self._memory
        activity = Activity(os.getpid(), _now(), doing, memory.num_seen, memory.new_tokens, self.tokens_wanted)
        self._folder.write_activity(activity)


def _lineage(
    number: int, parent: int, samples: int, held_out: int, candidate: LearnedDraft, offline: TrialResult
) -> Lineage:
    before, after = _total(candidate.before), _total(candidate.after)
    return Lineage(
        number,
        parent,
        _now(),
        samples,
        candidate.tokens,
        held_out,
        round(candidate.seconds, 1),
        round(next(iter(before.alphas), 0.0), 4),
        round(next(iter(after.alphas), 0.0), 4),
        round(before.tokens_per_round, 4),
        round(after.tokens_per_round, 4),
        offline=offline,
    )


def _total(scores: Sequence[Score]) -> Score:
    return sum(scores, Score())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
