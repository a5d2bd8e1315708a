"""A draft is swapped under load, as processes: one that does not fit or is not better is rolled back, and no text changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.core.cluster_config import ClusterConfig, cluster_config
from paceline.core.errors import InvalidConfig
from paceline.core.request import Request
from paceline.deploy.deployment import live_pools, running_processes
from paceline.deploy.draft_swap import DraftSwap, with_draft
from paceline.deploy.processes.state import StateFolder
from paceline.policy.pairing.draft_trial import TrialLimits, TrialVerdict
from paceline.targets.client import TargetClient
from tests.engine.start.test_build import LETTERS, save_checkpoint
from tests.processes.target_harness import StreamReader, until
from tests.processes.test_processes import LIMITS, PATIENT, plain, requests, tokens


def cluster(folder: Path) -> ClusterConfig:
    common = {"devices": ["cpu"], "limits": LIMITS}
    speculation = {"depth": "fixed", "max_depth": 4, "method": "pool"}
    return cluster_config(
        {
            "state_dir": str(folder / "state"),
            "health": {"canary": 0.0, **PATIENT},
            "pools": [
                {"name": "t", "role": "target", "model": str(folder / "target"), "speculation": speculation, **common},
                {"name": "d", "role": "draft", "model": str(folder / "first"), **common},
            ],
        }
    )


@contextmanager
def served(config: ClusterConfig) -> Iterator[TargetClient]:
    with (
        running_processes(config, StateFolder.of(config)) as directory,
        TargetClient(config, directory, start_seconds=60) as client,
    ):
        until(lambda: all(worker.state == "ready" for worker in client.pool.workers()))
        yield client


class Load:
    """Requests that run one batch after the other, and their texts."""

    def __init__(self, client: TargetClient, target: str) -> None:
        self._client, self._target = client, target
        self._waiting = [one for one in requests(4096, max_tokens=32) if one.sampling.n == 1]
        self._sent: list[Request] = []
        self._done: dict[tuple[str, int], list[int]] = {}

    def run(self) -> bool:
        """One batch; the value is that of a swap's `wait`."""
        batch, self._waiting = self._waiting[:8], self._waiting[8:]
        self._sent += batch
        self._done |= tokens(StreamReader(self._client.pool, *batch))
        return True

    def check(self) -> None:
        assert self._done == plain(self._target, self._sent)


def drafts(client: TargetClient) -> dict[str, str]:
    return {w.name: w.state for w in client.pool.workers() if w.role == "draft" and w.state != "gone"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_new_draft_is_rolled_back_or_kept_under_load(tmp_path: Path) -> None:
    target = save_checkpoint(tmp_path / "target", num_hidden_layers=8)
    save_checkpoint(tmp_path / "first")
    second = save_checkpoint(tmp_path / "second", seed=7)
    other = save_checkpoint(tmp_path / "other", letters=LETTERS[::-1])
    config = cluster(tmp_path)
    with served(config) as client:
        pools, load = live_pools(config), Load(client, target)
        refused = DraftSwap(pools, client.pool, "d", other).run(load.run, 60.0, lambda text: None)
        assert refused.verdict is TrialVerdict.ROLL_BACK
        assert "the new draft is refused: target and draft differ in their vocabulary" in refused.reason
        until(lambda: drafts(client) == {"d-0": "ready"})

        # A useless draft, and too little time to be certain of anything
        short = TrialLimits(seconds=1.0)
        late = DraftSwap(pools, client.pool, "d", second, short).run(load.run, 60.0, lambda text: None)
        assert late.verdict is TrialVerdict.ROLL_BACK
        assert "within 1 s" in late.reason
        until(lambda: drafts(client) == {"d-0": "ready"})
        assert pools.desired().config.drafts[0].model == str(tmp_path / "first")

        swap = DraftSwap(pools, client.pool, "d", second)
        swap.start()
        while not swap.is_loaded:
            load.run()
        swap.poll()
        load.run()
        swap.end(is_kept=True)
        load.run()
        until(lambda: drafts(client) == {"d-1": "ready"})
        assert pools.desired().config.drafts[0].model == second
        load.run()
        load.check()


def test_only_draft_pools_are_swapped(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="there is no draft pool 't'; draft pools of this cluster: d"):
        with_draft(cluster(tmp_path), "t", "x")
