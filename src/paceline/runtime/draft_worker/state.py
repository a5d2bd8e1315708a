"""One sequence at a draft worker: what was committed, what is drafted for this round, and what is drafted ahead for the next.

The chain of the round goes on past what was offered: if all of that is accepted and the next token is the chain's own, the
rest of the chain is the next draft. Every other outcome that is prepared for is a branch: a ride of its own that forks from
the chain. What comes true becomes the chain, at most once; all else is closed. Since a draft is a function of the text and
of noise keyed by position, a prepared draft is the very one that would have been drafted on demand.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.cluster.pairing.fanout import Outcome
from paceline.runtime.draft_worker.core import DraftCore, Drawn, Facts, Ride

Key = tuple[int, int]
"""(accepted, the token that follows)."""
Plan = Callable[[int, int, bool], Iterable[Outcome]]
"""(offered, depth, whether the chain continues) -> outcomes worth preparing for."""

PATIENCE = 64
"""Passes without a token (a long prompt before it, no room) after which a round is given up."""


@dataclass(slots=True, eq=False)
class Line:
    """A ride and the tokens drawn for it, past its committed ones (for a branch: past its outcome)."""

    ride: Ride
    chain: list[Drawn] = field(default_factory=list)
    idle: int = 0

    def append(self, drawn: Drawn | None) -> None:
        if drawn is None:
            self.idle += 1
            return
        self.idle = 0
        self.chain.append(drawn)
        self.ride.ids.append(drawn.token)


class Lesson(NamedTuple):
    """What a verification showed: of `known` drafted tokens the first `accepted` were right."""

    known: int
    accepted: int
    was_wrong: bool
    rival: int | None
    """Which of the wrong token's rivals came instead; None: none of them, or nothing was wrong."""


class Rolling:
    """Changes only through `advance` and `feed`. `rides` must be closed in the core when it is dropped."""

    def __init__(self, ride: Ride, core: DraftCore, new_id: Callable[[], int]) -> None:
        self._core, self._new_id = core, new_id
        self._main = Line(ride)
        self._branches: dict[Key, Line] = {}
        self._planned: list[Outcome] | None = None
        self.round = 0
        self.depth = 0
        self.is_answered = True
        self.was_ready = False
        self.there: int | None = None
        """Tokens of this round's draft that had been drafted ahead. None: there was no answer to draft on from."""
        self.offered = 0
        self._told: dict[Key, bool] = {}
        """Outcomes that the target was told of; True: it has the draft."""

    @property
    def facts(self) -> Facts:
        return self._main.ride.facts

    @property
    def length(self) -> int:
        return self._main.ride.num_committed

    @property
    def rides(self) -> list[Ride]:
        return [self._main.ride, *(line.ride for line in self._branches.values())]

    @property
    def draft(self) -> list[Drawn]:
        """Of this round, as far as it goes."""
        return self._main.chain[: self.depth]

    @property
    def offer(self) -> list[int]:
        """What the round was answered with."""
        return [drawn.token for drawn in self._main.chain[: self.offered]]

    def advance(self, round_: int, tokens: Sequence[int], depth: int) -> Lesson | None:
        """`tokens` were committed; draft `depth` more for `round_`. Returns what is to be learned of it, if anything."""
        chain = self._main.chain
        matched, both = 0, min(len(tokens), len(chain))
        while matched < both and chain[matched].token == tokens[matched]:
            matched += 1
        lesson = self._lesson(tokens, matched)
        num_offered, num_old = self.offered, max(0, self.offered - matched)
        base = self.length
        outcome = (len(tokens) - 1, tokens[-1]) if tokens and matched >= len(tokens) - 1 else None
        branch = None if outcome is None else self._branches.pop(outcome, None)
        self._drop_branches()
        if branch is not None:
            self._core.close([self._main.ride])
            self._main, num_old = branch, 0
        elif matched == len(tokens):
            del chain[:matched]
        else:
            self._core.cut(self._main.ride, base + matched)
            self._main.ride.ids.extend(tokens[matched:])
            self._main.chain = []
        self._main.ride.num_committed = base + len(tokens)
        self._main.idle = 0
        self._planned = None
        self._told.clear()
        self.round, self.depth, self.offered = round_, depth, 0
        self.is_answered = False
        self.was_ready = len(self._main.chain) >= depth
        num_there = min(len(self._main.chain), depth)
        self.there = max(0, num_there - num_old) if num_offered else None
        return lesson

    @property
    def is_due(self) -> bool:
        """The round's draft is complete, or as complete as it will get, and not yet answered."""
        main = self._main
        return not self.is_answered and (len(main.chain) >= self.depth or main.idle >= PATIENCE)

    def answered(self) -> None:
        self.is_answered = True
        self.offered = len(self.draft)

    @property
    def urgent(self) -> Line | None:
        """What the target waits for."""
        return None if self.is_answered or self.is_due else self._main

    def ahead(self, plan: Plan) -> Iterator[Line]:
        """What may come next, most likely first; forks the branches that `plan` asks for as soon as they can be."""
        if not self.is_answered or self.offered == 0:
            return
        continues = not self.facts.wants_law
        self._fork(self._plan(plan))
        beyond = self.offered + 1 + (self.depth if continues else 0)
        if len(self._main.chain) < beyond and self._main.idle < PATIENCE:
            yield self._main
        for line in self._branches.values():
            # Past its own draft a branch goes on like the chain it may become
            if len(line.chain) < 2 * self.depth + 1 and line.idle < PATIENCE:
                yield line

    def begun(self, plan: Plan) -> list[Key]:
        """Outcomes that will be prepared for now that the round is answered, if the target is to be told of them."""
        if not self.offered or self.facts.wants_law:
            return []
        keys = [key for outcome in self._plan(plan) if (key := self._key(outcome)) is not None]
        self._told.update((key, False) for key in keys)
        return keys

    def prepared(self, announces: bool = True) -> Iterator[tuple[Key, list[Drawn]]]:
        """Outcomes of this round to tell the target of: each once with its draft, and with `announces` once before, when it is
        begun, unless it is what follows after all was accepted, which everybody can expect.

        None under rejection: with what it was drawn from a draft takes kilobytes, too many for outcomes that do not come true.
        Those drafts wait here to be asked for.
        """
        chain, offered = self._main.chain, self.offered
        if not self.is_answered or not offered or self.facts.wants_law:
            return
        begun = [(key, line.chain) for key, line in self._branches.items()]
        if len(chain) > offered:
            begun.append(((offered, chain[offered].token), chain[offered + 1 :]))
        for key, drawn in begun:
            if len(drawn) >= self.depth:
                if self._told.get(key) is not True:
                    self._told[key] = True
                    yield key, drawn[: self.depth]
            elif announces and key not in self._told and key[0] < offered:
                self._told[key] = False
                yield key, []

    def shed(self) -> None:
        """Give up what is drafted ahead: its room is needed."""
        self._drop_branches()
        self._planned = []

    def _plan(self, plan: Plan) -> list[Outcome]:
        """Outcomes that are to be prepared for and are not yet."""
        if self._planned is None:
            self._planned = list(plan(self.offered, self.depth, not self.facts.wants_law))
        return self._planned

    def _key(self, outcome: Outcome) -> Key | None:
        """None: the draft knows of no such token, or not yet."""
        if outcome.accepted >= len(self._main.chain):
            return None
        rivals = self._rivals(outcome.accepted)
        return (outcome.accepted, rivals[outcome.rival]) if outcome.rival < len(rivals) else None

    def _fork(self, planned: list[Outcome]) -> None:
        main = self._main
        for outcome in planned:
            key = self._key(outcome)
            if key is not None:
                ids = [*main.ride.ids[: self.length + outcome.accepted], key[1]]
                child = Ride(self._new_id(), self.facts, ids, self.length)
                self._core.fork(main.ride, child)
                self._branches[key] = Line(child)
        # After the last draft of the round logits are not there yet
        self._planned = [outcome for outcome in planned if outcome.accepted >= len(main.chain)]

    def _rivals(self, position: int) -> list[int]:
        drawn = self._main.chain[position]
        if self.facts.wants_law and position == self.offered:
            return list(drawn.rivals)
        return [rival for rival in drawn.rivals if rival != drawn.token]

    def _lesson(self, tokens: Sequence[int], matched: int) -> Lesson | None:
        """The committed tokens tell of every position they cover whether the chain was right there."""
        covered = min(len(self._main.chain), len(tokens))
        known = min(covered, self.offered) if self.facts.wants_law else covered
        if self.offered == 0 or known == 0:
            return None
        was_wrong, rival = matched < covered, None
        if was_wrong and tokens[matched] in (rivals := self._rivals(matched)):
            rival = rivals.index(tokens[matched])
        return Lesson(known, min(matched, known), was_wrong, rival)

    def _drop_branches(self) -> None:
        if self._branches:
            self._core.close([line.ride for line in self._branches.values()])
            self._branches.clear()
