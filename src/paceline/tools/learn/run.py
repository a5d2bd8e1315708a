"""Builds a learner from its plan and runs it until a signal or the end of its time.

`python -m paceline.tools.learn.run` is the learner that a server starts. The first line of standard input is the plan as JSON.
The end of standard input ends the learner, so that it never outlives the server.

`PoolTrials` tries a draft in a draft pool of a cluster: workers with it start in addition to the current workers.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import PacelineError
from paceline.deploy import DraftSwap, live_pools, observe_cluster, with_draft
from paceline.deploy.processes import load_cluster
from paceline.model_files.hub import find_model
from paceline.policy.pairing.draft_trial import TrialLimits, TrialVerdict
from paceline.tools.learn.learner import Learner, LearnerLimits
from paceline.tools.learn.memory import MemoryLimits, SampleMemory
from paceline.tools.learn.server import LearningServer, ServerFailure, Trials
from paceline.tools.learn.versions import TrialResult, VersionFolder
from paceline.tools.progress import PlainProgress, Stopped, StopRequest, TrainingLog, stop_on_interrupt
from paceline.tools.train import DraftTraining, LearnPlan, Pacer, lower_priority


def learn(plan: LearnPlan, command: str, clock: Clock, progress: TrainingLog, stop: StopRequest) -> None:
    """Learns until `stop`, or until the time of the plan is over. `command` is for the cards."""
    plan.check()
    client = LearningServer(plan.server, plan.key, plan.served_model, plan.trial_seconds)
    client.check()  # before the models are read
    lower_priority(plan.threads)
    folder = VersionFolder(plan.out)
    folder.create(find_model(plan.draft), plan.server)

    def sleep(seconds: float) -> None:
        with suppress(Stopped), stop.interruptible():
            time.sleep(seconds)

    with suppress(Stopped):
        with stop.interruptible():
            progress.note("reading the target and the draft")
            training = DraftTraining(plan, command, clock, progress, Pacer(plan.share, clock, sleep))
        learner = Learner(
            folder,
            client,
            _trials(plan, client),
            training,
            SampleMemory(MemoryLimits(plan.recent_tokens, plan.held_out, plan.replay, plan.tenant_share), plan.seed),
            LearnerLimits(plan.new_tokens, plan.min_held_out, plan.margin),
            progress,
            sleep,
            stop,
        )
        progress.note(f"learning from {plan.server} into {plan.out}, from version {folder.current()}")
        end = None if plan.minutes is None else clock.now() + 60 * plan.minutes
        while not stop() and (end is None or clock.now() < end):
            learner.tick()
            sleep(plan.interval)


def _trials(plan: LearnPlan, client: LearningServer) -> Trials:
    if plan.cluster is None or plan.pool is None:
        return client

    return PoolTrials(plan.cluster, plan.pool, plan.trial_seconds)


LOAD_SECONDS = 600.0
"""Time in which the workers with the new draft must be ready."""


class PoolTrials:
    """Implements `Trials` for one pool of the cluster in a file."""

    def __init__(self, file: Path, pool: str, trial_seconds: float) -> None:
        self._file, self._pool, self._seconds = file, pool, trial_seconds
        with_draft(load_cluster(file), pool, "")  # raises unless it is a draft pool

    def in_use(self) -> str:
        pools = live_pools(load_cluster(self._file)).desired().config.drafts
        return next(pool.model for pool in pools if pool.name == self._pool)

    def run(
        self, draft: Path, wait: Callable[[], bool], report: Callable[[str], None], is_tried: bool = True
    ) -> TrialResult | None:
        config = load_cluster(self._file)
        is_stopped = False

        def pause() -> bool:
            nonlocal is_stopped
            is_stopped = not wait()
            return not is_stopped

        try:
            with observe_cluster(config) as gateway:
                limits = TrialLimits(seconds=self._seconds if is_tried else 0.0)
                swap = DraftSwap(live_pools(config), gateway, self._pool, str(draft), limits)
                decision = swap.run(pause, LOAD_SECONDS, report)
        except PacelineError as error:
            raise ServerFailure(str(error), is_temporary=True) from error
        if is_stopped:
            return None
        return TrialResult(decision.verdict is TrialVerdict.KEEP, decision.gain, decision.reason)


COMMAND = "paceline serve, with `learning.folder`"


def read_plan(line: str) -> LearnPlan:
    options = json.loads(line)
    return LearnPlan(**options | {"out": Path(options["out"])})


def main(stream: TextIO = sys.stdin) -> None:
    plan = read_plan(stream.readline())

    def end_with_server() -> None:
        stream.read()
        os.kill(os.getpid(), signal.SIGTERM)

    clock = WallClock()
    progress = PlainProgress(clock, seconds=60.0)
    with stop_on_interrupt(progress.note) as stop:
        threading.Thread(target=end_with_server, daemon=True).start()

        learn(plan, COMMAND, clock, progress, stop)


if __name__ == "__main__":
    main()
