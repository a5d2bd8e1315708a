"""Who has more of a prompt's beginning than the worker it goes to. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from paceline.cluster.routing.kv_index import KvIndex
from paceline.cluster.routing.router import Prompt

LEAST_GAIN = 128
"""Tokens that a peer must have more: for fewer nobody is asked."""


@dataclass(frozen=True, slots=True)
class PeerHint:
    worker: str
    tokens: int
    """Of the prompt's first, that it has on its device."""


def find_peer(index: KvIndex, prompt: Prompt, chosen: str, workers: Collection[str]) -> PeerHint | None:
    """The one of `workers` that has most, if that is worth a word. What only lies in a peer's lower tiers is not counted: to
    load it there and send it takes longer than computing it, more often than not."""
    match = index.match(prompt.ids, prompt.salt)
    names = {index.number(name): name for name in workers}
    own, best = 0, PeerHint("", 0)
    for tokens, numbers in match.groups:
        for number in numbers:
            name = names.get(number)
            if name == chosen:
                own = tokens  # in whatever tier: it is loaded from there
            elif name is not None and (here := match.lower.get(number, (tokens,))[0]) > best.tokens:
                best = PeerHint(name, here)
    return best if best.tokens - own >= LEAST_GAIN else None
