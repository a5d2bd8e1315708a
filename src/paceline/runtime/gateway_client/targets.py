"""The connections to all target workers, and the worker lists and flags that the gateway sends over them."""

import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace

from paceline.cluster.health import WorkerState
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import PacelineError
from paceline.core.speculation import SpeculationFlags
from paceline.runtime.deploy.directory import Member
from paceline.runtime.gateway_client.target_connection import TargetConnection
from paceline.runtime.wire.gateway_messages import SetFlags, StatusRequest, SwapDraft, WorkerAddress, WorkerList
from paceline.runtime.wire.keys import KeyPair
from paceline.runtime.wire.messages import VERSION
from paceline.runtime.wire.target_messages import StatusReport, Welcome

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

    @property
    def max_num_seqs(self) -> int:
        """Sequences that all usable workers run at once. Without a usable worker, the last value."""
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
        target.welcome = welcome
        target.send(self._worker_lists.get(target.member.model, WorkerList([])))
        if self._flags is not None:
            target.send(SetFlags(self._flags))
        return True

    def _refusal(self, member: Member, welcome: Welcome) -> str:
        """The reason why the worker must not generate: its pool has other weights at the same revision of the settings. Empty
        if the worker may generate."""
        for other in self.values():
            same = (other.member.pool, other.member.revision) == (member.pool, member.revision)
            if (
                same
                and other.welcome is not None
                and other.welcome.weights not in ("", welcome.weights)
                and welcome.weights
            ):
                return f"its weights are {welcome.weights}, those of {other.name} are {other.welcome.weights}"
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
