"""Owners share memory and threads; none takes the place of the others."""

import asyncio
import threading

import pytest

from paceline.gateway.api.errors import Overloaded
from paceline.gateway.bodies.fair_share import FairShare, FairThreads, Owner

ANN, BEN = Owner("ann"), Owner("ben")


async def enter_in_order(share: FairShare, owner: Owner, order: list[str], amount: int = 1, cost: float = 1.0) -> None:
    leave = await share.enter(owner, amount, cost)
    order.append(owner.id)
    await asyncio.sleep(0)
    leave()


def test_a_flood_of_one_owner_delays_another_by_one_turn() -> None:
    async def run() -> list[str]:
        share, order = FairShare(1, 1), list[str]()
        leave = await share.enter(ANN, 1, 100.0)
        flood = [asyncio.create_task(enter_in_order(share, ANN, order, cost=100.0)) for _ in range(20)]
        small = [asyncio.create_task(enter_in_order(share, BEN, order)) for _ in range(5)]
        await asyncio.sleep(0)
        leave()
        await asyncio.gather(*flood, *small)
        return order

    assert asyncio.run(run())[:6] == ["ann", *["ben"] * 5]


def test_a_weight_scales_the_share() -> None:
    async def run() -> list[str]:
        share, order = FairShare(1, 1), list[str]()
        heavy = Owner("heavy", 3.0)
        await asyncio.gather(*(enter_in_order(share, owner, order) for owner in [ANN] * 30 + [heavy] * 30))
        return order

    assert 13 <= asyncio.run(run())[1:21].count("heavy") <= 16


def test_an_owner_holds_a_part_at_most() -> None:
    async def run() -> None:
        share = FairShare(8, 4)
        leave = await share.enter(ANN, 3)
        waits = asyncio.create_task(share.enter(ANN, 2))
        other = await share.enter(BEN, 4)
        await asyncio.sleep(0)
        assert (share.held, share.num_waiting) == (7, 1)
        leave()
        (await waits)()
        other()
        assert (share.held, share.num_waiting, share._served) == (0, 0, {})

    asyncio.run(run())


def test_the_next_owner_is_not_overtaken_by_smaller_work() -> None:
    async def run() -> None:
        share = FairShare(8, 8)
        leave = await share.enter(ANN, 5)
        large, small = (asyncio.create_task(share.enter(Owner(name), n)) for name, n in (("large", 8), ("small", 1)))
        await asyncio.sleep(0)
        assert share.held == 5
        leave()
        (await large)()
        (await small)()

    asyncio.run(run())


def test_what_waits_is_bounded_and_the_owner_with_the_most_is_refused() -> None:
    async def run() -> None:
        share = FairShare(1, 1, max_waiting=3)
        leave = await share.enter(ANN, 1)
        waiting = [asyncio.create_task(share.enter(ANN, 1)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="wait for their turn"):
            await share.enter(ANN, 1)
        other = asyncio.create_task(share.enter(BEN, 1))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await waiting[-1]
        leave()
        for task in asyncio.as_completed([other, *waiting[:2]]):
            (await task)()
        assert share.held == share.num_waiting == 0

    asyncio.run(run())


@pytest.mark.parametrize("is_granted", [False, True])
def test_a_cancelled_wait_leaves_nothing(is_granted: bool) -> None:
    async def run() -> None:
        share = FairShare(1, 1)
        leave = await share.enter(ANN, 1)
        gone, other = (asyncio.create_task(share.enter(owner, 1)) for owner in (ANN, BEN))
        await asyncio.sleep(0)
        if is_granted:  # in the turn of the loop in which it is cancelled
            leave()
        gone.cancel()
        other.cancel()
        if not is_granted:
            leave()
        await asyncio.gather(gone, other, return_exceptions=True)
        assert (share.held, share.num_waiting, share._served) == (0, 0, {})

    asyncio.run(run())


def test_work_that_has_not_started_ends_with_its_task() -> None:
    """A place is free again when its thread is, also if nothing waits for the result any more."""
    release, ran = threading.Event(), list[int]()

    async def run() -> None:
        threads = FairThreads(1, 1, "test")
        running = asyncio.create_task(threads.run(ANN, 1.0, release.wait, 10))
        waiting = asyncio.create_task(threads.run(BEN, 1.0, ran.append, 1))
        while not threads.num_waiting:
            await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert (threads.num_running, threads.num_waiting) == (1, 0)
        release.set()
        assert await threads.run(BEN, 1.0, lambda: 5) == 5
        while threads.num_running:
            await asyncio.sleep(0)

    asyncio.run(run())
    assert not ran
