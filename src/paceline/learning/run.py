"""Builds a learner from its plan and runs it until a signal or the end of its time."""

import time
from contextlib import suppress

from paceline.core.clock import Clock
from paceline.learning.further_training import DraftTraining, Pacer, lower_priority
from paceline.learning.learner import Learner, LearnerLimits
from paceline.learning.learning_server import LearningServer, Trials
from paceline.learning.memory import MemoryLimits, SampleMemory
from paceline.learning.plan import LearnPlan
from paceline.learning.versions import VersionFolder
from paceline.models.loading.hub import find_model
from paceline.train.progress import Stopped, StopRequest, TrainingLog


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
    from paceline.learning.pool_trials import PoolTrials

    return PoolTrials(plan.cluster, plan.pool, plan.trial_seconds)
