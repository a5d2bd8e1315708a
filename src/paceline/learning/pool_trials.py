"""Trials of a draft in a draft pool of a cluster: workers with it start in addition to the current workers."""

from collections.abc import Callable
from pathlib import Path

from paceline.cluster.pairing.draft_trial import TrialLimits, TrialVerdict
from paceline.core.errors import PacelineError
from paceline.learning.learning_server import ServerFailure
from paceline.learning.versions import TrialResult
from paceline.runtime.deploy.cluster_file import load_cluster
from paceline.runtime.deploy.deployment import live_pools, observe_cluster
from paceline.runtime.deploy.draft_swap import DraftSwap, with_draft

LOAD_SECONDS = 600.0


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
