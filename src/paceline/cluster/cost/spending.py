"""Dollars that the workers of a cluster cost, per hour and per million generated tokens."""

from collections.abc import Sequence

from paceline.cluster.cost.cost import dollars_per_million
from paceline.core.worker_status import WorkerStatus

GONE = "gone"


def dollars_per_hour(workers: Sequence[WorkerStatus]) -> float | None:
    """Price of all workers that exist, also of those that start or drain; None if no pool has a price."""
    prices = [worker.price for worker in workers if worker.price is not None and worker.state != GONE]
    return sum(prices) if prices else None


def recent_cost(workers: Sequence[WorkerStatus], tokens_per_second: float) -> float | None:
    """Dollars per million tokens at this rate; None without prices or tokens."""
    price = dollars_per_hour(workers)
    return None if price is None or tokens_per_second <= 0.0 else dollars_per_million(price, tokens_per_second)


def cost_since_start(workers: Sequence[WorkerStatus], now: float) -> float | None:
    """Dollars per million tokens since the present processes started; None without prices or tokens.

    `now`: seconds since 1970."""
    present = [worker for worker in workers if worker.state != GONE]
    dollars = sum(
        worker.price * max(0.0, now - worker.life.started) / 3600.0
        for worker in present
        if worker.price is not None and worker.life.started is not None
    )
    tokens = sum(worker.generated for worker in present if worker.role == "target")
    return dollars / tokens * 1e6 if dollars > 0.0 and tokens else None
