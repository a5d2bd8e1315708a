"""Makes the simulated workers of a cluster: each gets a batch, a prefix cache and a draft device."""

import random
from functools import partial

from paceline.cluster.routing.kv_index import KvIndex
from paceline.core.kv_events import CacheEvent
from paceline.planning.simulation.config import SimulationConfig
from paceline.planning.simulation.draft_pool import DraftWorkers, PooledDrafts
from paceline.planning.simulation.members import SimulatedMember
from paceline.planning.simulation.workers.batches import Batch, ClosedBatch, SteppedBatch
from paceline.planning.simulation.workers.depths import PolicyDepths
from paceline.planning.simulation.workers.prefix_cache import PrefixCache
from paceline.planning.simulation.workers.rounds import Rounds
from paceline.planning.simulation.workers.worker import DeviceDrafts, Drafting, NoDrafts, SimulatedWorker


class WorkerFactory:
    """All workers share the rounds. The caches of target workers publish to the index."""

    def __init__(
        self, config: SimulationConfig, block_tokens: int, rounds: Rounds, index: KvIndex, drafters: DraftWorkers | None
    ) -> None:
        """`drafters` are the draft workers of all targets. If None, targets draft on their own devices, or not at all."""
        self._config, self._block_tokens, self._rounds = config, block_tokens, rounds
        self._index, self._drafters = index, drafters

    def equip(self, member: SimulatedMember) -> None:
        """Give a target or prefill worker its `worker`, and a target that uses draft workers its `drafts`."""
        profile, speculation = self._config.profile, self._config.speculation
        is_target = member.role == "target"

        member.worker = SimulatedWorker(
            profile,
            self._rounds,
            self._batch(random.Random(f"{self._config.seed}/{member.name}")),
            PrefixCache(
                int(profile.kv_tokens.value),
                self._block_tokens,
                partial(self._index.apply, member.name) if is_target else _ignore,
            ),
            speculation.max_depth if speculation and is_target else 0,
            self._drafting(member) if is_target else NoDrafts(),
        )

    def _drafting(self, member: SimulatedMember) -> Drafting:
        speculation = self._config.speculation
        if self._drafters is not None:
            number = int(member.name.removeprefix("target-"))
            member.drafts = PooledDrafts(self._drafters, number)
            return member.drafts
        if speculation is not None and speculation.alphas[0] > 0.0:
            return DeviceDrafts(self._config.profile, speculation.rule == "policy")
        return NoDrafts()

    def _batch(self, dice: random.Random) -> Batch:
        config, speculation = self._config, self._config.speculation
        if config.mode == "closed_form":
            return ClosedBatch(self._rounds, dice)
        if speculation is None or speculation.rule != "policy":
            return SteppedBatch(self._rounds, dice)
        policy = PolicyDepths(config.profile, speculation.max_depth, on_device=self._drafters is None)
        return SteppedBatch(self._rounds, dice, policy)


def _ignore(event: CacheEvent) -> None:
    pass
