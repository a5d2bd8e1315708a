"""Drafting state of one sequence at a draft worker: its committed tokens, the draft of this round, and branches for the next.

The main branch continues after the offered draft: if all of it is accepted and the next token is the branch's own, the rest is
the next draft. Every other prepared outcome has a branch of its own, forked from the main branch. The branch of the actual
outcome becomes the main branch, and all remaining branches are closed. A draft is a function of the text and of noise keyed by
position, so a draft made ahead equals the draft made on demand.

`DraftBackend` is the interface between a draft worker and the model that drafts for it: one pass computes the next token of
many branches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paceline.drafting.branches import BranchKey, DraftDistribution
from paceline.policy.pairing.outcomes import Outcome
from paceline.speculation.proposers.model import DraftSequence, SequenceParams


@dataclass(frozen=True, slots=True)
class DraftedToken:
    token: int
    alternatives: tuple[int, ...] = ()
    """Tokens that the target may choose instead, most likely first. Under rejection `token` may be among them."""
    distribution: DraftDistribution | None = None
    gap: float | None = None
    """Score of `token` less the best score of all other tokens, in logits with the target's noise. None if it is unknown, as
    under rejection."""


@dataclass(slots=True, eq=False)
class DraftBranch(DraftSequence):
    """A text that a draft worker drafts: the main branch of a sequence, or one for a possible outcome."""

    chain: list[DraftedToken] = field(default_factory=list, init=False)
    """Drafted tokens after the committed tokens. In a branch they follow the outcome that it assumes."""
    is_ranked: bool = field(default=True, init=False)
    """Whether drafted tokens need alternatives and score gaps, from which outcomes are prepared. A backend may rank the tokens
    of other branches too."""
    num_idle_passes: int = field(default=0, init=False)
    """Passes since the last drafted token."""

    def append(self, drafted: DraftedToken | None) -> None:
        if drafted is None:
            self.num_idle_passes += 1
            return
        self.num_idle_passes = 0
        self.chain.append(drafted)
        self.ids.append(drafted.token)


class DraftBackend(Protocol):
    """Computes drafted tokens. It computes nothing for a branch before the first `step` with it."""

    def step(self, branches: Sequence[DraftBranch]) -> list[DraftedToken | None]:
        """The token after each branch's `ids`. None if the prompt is not computed yet, or if the cache has no free block."""
        ...

    def fork(self, branch: DraftBranch, child: DraftBranch) -> None:
        """Share with `child` the cache of the tokens that the two branches have in common."""
        ...

    def truncate(self, branch: DraftBranch, length: int) -> None:
        """Drop all tokens of `branch` after `length`. Close its children first."""
        ...

    def close(self, branches: Sequence[DraftBranch]) -> None:
        """Free the blocks of these branches."""
        ...


Plan = Callable[[int, int, bool, Sequence[float | None]], Iterable[Outcome]]
"""(tokens offered, depth, whether the main branch continues, score gaps of the drafted tokens) -> outcomes to prepare."""

MAX_IDLE_PASSES = 64
"""Passes without a token (a long prompt, no free block) after which the round is answered with the tokens drafted so far."""


class VerifyOutcome(NamedTuple):
    """What the committed tokens show about the main branch: of `known` drafted tokens the first `accepted` were right."""

    known: int
    accepted: int
    was_wrong: bool
    alternative: int | None
    """Index of the committed token among the wrong token's alternatives. None if it is not among them, or if no token was
    wrong."""
    gaps: tuple[float | None, ...]
    """Score gaps of the `known` tokens."""


class DraftedSequence:
    """State of one open sequence. Close its `branches` in the backend when dropping it."""

    def __init__(self, branch: DraftBranch, backend: DraftBackend, new_id: Callable[[], int]) -> None:
        self._backend, self._new_id = backend, new_id
        self._main = branch
        self._branches: dict[BranchKey, DraftBranch] = {}
        self._planned: list[Outcome] | None = None
        self.round = 0
        self.depth = 0
        self.is_answered = True
        self.was_ready = False
        """Whether the draft of this round was complete when it was requested."""
        self.num_ready: int | None = None
        """Tokens of this round's draft that were drafted ahead. None if the last round had no answer to continue."""
        self.num_offered = 0
        """Tokens in the answer to this round."""
        self.num_alternatives = 0
        """Alternatives that the target verifies in the same step as the draft of this round. 0 under rejection."""
        self._is_cut = False
        self._announced: dict[BranchKey, bool] = {}
        """Outcomes announced to the target. The value says whether their draft was sent."""

    @property
    def params(self) -> SequenceParams:
        return self._main.params

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._main.num_committed

    @property
    def branches(self) -> list[DraftBranch]:
        return [self._main, *self._branches.values()]

    @property
    def draft(self) -> list[DraftedToken]:
        """Draft of this round, as far as it is computed."""
        return self._main.chain[: self.depth]

    @property
    def offered_tokens(self) -> list[int]:
        """Tokens in the answer to this round."""
        return [drafted.token for drafted in self._main.chain[: self.num_offered]]

    @property
    def gaps(self) -> list[float | None]:
        """Score gaps of the tokens in the answer to this round."""
        return [drafted.gap for drafted in self._main.chain[: self.num_offered]]

    @property
    def draft_gaps(self) -> list[float | None]:
        """Score gaps of the draft of this round, as far as it is computed."""
        return [drafted.gap for drafted in self.draft]

    def advance(
        self, round_: int, tokens: Sequence[int], depth: int, num_alternatives: int = 0
    ) -> VerifyOutcome | None:
        """Commit `tokens` and start `round_` of `depth` tokens. Returns the outcome of the last round, if it had a draft."""
        chain = self._main.chain
        matched, both = 0, min(len(tokens), len(chain))
        while matched < both and chain[matched].token == tokens[matched]:
            matched += 1
        outcome = self._outcome(tokens, matched)
        num_offered, num_old = self.num_offered, max(0, self.num_offered - matched)
        base = self.length
        key = BranchKey(len(tokens) - 1, tokens[-1]) if tokens and matched >= len(tokens) - 1 else None
        branch = None if key is None else self._branches.pop(key, None)
        if matched == len(tokens) - 2:  # an alternative was accepted, and the last token follows it
            branch = self._branches.pop(BranchKey(matched, tokens[matched]), None)
        self._drop_branches()
        if branch is not None:
            self._backend.close([self._main])
            self._main, num_old = branch, 0
            if key is None:
                self._continue(branch, base + len(tokens) - 1, tokens[-1])
        elif matched == len(tokens):
            del chain[:matched]
        else:
            self._backend.truncate(self._main, base + matched)
            self._main.ids.extend(tokens[matched:])
            self._main.chain = []
        self._main.num_committed = base + len(tokens)
        self._main.num_idle_passes = 0
        self._planned = None
        self._announced.clear()
        self.round, self.depth, self.num_offered = round_, depth, 0
        self.num_alternatives = 0 if self.params.needs_distribution else num_alternatives
        self.is_answered = self._is_cut = False
        self.was_ready = len(self._main.chain) >= depth
        num_drafted = min(len(self._main.chain), depth)
        self.num_ready = max(0, num_drafted - num_old) if num_offered else None
        return outcome

    @property
    def is_due(self) -> bool:
        """Whether the round is unanswered and its draft is complete, or will not become longer."""
        main = self._main
        is_complete = self._is_cut or len(main.chain) >= self.depth
        return not self.is_answered and (is_complete or main.num_idle_passes >= MAX_IDLE_PASSES)

    def cut(self) -> None:
        """Answer the round with what is drafted: the next token is not worth its pass."""
        self._is_cut = True

    def mark_answered(self) -> None:
        self.is_answered = True
        self.num_offered = len(self.draft)

    @property
    def urgent_branch(self) -> DraftBranch | None:
        """The branch that the target waits for."""
        return None if self.is_answered or self.is_due else self._main

    def branches_ahead(self, plan: Plan) -> Iterator[DraftBranch]:
        """Branches to draft ahead, most likely first. Forks planned branches as soon as their tokens are known."""
        if not self.is_answered or self.num_offered == 0:
            return
        continues = not self.params.needs_distribution
        self._fork(self._plan(plan))
        limit = self.num_offered + 1 + (self.depth if continues else 0)
        branches = [branch for branch in self.branches if branch.num_idle_passes < MAX_IDLE_PASSES]
        incomplete = [b for b in branches if len(b.chain) < (limit if b is self._main else self.depth)]
        # When all are complete, a branch continues like the main branch that it may become
        yield from incomplete or [b for b in branches if b is not self._main and len(b.chain) < 2 * self.depth + 1]

    def start_branches(self, plan: Plan) -> list[BranchKey]:
        """Outcomes that will be prepared after the answer to this round; they count as announced."""
        if not self.num_offered or self.params.needs_distribution:
            return []
        keys = self.keys(self._plan(plan))
        self._announced.update((key, False) for key in keys)
        return keys

    def unsent_branches(self, announces: bool = True) -> Iterator[tuple[BranchKey, list[DraftedToken]]]:
        """Outcomes to send to the target, each once with its draft. With `announces` an outcome is yielded before, without
        tokens, when its draft starts; not the outcome after full acceptance, which is always drafted.

        None under rejection: with its distributions a draft takes kilobytes. Those drafts wait for their request.
        """
        chain, num_offered = self._main.chain, self.num_offered
        if not self.is_answered or not num_offered or self.params.needs_distribution:
            return
        started = [(key, branch.chain) for key, branch in self._branches.items()]
        if len(chain) > num_offered:
            started.append((BranchKey(num_offered, chain[num_offered].token), chain[num_offered + 1 :]))
        for key, drafted in started:
            if len(drafted) >= self.depth:
                if self._announced.get(key) is not True:
                    self._announced[key] = True
                    yield key, drafted[: self.depth]
            elif announces and key not in self._announced and key.accepted < num_offered:
                self._announced[key] = False
                yield key, []

    def keys(self, outcomes: Iterable[Outcome]) -> list[BranchKey]:
        """Those of `outcomes` that the draft has a token for."""
        return [key for outcome in outcomes if (key := self._key(outcome)) is not None]

    def drop_ahead(self) -> None:
        """Free the blocks of all branches that were drafted ahead."""
        self._drop_branches()
        self._planned = []

    def _plan(self, plan: Plan) -> list[Outcome]:
        """Outcomes that are planned and have no branch yet."""
        if self._planned is None:
            gaps = [drafted.gap for drafted in self._main.chain[: self.num_offered + 1]]
            self._planned = list(plan(self.num_offered, self.depth, not self.params.needs_distribution, gaps))
        return self._planned

    def _continue(self, branch: DraftBranch, length: int, token: int) -> None:
        """Append `token` to the first `length` tokens of `branch`, after which its own drafts begin."""
        if branch.chain and branch.chain[0].token == token:
            del branch.chain[0]
        else:
            self._backend.truncate(branch, length)
            branch.ids.append(token)
            branch.chain = []

    def _key(self, outcome: Outcome) -> BranchKey | None:
        """The branch key of an outcome. None if the draft has no such alternative, or has not computed that position yet."""
        if outcome.accepted >= len(self._main.chain):
            return None
        alternatives = self._alternatives(outcome.accepted)
        if outcome.alternative >= len(alternatives):
            return None
        return BranchKey(outcome.accepted, alternatives[outcome.alternative])

    def _fork(self, planned: list[Outcome]) -> None:
        main = self._main
        for outcome in planned:
            key = self._key(outcome)
            if key is not None:
                ids = [*main.ids[: self.length + outcome.accepted], key.token]
                child = DraftBranch(self._new_id(), self.params, ids, self.length)
                self._backend.fork(main, child)
                self._branches[key] = child
        # The logits after the last draft of the round are not computed yet
        self._planned = [outcome for outcome in planned if outcome.accepted >= len(main.chain)]

    def _alternatives(self, position: int) -> list[int]:
        drafted = self._main.chain[position]
        if self.params.needs_distribution and position == self.num_offered:
            return list(drafted.alternatives)
        return [token for token in drafted.alternatives if token != drafted.token]

    def _outcome(self, tokens: Sequence[int], matched: int) -> VerifyOutcome | None:
        covered = min(len(self._main.chain), len(tokens))
        known = min(covered, self.num_offered) if self.params.needs_distribution else covered
        if self.num_offered == 0 or known == 0:
            return None
        was_wrong, alternative = matched < covered, None
        if was_wrong and tokens[matched] in (alternatives := self._alternatives(matched)):
            alternative = alternatives.index(tokens[matched])
        gaps = tuple(drafted.gap for drafted in self._main.chain[:known])
        return VerifyOutcome(known, min(matched, known), was_wrong, alternative, gaps)

    def _drop_branches(self) -> None:
        if self._branches:
            self._backend.close(list(self._branches.values()))
            self._branches.clear()
