"""Which peer a worker is told of."""

from paceline.cluster.routing.kv_index import LEAST_GAIN, KvIndex, PeerHint, find_peer
from paceline.cluster.routing.router import Prompt
from paceline.core.kv_events import BlocksStored, Tier
from paceline.kv.prefix_sums import PrefixSums

IDS = list(range(640))
WORKERS = ("a", "b", "c")


def index(**held: int) -> KvIndex:
    """By worker: tokens of the prompt on its device."""
    made = KvIndex(PrefixSums(1))
    for worker, tokens in held.items():
        store(made, worker, 0, tokens)
    return made


def store(index: KvIndex, worker: str, start: int, end: int, tier: Tier = "device", salt: str = "") -> None:
    keys = [f"{i}" for i in range(start // 16, end // 16)]
    parent = f"{start // 16 - 1}" if start else None
    index.apply(worker, BlocksStored(keys, parent, IDS[start:end], salt, tier))


def test_the_one_with_most_is_told() -> None:
    assert find_peer(index(a=0, b=320, c=480), Prompt(IDS), "a", WORKERS) == PeerHint("c", 480)
    assert find_peer(index(a=160, b=320), Prompt(IDS), "a", WORKERS) == PeerHint("b", 320)


def test_little_more_is_not_worth_a_word() -> None:
    assert find_peer(index(a=320, b=320), Prompt(IDS), "a", WORKERS) is None
    assert find_peer(index(a=320, b=320 + LEAST_GAIN - 16), Prompt(IDS), "a", WORKERS) is None
    assert find_peer(index(a=320, b=320 + LEAST_GAIN), Prompt(IDS), "a", WORKERS) == PeerHint("b", 320 + LEAST_GAIN)
    assert find_peer(index(a=640), Prompt(IDS), "a", WORKERS) is None


def test_who_may_not_be_asked_is_not_named() -> None:
    assert find_peer(index(b=320, c=480), Prompt(IDS), "a", ("a", "b")) == PeerHint("b", 320)


def test_own_lower_tiers_count_and_those_of_a_peer_do_not() -> None:
    made = index(a=160, b=320)
    store(made, "a", 160, 640, "disk")
    assert find_peer(made, Prompt(IDS), "a", WORKERS) is None
    made = index(b=160)
    store(made, "b", 160, 640, "host")
    assert find_peer(made, Prompt(IDS), "a", WORKERS) == PeerHint("b", 160)


def test_a_tenant_is_told_of_its_own_blocks_alone() -> None:
    made = KvIndex(PrefixSums(1))
    store(made, "b", 0, 640, salt="alice")
    assert find_peer(made, Prompt(IDS, "bob"), "a", WORKERS) is None
    assert find_peer(made, Prompt(IDS, "alice"), "a", WORKERS) == PeerHint("b", 640)
