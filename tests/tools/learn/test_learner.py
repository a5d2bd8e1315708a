"""The loop with a fake server and a fake training."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.errors import InvalidConfig
from paceline.gateway.sessions.samples import SampleRing
from paceline.tools.learn.learner import MAX_BACKOFF, Learner, LearnerLimits
from paceline.tools.learn.memory import MemoryLimits, SampleMemory
from paceline.tools.learn.versions import Lineage, TrialResult, VersionFolder
from paceline.tools.progress.progress import PlainProgress, StopRequest
from tests.tools.learn.fakes import FakeServer, FakeTraining, add_samples

KEEP, REFUSE = TrialResult(True, 0.1, "+10% goodput"), TrialResult(False, -0.1, "-10% goodput")


class Setup:
    def __init__(self, tmp_path: Path) -> None:
        (tmp_path / "base").mkdir(exist_ok=True)
        self.base = tmp_path / "base"
        self.folder = VersionFolder(tmp_path / "out")
        self.server = FakeServer(str(self.base))
        self.training = FakeTraining()
        self.stop = StopRequest()
        self.log = io.StringIO()
        self.learner = self.start()

    def start(self) -> Learner:
        """A learner as after a restart."""
        clock = VirtualClock()
        self.folder.create(self.base, "http://server")
        self.memory = SampleMemory(MemoryLimits(50_000, held_out=0.25))
        limits = LearnerLimits(new_tokens=600, min_held_out=4, margin=0.02)
        self.learner = Learner(
            self.folder, self.server, self.server, self.training, self.memory, limits, PlainProgress(clock, self.log),
            clock.advance, self.stop, self.plot,
        )  # fmt: skip
        return self.learner

    def plot(self, lineages: Sequence[Lineage], path: Path) -> None:
        self.plotted = [one.version for one in lineages], path.name

    def statuses(self) -> list[str]:
        return [one.status for one in self.folder.lineages()]


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_nothing_happens_before_there_is_enough(setup: Setup) -> None:
    add_samples(setup.server.ring, 10)
    setup.learner.tick()
    assert setup.memory.num_seen == 10
    assert setup.training.parents == []
    activity = setup.folder.activity()
    assert activity is not None
    assert (activity.doing, activity.samples, activity.tokens_wanted) == ("waiting for samples", 10, 600)


def test_a_better_version_is_tried_and_kept(setup: Setup) -> None:
    add_samples(setup.server.ring, 60)
    setup.training.rounds, setup.server.verdicts = [8], [KEEP]
    setup.learner.tick()
    (one,) = setup.folder.lineages()
    assert (one.status, one.parent, one.online) == ("kept", 0, KEEP)
    assert one.offline is not None
    assert one.offline.is_passed
    assert (one.tokens_per_round_before, one.tokens_per_round_after) == (1.2, 1.5)
    assert (one.alpha_before, one.alpha_after) == (0.5, 0.6)
    assert setup.server.draft == str(setup.folder.draft(1))
    assert "version 1 is kept" in setup.log.getvalue()
    assert setup.plotted == ([1], "learning.png")
    setup.learner.tick()
    assert len(setup.training.parents) == 1  # nothing new


def test_the_next_version_continues_the_kept_one(setup: Setup) -> None:
    setup.training.rounds, setup.server.verdicts = [8, 8], [KEEP, KEEP]
    add_samples(setup.server.ring, 60)
    setup.learner.tick()
    add_samples(setup.server.ring, 60, first=61)
    setup.learner.tick()
    assert setup.training.parents == [str(setup.base), str(setup.folder.draft(1))]
    assert [one.parent for one in setup.folder.lineages()] == [0, 1]


def test_a_worse_version_is_not_tried(setup: Setup) -> None:
    add_samples(setup.server.ring, 60)
    setup.training.rounds = [10]
    setup.learner.tick()
    (one,) = setup.folder.lineages()
    assert (one.status, one.online) == ("refused", None)
    assert setup.server.tried == []
    assert not (setup.folder.draft(1) / "model.safetensors").exists()
    assert "not certain to be better" in one.note


def test_a_version_that_loses_under_load_is_refused(setup: Setup) -> None:
    add_samples(setup.server.ring, 60)
    setup.training.rounds, setup.server.verdicts = [8], [REFUSE]
    setup.learner.tick()
    (one,) = setup.folder.lineages()
    assert (one.status, one.online) == ("refused", REFUSE)
    assert setup.server.draft == str(setup.base)
    assert setup.folder.current() == 0


def test_refusals_double_the_tokens_of_the_next_training(setup: Setup) -> None:
    wanted = []
    for number in range(6):
        setup.training.rounds = [10]
        wanted.append(setup.learner.tokens_wanted)
        add_samples(setup.server.ring, wanted[-1] // 10, first=1000 * number)
        setup.learner.tick()
    assert wanted == [600, 1200, 2400, 4800, 600 * MAX_BACKOFF, 600 * MAX_BACKOFF]


def test_a_gain_that_is_only_uncertain_does_not_double_the_wait(setup: Setup) -> None:
    setup.training.rounds, setup.training.is_uneven = [2], True
    add_samples(setup.server.ring, 60)
    setup.learner.tick()
    (one,) = setup.folder.lineages()
    assert one.status == "refused"
    assert one.offline is not None
    assert one.offline.gain is not None
    assert one.offline.gain > 0.02
    assert setup.learner.tokens_wanted == 600


def test_a_shift_of_the_traffic_ends_the_wait_after_refusals(setup: Setup) -> None:
    for number in range(2):
        setup.training.rounds = [10]
        add_samples(setup.server.ring, setup.learner.tokens_wanted // 10, first=1000 * number)
        setup.learner.tick()
    assert setup.learner.tokens_wanted == 2400
    add_samples(setup.server.ring, 90, first=5000)
    setup.learner.tick()
    assert len(setup.training.parents) == 2  # the same kind of traffic waits
    ring = setup.server.ring
    for number in range(40):
        ring.add((1, number), tuple(range(60_000 + number, 60_008 + number)), (), 0, 1, ring.tenant("key"), "other")
    setup.training.rounds, setup.server.verdicts = [8], [KEEP]
    setup.learner.tick()
    assert setup.statuses() == ["refused", "refused", "kept"]
    assert setup.learner.tokens_wanted == 600
    assert "the traffic has changed" in setup.log.getvalue()


def test_a_paused_learner_reads_nothing(setup: Setup) -> None:
    setup.folder.pause(True)
    add_samples(setup.server.ring, 60)
    setup.learner.tick()
    assert setup.memory.num_seen == 0
    setup.folder.pause(False)
    setup.training.rounds, setup.server.verdicts = [8], [KEEP]
    setup.learner.tick()
    assert setup.statuses() == ["kept"]


def test_a_rollback_returns_to_the_parent_without_a_trial(setup: Setup) -> None:
    add_samples(setup.server.ring, 60)
    setup.training.rounds, setup.server.verdicts = [8], [KEEP]
    setup.learner.tick()
    setup.folder.roll_back()
    setup.learner.tick()
    assert setup.server.draft == str(setup.base)
    assert len(setup.server.tried) == 1


def test_a_restarted_server_gets_the_current_version_again(setup: Setup) -> None:
    add_samples(setup.server.ring, 60)
    setup.training.rounds, setup.server.verdicts = [8], [KEEP, KEEP]
    setup.learner.tick()
    setup.server.draft = str(setup.base)
    setup.start()
    setup.server.ring = SampleRing(10, 10)
    setup.learner.tick()
    assert setup.server.draft == str(setup.folder.draft(1))


def test_a_restart_goes_on_from_the_newest_kept_version(setup: Setup) -> None:
    add_samples(setup.server.ring, 60)
    setup.training.rounds, setup.server.verdicts = [8, 8], [KEEP, KEEP]
    setup.learner.tick()
    setup.start().tick()
    assert setup.training.parents[-1] == str(setup.folder.draft(1))
    assert setup.statuses() == ["kept", "kept"]


def test_a_version_kept_while_no_learner_ran_becomes_current(setup: Setup) -> None:
    add_samples(setup.server.ring, 60)
    setup.training.rounds, setup.server.verdicts = [8], [KEEP]
    setup.learner.tick()
    setup.folder.change(1, status="candidate", online=None)  # as a learner killed during the trial leaves it
    setup.server.ring = SampleRing(10, 10)
    setup.start().tick()
    assert setup.statuses() == ["kept"]


def test_a_server_that_is_down_is_reported_once(setup: Setup) -> None:
    setup.server.is_down = True
    setup.learner.tick()
    setup.learner.tick()
    assert setup.log.getvalue().count("connection refused") == 1
    setup.server.is_down = False
    add_samples(setup.server.ring, 10)
    setup.learner.tick()
    assert setup.memory.num_seen == 10


def test_a_restarted_gateway_numbers_from_one_again(setup: Setup) -> None:
    add_samples(setup.server.ring, 20)
    setup.learner.tick()
    setup.server.ring = SampleRing(1000, 100_000)
    add_samples(setup.server.ring, 5, first=500)
    setup.learner.tick()
    assert setup.memory.num_seen == 25


def test_a_server_with_another_draft_is_an_error(setup: Setup) -> None:
    setup.server.draft = "another"
    with pytest.raises(InvalidConfig, match="give --draft another"):
        setup.learner.tick()


def test_a_stop_during_the_training_leaves_no_version(setup: Setup) -> None:
    add_samples(setup.server.ring, 60)
    setup.learner.tick = setup.learner._learn  # type: ignore[method-assign]
    setup.stop.request()
    setup.learner.tick()
    assert setup.statuses() == []


def test_a_stop_during_a_trial_refuses_the_version(setup: Setup) -> None:
    add_samples(setup.server.ring, 60)
    setup.training.rounds, setup.server.verdicts = [8], [None]
    setup.learner.tick()
    (one,) = setup.folder.lineages()
    assert (one.status, one.note) == ("refused", "the trial was interrupted")
