"""The connections to all target workers, and the worker lists and flags that the gateway sends over them.

`Canaries` makes every target worker regularly generate the same few tokens, and compares the results.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import PacelineError
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import SamplingParams, SpeculationFlags, ValidatedRequest
from paceline.policy.health import CanaryVote, WorkerState
from paceline.targets.connection import TargetConnection
from paceline.targets.stream import Stream
from paceline.wire.draft_messages import VERSION
from paceline.wire.gateway_messages import (
    ChangeWeights,
    SetFlags,
    StatusReport,
    StatusRequest,
    SwapDraft,
    Welcome,
    WorkerAddress,
    WorkerList,
)
from paceline.wire.keys import KeyPair
from paceline.wire.worker_spec import Member

logger = logging.getLogger(__name__)

IN_USE = ("trial", "serving")
"""Phases of draft workers that targets use: drafts do not change the text, so a trial needs no comparison."""


class Targets(dict[str, TargetConnection]):
    """Connections by worker. The pool's thread calls every method; other threads may read the properties."""

    def __init__(self, config: ClusterConfig, own: KeyPair | None) -> None:
        super().__init__()
        self._config = config
        self._own = own
        self._epoch = secrets.randbits(62)
        self._max_num_seqs = 1
        self.members: tuple[Member, ...] = ()
        """Members of the directory, also those without a connection. Empty before the directory was read."""
        self._worker_lists: dict[str, WorkerList] = {}
        """By model."""
        self._flags: SpeculationFlags | None = None
        self._change: ChangeWeights | None = None
        """The weights of all targets, if they are not those that they are started with."""
        self._next_change: ChangeWeights | None = None
        """The change that is under way."""

    @property
    def max_num_seqs(self) -> int:
        """Sequences that all usable workers run at once. It is the last value if no worker is usable."""
        welcomes = [target.welcome for target in list(self.values()) if target.takes_streams]
        self._max_num_seqs = (
            sum(welcome.max_num_seqs for welcome in welcomes if welcome is not None) or self._max_num_seqs
        )
        return self._max_num_seqs

    @property
    def first_welcome(self) -> Welcome | None:
        """The `Welcome` of the first target that has sent one."""
        targets = [target for target in list(self.values()) if target.member.role == "target"]
        return next((target.welcome for target in targets if target.welcome is not None), None)

    @property
    def fingerprint(self) -> str:
        """Digest of the fingerprint that all usable targets share. Empty if they differ, or if one is not known."""
        targets = [target for target in list(self.values()) if target.takes_streams and target.welcome is not None]
        found = {target.welcome.fingerprint for target in targets if target.welcome is not None}
        shared = found.pop() if len(found) == 1 else None
        return "" if shared is None else shared.digest

    @property
    def reports(self) -> list[StatusReport]:
        """The last report of each usable target."""
        targets = list(self.values())
        return [target.report for target in targets if target.report is not None and target.takes_streams]

    def disconnect(self, members: Iterable[Member]) -> Sequence[TargetConnection]:
        """Remove and return the connections to workers that left or moved, for the caller to close. `members` are the current
        members."""
        current = _reachable(members)
        removed = []
        for name, target in list(self.items()):
            member = current.get(name)
            if member is not None and replace(member, phase=target.member.phase) == target.member:
                target.member = member
            else:
                removed.append(self.pop(name))
        return removed

    def connect(self, members: tuple[Member, ...]) -> None:
        """Connect to the members that are new, and send the lists of workers if they have changed."""
        self.members = members
        for name, member in _reachable(members).items():
            if name not in self:
                try:
                    self[name] = TargetConnection(member, self._config.health, self._own, self._epoch)
                except PacelineError as error:
                    logger.error("worker %s is ignored: %s", name, error)
        self.send_worker_lists()

    def send_worker_lists(self) -> None:
        """Send targets the lists of the workers that they may use, if one has changed or a worker is unhealthy."""
        unhealthy = {target.name for target in self.values() if target.state is WorkerState.UNHEALTHY}
        members = [member for member in self.members if member.address and member.name not in unhealthy]
        models = {target.member.model for target in self.values()}
        worker_lists = {model: _worker_list(members, model, self._config.shares_caches) for model in models}
        if worker_lists != self._worker_lists or unhealthy:  # another gateway may have sent the unhealthy ones
            self._worker_lists = worker_lists
            for target in self.values():
                target.send(worker_lists[target.member.model])

    def send_flags(self, flags: SpeculationFlags) -> None:
        """Send the flags to every worker, including workers that join later."""
        self._flags = flags
        for target in self.values():
            target.send(SetFlags(flags))

    def send_swap(self, swap: SwapDraft) -> None:
        """Send the swap to every target that has a draft of its own, and ask for its status."""
        for target in self.values():
            if target.report is not None and target.report.status.draft is not None:
                target.send(swap)
                target.send(StatusRequest())

    def send_change(self, change: ChangeWeights) -> None:
        """Send the change of weights to every target."""
        self._next_change = change
        for target in self.values():
            if target.takes_streams:
                target.send(change)
                target.send(StatusRequest())

    def settle_change(self, is_kept: bool) -> None:
        """The change under way is over. If it is kept, targets that join later or start again make it too."""
        change, self._next_change = self._next_change, None
        if change is None or not is_kept:
            return
        self._change = change
        for target in self.values():
            if target.welcome is not None and target.welcome.change != change.number and target.takes_streams:
                target.send(change)  # it joined meanwhile

    def handle_welcome(self, target: TargetConnection, welcome: Welcome) -> bool:
        """Complete the handshake. Sends the worker lists and the flags to an accepted worker. Returns False if the worker is
        refused."""
        if welcome.version != VERSION:
            text = "%s has protocol version %d, this gateway has %d: upgrade the older one"
            logger.error(text, target.name, welcome.version, VERSION)
            return False
        refusal, target.refusal = target.refusal, self._refusal(target.member, welcome)
        if target.refusal:
            if target.refusal != refusal:
                logger.error("%s is refused: %s", target.name, target.refusal)
            return False
        change = self._change
        is_new = target.welcome is None or target.welcome.epoch != welcome.epoch
        if change is not None and target.member.role == "target" and is_new and welcome.change != change.number:
            target.refusal = f"it loads the weights of {change.peer or change.folder}"
            target.send(change)
            return False
        target.welcome = welcome
        target.send(self._worker_lists.get(target.member.model, WorkerList([])))
        if self._flags is not None:
            target.send(SetFlags(self._flags))
        return True

    def _refusal(self, member: Member, welcome: Welcome) -> str:
        """The reason why the worker must not generate: its texts may differ from those of its pool at the same revision of the
        settings. Empty if the worker may generate."""
        for other in self.values():
            same = (other.member.pool, other.member.revision) == (member.pool, member.revision)
            if not same or other.name == member.name or other.welcome is None:
                continue
            if (
                self._change or self._next_change
            ) and other.welcome.change != welcome.change:  # one of them still changes
                continue
            own, known = welcome.fingerprint, other.welcome.fingerprint
            if own is not None and known is not None and (difference := own.difference(known)):
                return f"its texts may differ from those of {other.name}: it has {difference}"
        return ""


def _reachable(members: Iterable[Member]) -> dict[str, Member]:
    """Members that a gateway connects to, by name."""
    return {
        member.name: member
        for member in members
        if member.role != "draft" and member.phase != "gone" and member.address
    }


def _worker_list(members: Sequence[Member], model: str, shares_caches: bool) -> WorkerList:
    """The addresses that targets of `model` need: those of the draft workers, and of the prefill workers and targets of the
    model. Leaving workers are absent, but a draining target still sends its cached blocks to the remaining targets."""
    drafts, prefills, targets = (
        [
            WorkerAddress(member.name, member.address, member.key, member.phase == "trial")
            for member in members
            if member.role == role and member.phase in phases and (role == "draft" or member.model == model)
        ]
        for role, phases in (("draft", IN_USE), ("prefill", ("serving",)), ("target", ("serving", "draining")))
    )
    return WorkerList(drafts, prefills, targets if shares_caches else [])


SAMPLING = SamplingParams(max_tokens=8, temperature=1.0, seed=20261115, ignore_eos=True)
SAMPLINGS = (SAMPLING, replace(SAMPLING, max_tokens=16), replace(SAMPLING, max_tokens=16, temperature=0.0))
"""Sampling of the canary texts that a rollout compares."""
PROMPT = tuple(range(1, 9))
CATEGORY = "canary"
DOUBT_FACTOR = 10
"""A worker whose last canary was wrong is checked this many times as often."""


class Canaries:
    """Submits a canary to each worker at an interval and reports the result to the worker's health."""

    def __init__(
        self, seconds: float, targets: Mapping[str, TargetConnection], submit: Callable[[Stream], None]
    ) -> None:
        """`submit` sends a stream to the worker it is pinned to. `seconds` is the interval, and 0 turns canaries off."""
        self._seconds = seconds
        self._targets = targets
        self._submit = submit
        self._votes: dict[str, CanaryVote] = {}
        """By fingerprint: workers with different ones may generate different texts."""
        self._count = 0

    def submit_if_due(self, target: TargetConnection, now: float) -> None:
        is_alive = target.welcome is not None and target.state in (WorkerState.READY, WorkerState.UNHEALTHY)
        is_alive = is_alive and not target.is_draining
        if not self._seconds or not is_alive or target.is_loading or now < target.next_canary:
            return
        target.next_canary = now + (self._seconds / DOUBT_FACTOR if target.health.is_in_doubt else self._seconds)
        self._count += 1
        name, tokens = target.name, list[int]()

        def listen(event: OutputEvent) -> None:
            if isinstance(event, StepOutput):
                tokens.extend(event.tokens)
                if event.finish_reason is not None:
                    self._compare(name, tuple(tokens), event.fingerprint)

        request = ValidatedRequest(f"canary-{self._count}", PROMPT, SAMPLING, category=CATEGORY)
        self._submit(Stream(request, listen, pinned=name))

    def forget(self, worker: str) -> None:
        """Drop the last result of a worker that left or restarted."""
        for vote in self._votes.values():
            vote.forget(worker)
        self._votes = {fingerprint: vote for fingerprint, vote in self._votes.items() if vote.num_results}

    def _compare(self, name: str, tokens: tuple[int, ...], fingerprint: str) -> None:
        self.forget(name)  # also its result under the weights before
        vote = self._votes.setdefault(fingerprint, CanaryVote())
        for worker, agrees in vote.add(name, tokens).items():
            target = self._targets.get(worker)
            if target is None:
                continue
            if worker == name:
                target.health.canary(agrees)
                if not agrees:
                    where = vote.difference(worker)
                    logger.error("target worker %s generated another canary text than its pool: %s", worker, where)
            elif not agrees:
                target.next_canary = 0.0  # this result outvoted it: check it again before it is marked unhealthy
