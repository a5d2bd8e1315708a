"""Samples, a server and a training without models."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.gateway.sessions.samples import LearningSample, SampleRing
from paceline.tools.learn.server import ServerFailure
from paceline.tools.learn.versions import TrialResult
from paceline.tools.progress.progress import StopRequest
from paceline.tools.train.evaluate import Score
from paceline.tools.train.further import LearnedDraft


def sample(number: int = 1, prompt: int = 8, output: int = 12, tenant: str = "a", vocab: int = 256) -> LearningSample:
    draw = random.Random(number)
    ids = [draw.randrange(vocab) for _ in range(prompt + output)]
    return LearningSample(number, tuple(ids[:prompt]), tuple(ids[prompt:]), (), 0, output, tenant, "chat")


def add_samples(ring: SampleRing, count: int, first: int = 1) -> None:
    for number in range(first, first + count):
        one = sample(number)
        ring.add(one.prompt, one.output, (), 0, len(one.output), one.tenant, one.category)


@dataclass
class FakeServer:
    """Implements `Samples` and `Trials`. `verdicts` are those of the next trials."""

    draft: str
    ring: SampleRing = field(default_factory=lambda: SampleRing(1000, 100_000))
    verdicts: list[TrialResult | None] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    is_down: bool = False

    def samples(self, after: int):  # type: ignore[no-untyped-def]
        self._check()
        return self.ring.after(after)

    def in_use(self) -> str:
        self._check()
        return self.draft

    def run(
        self, draft: Path, wait: Callable[[], bool], report: Callable[[str], None], is_tried: bool = True
    ) -> TrialResult | None:
        self._check()
        if not is_tried:
            self.draft = str(draft)
            return TrialResult(True, None, "used at once")
        self.tried.append(str(draft))
        report("loading")
        if not wait():
            return None
        verdict = self.verdicts.pop(0)
        if verdict is not None and verdict.is_passed:
            self.draft = str(draft)
        return verdict

    def _check(self) -> None:
        if self.is_down:
            raise ServerFailure("connection refused", is_temporary=True)


@dataclass
class FakeTraining:
    """Implements `FurtherTraining`: writes a file, and needs `rounds` rounds for every held-out sample."""

    rounds: list[int] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    is_uneven: bool = False
    """Only the first held-out sample takes these rounds, the others as many as before."""

    def run(
        self,
        parent: Path,
        samples: Sequence[LearningSample],
        held_out: Sequence[LearningSample],
        out: Path,
        stop: StopRequest,
    ) -> LearnedDraft | None:
        self.parents.append(str(parent))
        self.sizes.append(len(samples))
        if stop():
            return None
        (out / "model.safetensors").write_bytes(b"weights")
        before, after = Score(12, 10, (5,), (10,)), Score(12, self.rounds.pop(0), (6,), (10,))
        others = before if self.is_uneven else after
        return LearnedDraft((before,) * len(held_out), (after, *(others,) * (len(held_out) - 1)), 100, 1.0)
