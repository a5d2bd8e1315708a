"""The sequences of every target at a draft worker: who is let in, and who rides in the next pass."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from paceline.cluster.pairing.ahead import Asked, DraftingAhead
from paceline.cluster.pairing.fanout import Outcome, RivalOdds, fan_out
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import Verification
from paceline.runtime.draft_worker.core import DraftCore, Facts, Ride
from paceline.runtime.draft_worker.state import Lesson, Line, Rolling
from paceline.runtime.wire.messages import Fault, Load, Open, Rule, Sampling, Step
from paceline.runtime.wire.transport import Peer
from paceline.speculation.depth.acceptance import Acceptance

_RULES: Mapping[Rule, Verification] = {Rule.COUPLED: "coupled", Rule.REJECTION: "rejection"}


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What a worker takes on. Beyond it a target is told `Busy`."""

    max_sequences: int = 256
    max_tokens: int = 1 << 20
    """Of all sequences together: what the core has room for."""
    max_batch: int = 64
    """Rides of one pass."""
    ahead_nodes: int = 32
    """Tokens drafted ahead for one sequence and round; 0 waits to be asked."""
    max_peers: int = 256
    silence: float = 30.0
    """Seconds after which a target that says nothing is gone."""


@dataclass(slots=True, eq=False)
class Target:
    version: int
    name: str
    heard: float
    wants_ahead: bool = False
    """Drafts sent before it asks."""
    ahead: DraftingAhead = field(default_factory=DraftingAhead)
    is_ahead: bool = True
    """Its next round is drafted ahead for."""
    sequences: dict[int, Rolling] = field(default_factory=dict)


class Roster:
    """One writer: the worker's thread."""

    def __init__(self, core: DraftCore, vocab_size: int, limits: DraftLimits) -> None:
        self.targets: dict[Peer, Target] = {}
        self.acceptance = Acceptance(max_depth=16)
        self.num_rounds = self.num_ready = 0
        self.num_urgent = 0
        """Rides of the last pass that were waited for."""
        self._core, self._vocab_size, self._limits = core, vocab_size, limits
        self._odds = RivalOdds()
        self._ids = itertools.count()
        self._num_tokens = 0
        self._turn = 0
        self._lessons: list[Lesson] = []
        """Learned when the next pass is chosen: until then somebody waits for an answer."""
        self._plans: dict[tuple[int, int, bool], list[Outcome]] = {}
        """Of this turn: what was learned since may change the next."""

    def has_room(self, message: Open) -> bool:
        limits = self._limits
        num_sequences = sum(len(target.sequences) for target in self.targets.values())
        return num_sequences < limits.max_sequences and self._num_tokens + len(message.ids) <= limits.max_tokens

    def open(self, target: Target, message: Open) -> str | None:
        """What is wrong with it, if anything."""
        if not message.ids or not self._is_known(message.ids):
            return "ids are missing, or outside the vocabulary"
        if not 0 < message.num_prompt <= len(message.ids):
            return f"a prompt of {message.num_prompt} tokens among {len(message.ids)}"
        if not self._is_known(message.sampling.logit_bias):
            return "logit_bias lies outside the vocabulary"
        sampling, rule = _sampling(message.sampling), _RULES[message.rule]
        facts = Facts(sampling, message.seed, message.choice, message.num_prompt, rule, message.salt)
        ride = Ride(next(self._ids), facts, list(message.ids), len(message.ids))
        target.sequences[message.sequence] = Rolling(ride, self._core, self._ids.__next__)
        self._num_tokens += len(message.ids)
        return None

    def step(self, target: Target, step: Step) -> Fault | None:
        rolling = target.sequences.get(step.sequence)
        if rolling is None:
            return Fault.UNKNOWN
        if step.round <= rolling.round:
            return None  # overtaken: its sender has moved on
        if step.base != rolling.length:
            return Fault.BASE
        if not self._is_known(step.tokens):
            return Fault.MALFORMED
        if step.kept > rolling.offered:
            return Fault.BASE
        tokens = [*rolling.offer[: step.kept], *step.tokens] if step.kept else step.tokens
        lesson = rolling.advance(step.round, tokens, step.depth)
        if lesson is not None:
            self._lessons.append(lesson)
        self._num_tokens += len(tokens)
        if step.depth:
            self.num_rounds += 1
            self.num_ready += rolling.was_ready
        if rolling.was_ready and step.held >= step.depth:
            rolling.answered()
        return None

    def settle(self, target: Target, steps: Iterable[Step], delay: float) -> None:
        """`steps` were taken, `delay` passes after they came: decide whether what may follow is drafted ahead."""
        if not self._limits.ahead_nodes:
            return
        if target.is_ahead:
            found = [
                # What the target has already it does not wait for
                (step.depth, rolling.there, rolling.was_ready, 0.0 if step.held >= step.depth else delay)
                for step in steps
                if step.depth and (rolling := target.sequences.get(step.sequence)) is not None
                if rolling.round == step.round and rolling.there is not None
            ]
            if found:
                target.ahead.observe(Asked(*(sum(column) / len(found) for column in zip(*found, strict=True))))
        target.is_ahead = target.ahead.next_round()

    def end(self, target: Target, numbers: Iterable[int]) -> None:
        for number in numbers:
            rolling = target.sequences.pop(number, None)
            if rolling is not None:
                self._num_tokens -= rolling.length
                self._core.close(rolling.rides)

    def drop(self, peer: Peer) -> None:
        target = self.targets.pop(peer, None)
        if target is not None:
            self.end(target, list(target.sequences))

    def choose(self) -> list[Line]:
        """The rides of the next pass: what is waited for, then what may be, each by turns of the targets."""
        self._learn()
        targets = list(self.targets.values())
        self._turn += 1
        self._plans.clear()
        if targets:  # another one is first every time
            shift = self._turn % len(targets)
            targets = targets[shift:] + targets[:shift]
        urgent = ([line for r in target.sequences.values() if (line := r.urgent)] for target in targets)
        lines = list(itertools.islice(_by_turns(urgent), self._limits.max_batch))
        self.num_urgent = len(lines)
        if self._limits.ahead_nodes:
            rollings = [rolling for target in targets if target.is_ahead for rolling in target.sequences.values()]
            ahead = _by_turns(rolling.ahead(self.plan) for rolling in rollings)
            lines += itertools.islice(ahead, self._limits.max_batch - len(lines))
        return lines

    def make_room(self, idle: Iterable[Line]) -> None:
        """A ride that got no token may lack room: what is drafted ahead gives way to what is waited for."""
        stuck = {id(line) for line in idle}
        if any(rolling.urgent is not None and id(rolling.urgent) in stuck for rolling in self._rollings):
            for rolling in self._rollings:
                rolling.shed()

    def riders(self, target: Target, lines: Iterable[Line]) -> list[int]:
        """Sequences of a target that any of `lines` belongs to."""
        ids = {line.ride.id for line in lines}
        return [number for number, rolling in target.sequences.items() if ids & {ride.id for ride in rolling.rides}]

    def load(self, pass_seconds: float, target: Target | None = None) -> Load:
        """As `target` is told of it."""
        rollings = self._rollings
        waiting = sum(not rolling.is_answered for rolling in rollings)
        share = None if target is None else target.ahead.resting
        return Load(len(rollings), waiting, int(pass_seconds * 1e6), None if share is None else round(100 * share))

    @property
    def _rollings(self) -> list[Rolling]:
        return [rolling for target in list(self.targets.values()) for rolling in list(target.sequences.values())]

    def _learn(self) -> None:
        for lesson in self._lessons:
            self.acceptance.observe("", lesson.known, lesson.accepted)
            if lesson.was_wrong:
                self._odds.observe(lesson.rival)
        self._lessons.clear()

    def plan(self, offered: int, depth: int, continues: bool) -> list[Outcome]:
        """Which outcomes of a round are worth preparing for."""
        plan = self._plans.get((offered, depth, continues))
        if plan is None:
            alphas, odds = self.acceptance.alphas(""), self._odds.odds
            plan = fan_out(alphas, odds, offered, depth, self._limits.ahead_nodes, continues)
            self._plans[offered, depth, continues] = plan
        return plan

    def _is_known(self, tokens: Iterable[int]) -> bool:
        return max(tokens, default=0) < self._vocab_size


def _sampling(sent: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sent.temperature,
        top_k=sent.top_k,
        top_p=sent.top_p,
        min_p=sent.min_p,
        repetition_penalty=sent.repetition_penalty,
        presence_penalty=sent.presence_penalty,
        frequency_penalty=sent.frequency_penalty,
        logit_bias=sent.logit_bias,
    )


def _by_turns(groups: Iterable[Iterable[Line]]) -> Iterator[Line]:
    """The first of every group, then the second of each, and so on."""
    waiting = [iter(group) for group in groups]
    while waiting:
        still = []
        for group in waiting:
            line = next(group, None)
            if line is not None:
                yield line
                still.append(group)
        waiting = still
