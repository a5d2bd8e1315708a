"""Drafts from earlier text: the proposers `suffix` and `ngram`, and the index of substrings that `suffix` reads.

`SuffixProposer` drafts continuations of the newest tokens, from the same text and from recent outputs of the same tenant. A
context of L tokens that was followed c times by a token, and n times by any, gives that token

    P = c / (n + ESCAPE / L)

and leaves the rest to the next shorter context that occurred. The probability of a node is the product along its path.

`SuffixAutomaton` is an index of every substring of a text with its number of occurrences, in space linear in the text. A state
is a set of substrings that end at the same positions; `length` is the length of the longest. Its suffix link leads to the
longest suffix that also occurs elsewhere. Appending a token takes amortised constant time plus the update of counts.

`NgramProposer` (prompt lookup) drafts what followed the newest tokens when they last occurred in the text.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest

from paceline.speculation import ProposerTraits, SequenceProgress
from paceline.speculation.drafts import DraftBatch, DraftTree

ROOT = 0
MAX_COUNTED = 32
"""Suffixes whose count an appended token raises. Only a text that repeats one token has more, and all of its suffixes have
the same continuation."""


class SuffixAutomaton:
    """Grows by tokens and never shrinks. `restart` starts another text: no substring spans two texts."""

    def __init__(self) -> None:
        self._lengths = [0]
        self._links = [-1]
        self._next: list[dict[int, int]] = [{}]
        self._counts = [0]
        self._last = ROOT
        self._size = 0

    def __len__(self) -> int:
        """The number of tokens appended."""
        return self._size

    def restart(self) -> None:
        self._last = ROOT

    def extend(self, tokens: Iterable[int]) -> None:
        counts, links, lengths, edges = self._counts, self._links, self._lengths, self._next
        last, size = self._last, self._size
        for token in tokens:
            followers = edges[last]
            if token in followers:  # only after `restart`: an earlier text starts the same
                known = followers[token]
                last = known if lengths[known] == lengths[last] + 1 else self._split(last, token, known)
            else:
                new, state = len(lengths), last
                lengths.append(lengths[last] + 1)
                links.append(ROOT)
                edges.append({})
                counts.append(0)
                while state != -1 and token not in followers:
                    followers[token] = new
                    state = links[state]
                    followers = edges[state]
                if state != -1:
                    known = followers[token]
                    is_whole = lengths[known] == lengths[state] + 1
                    links[new] = known if is_whole else self._split(state, token, known)
                last = new
            size += 1
            state = last
            for _ in range(MAX_COUNTED):
                if state == ROOT:
                    break
                counts[state] += 1
                state = links[state]
        self._last, self._size = last, size

    @property
    def end(self) -> tuple[int, int]:
        """(state, length) of the whole text; its `contexts` are the suffixes that occurred before."""
        return self._last, self._lengths[self._last]

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(state, length) of the longest suffix of `tokens` that occurs in the texts; (root, 0) if none does."""
        state = length = 0
        for token in tokens:
            while state != ROOT and token not in self._next[state]:
                state = self._links[state]
                length = self._lengths[state]
            if token in self._next[state]:
                state = self._next[state][token]
                length += 1
        return state, length

    def contexts(self, state: int, length: int) -> Iterator[tuple[int, Mapping[int, int]]]:
        """(length, {follower: its state}) of `state` and then of its suffixes, down to one token. The end of the text has no
        follower, but its suffixes do."""
        while state != ROOT:
            if self._next[state]:
                yield length, self._next[state]
            state = self._links[state]
            length = self._lengths[state]

    def count(self, state: int) -> int:
        """Occurrences of the substrings of `state`."""
        return self._counts[state]

    def _split(self, state: int, token: int, known: int) -> int:
        """Move the substrings of `known` that are reached from `state` to a new state: they now end at other positions."""
        edges, links = self._next, self._links
        clone = len(links)
        self._lengths.append(self._lengths[state] + 1)
        self._counts.append(self._counts[known])
        edges.append(dict(edges[known]))
        links.append(links[known])
        links[known] = clone
        while state != -1 and edges[state].get(token) == known:
            edges[state][token] = clone
            state = links[state]
        return clone


CONTEXT = 16
"""Tokens that are looked up in recent outputs; as many prompt tokens are kept before each output."""
MAX_TOKENS = 65_536
"""Tokens of recent outputs of all salts together; one takes about half a kilobyte."""
ESCAPE = 2.0
MIN_PROBABILITY = 0.1
"""Probability below which a node is not worth a row of the target's pass."""
SURE = 0.7
"""Expected accepted share of a draft from recent outputs above which the sequence's own text is not looked up."""
MAX_CHILDREN = 4
MAX_FOLLOWERS = 64
"""Different followers above which a context predicts nothing."""


def grow(automaton: SuffixAutomaton, context: tuple[int, int], budget: int, is_chain: bool = False) -> DraftTree:
    """The `budget` most probable nodes after `context` (state, length), best first, none below `MIN_PROBABILITY`. With
    `is_chain` every node gets only its most probable child."""
    if is_chain:
        return _grow_chain(automaton, context, budget)
    tokens: list[int] = []
    parents: list[int] = []
    expected = 0.0
    leaves: list[tuple[float, int, int, int, int, int]] = []  # (-probability, order, token, state, length, parent)

    def branch(state: int, length: int, probability: float, parent: int) -> None:
        taken: set[int] = set()
        for size, followers in automaton.contexts(state, length):
            if len(followers) > MAX_FOLLOWERS:
                return
            fresh = [(automaton.count(after), token, after) for token, after in followers.items() if token not in taken]
            share = probability / (sum(count for count, _, _ in fresh) + ESCAPE / size)
            for count, token, after in nlargest(MAX_CHILDREN, fresh):
                taken.add(token)
                if count * share >= MIN_PROBABILITY:
                    heappush(leaves, (-count * share, len(leaves), token, after, size + 1, parent))
            probability = share * ESCAPE / size
            if probability < MIN_PROBABILITY:
                return

    branch(*context, 1.0, -1)
    while leaves and len(tokens) < budget:
        negative, _, token, state, length, parent = heappop(leaves)
        tokens.append(token)
        parents.append(parent)
        expected -= negative
        branch(state, length, -negative, len(tokens) - 1)
    return DraftTree(tuple(tokens), tuple(parents), expected)


def _grow_chain(automaton: SuffixAutomaton, context: tuple[int, int], budget: int) -> DraftTree:
    tokens: list[int] = []
    expected, probability = 0.0, 1.0
    while len(tokens) < budget:
        child = _best_child(automaton, context, probability)
        if child is None:
            break
        probability, token, context = child
        tokens.append(token)
        expected += probability
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), expected)


def _best_child(
    automaton: SuffixAutomaton, context: tuple[int, int], probability: float
) -> tuple[float, int, tuple[int, int]] | None:
    """(probability, token, context) of the child of the longest context that has a probable one."""
    count_of = automaton.count
    taken: set[int] = set()
    for size, followers in automaton.contexts(*context):
        if len(followers) > MAX_FOLLOWERS:
            return None
        fresh = [(count_of(after), token, after) for token, after in followers.items() if token not in taken]
        share = probability / (sum([count for count, _, _ in fresh]) + ESCAPE / size)
        if fresh:
            count, token, after = max(fresh)
            if count * share >= MIN_PROBABILITY:
                return count * share, token, (after, size + 1)
            taken.update([token for _, token, _ in nlargest(MAX_CHILDREN, fresh)])
        probability = share * ESCAPE / size
        if probability < MIN_PROBABILITY:
            return None
    return None


class RecentOutputs:
    """Texts by salt. Each salt has a young index that grows and an old one. A full young index replaces the old one, whose
    texts are forgotten. Above the total bound the least recently used salt is forgotten first."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        if max_tokens < 4:
            raise ValueError(f"recent outputs need max_tokens >= 4, got {max_tokens}")
        self._max_tokens = max_tokens
        self._young_tokens = max_tokens // 4
        self._by_salt: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()  # least recently used first
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(self, salt: str, text: Sequence[int]) -> None:
        text = text[-self._young_tokens :]
        if not text:
            return
        indices = self._by_salt.setdefault(salt, [SuffixAutomaton()])
        self._by_salt.move_to_end(salt)
        if len(indices[0]) + len(text) > self._young_tokens:
            indices.insert(0, SuffixAutomaton())
            self._forget(indices, keep=2)
        indices[0].restart()
        indices[0].extend(text)
        self._num_tokens += len(text)
        while self._num_tokens > self._max_tokens:
            oldest = next(iter(self._by_salt))
            self._forget(self._by_salt.pop(oldest), keep=0)

    def indices(self, salt: str) -> Sequence[SuffixAutomaton]:
        """Indices of this salt's texts, the youngest first."""
        indices = self._by_salt.get(salt)
        if indices is None:
            return ()
        self._by_salt.move_to_end(salt)
        return indices

    def _forget(self, indices: list[SuffixAutomaton], keep: int) -> None:
        while len(indices) > keep:
            self._num_tokens -= len(indices.pop())


@dataclass(slots=True)
class _Sequence:
    progress: SequenceProgress
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    has_drafted: bool = False


class SuffixProposer:
    """Drafts a tree of the most probable continuations; longer and more frequent matches give larger trees.

    Outputs are kept under their `cache_salt` when their sequence closes, and never drafted for another salt. A sequence that
    was never drafted for is neither indexed nor kept.
    """

    traits = ProposerTraits()

    def __init__(self, max_tokens: int = MAX_TOKENS, is_chain: bool = False) -> None:
        """`max_tokens` limits the recent outputs to keep, in addition to the texts of running sequences. `is_chain` drafts
        chains, for a target that verifies no trees."""
        self._is_chain = is_chain
        self._outputs = RecentOutputs(max_tokens)
        self._sequences: dict[int, _Sequence] = {}

    @property
    def num_kept(self) -> int:
        """Tokens of closed sequences that are kept."""
        return self._outputs.num_tokens

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        for progress in batch:
            sequence = self._sequences.get(progress.sequence_id)
            if sequence is None:
                self._sequences[progress.sequence_id] = _Sequence(progress)
            else:
                sequence.progress = progress

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        found = ((sequence_id, self._sequences.get(sequence_id)) for sequence_id in sequence_ids)
        return DraftBatch.trees((sequence_id, self._draft(sequence)) for sequence_id, sequence in found if sequence)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None and sequence.has_drafted:
                self.keep(sequence.progress)

    def _draft(self, sequence: _Sequence) -> DraftTree:
        progress = sequence.progress
        if progress.depth == 0:
            return DraftTree()
        sequence.has_drafted = True
        best = DraftTree()
        # HAZARD: a request with the same seed had the same noise. With rejection sampling a draft made of its text is not
        # independent of the draws that accept it. The sequence's own past is: its noise was that of other positions.
        if progress.verification != "rejection" or progress.sampling.is_greedy:
            recent = progress.ids[-CONTEXT:]
            for index in self._outputs.indices(progress.cache_salt):
                other = grow(index, index.match(recent), progress.depth, self._is_chain)
                best = max(best, other, key=lambda tree: tree.expected)
        if best.expected > SURE * progress.depth:
            return best  # a text that repeats an earlier one is not indexed
        sequence.text.extend(progress.ids[len(sequence.text) :])
        own = grow(sequence.text, sequence.text.end, progress.depth, self._is_chain)
        return own if own.expected >= best.expected else best

    def keep(self, progress: SequenceProgress) -> None:
        """Keep the output of a sequence that ends. `close` does it for those that were drafted for."""
        if len(progress.ids) > progress.num_prompt:
            start = max(0, progress.num_prompt - CONTEXT)
            self._outputs.add(progress.cache_salt, progress.ids[start:])


@dataclass(slots=True)
class _Index:
    """The position after the last occurrence of each n-gram of a sequence."""

    progress: SequenceProgress
    num_indexed: int = 0
    """Tokens whose n-grams are in `after`; without the newest, so that a suffix does not find itself."""
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramProposer:
    """Matches the longest suffix of `max_ngram` down to `min_ngram` tokens. It needs no model and little memory."""

    traits = ProposerTraits()

    def __init__(self, min_ngram: int = 2, max_ngram: int = 4) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._indices: dict[int, _Index] = {}

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        for progress in batch:
            index = self._indices.get(progress.sequence_id)
            if index is None:
                self._indices[progress.sequence_id] = _Index(progress)
            else:
                index.progress = progress

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        indices = ((sequence_id, self._indices.get(sequence_id)) for sequence_id in sequence_ids)
        return DraftBatch.chains((sequence_id, self._lookup(index)) for sequence_id, index in indices if index)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._indices.pop(sequence_id, None)

    def _lookup(self, index: _Index) -> list[int]:
        ids, depth = index.progress.ids, index.progress.depth
        if depth == 0:
            return []
        self._extend(index)
        for size in self._sizes:
            start = index.after.get(tuple(ids[-size:])) if size < len(ids) else None
            if start is not None:
                draft: list[int] = []
                for i in range(start, start + depth):
                    # Past the end the draft continues from itself: a loop in the text is repeated
                    draft.append(ids[i] if i < len(ids) else draft[i - len(ids)])
                return draft
        return []

    def _extend(self, index: _Index) -> None:
        ids, after = index.progress.ids, index.after
        for size in self._sizes:
            start = max(index.num_indexed, size, 1)  # the end of the first new n-gram
            if start < len(ids):
                columns = [ids[start - size + i : len(ids) - size + i] for i in range(size)]
                after.update(zip(zip(*columns, strict=True), range(start, len(ids)), strict=True))
        index.num_indexed = len(ids)
