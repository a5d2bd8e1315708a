import asyncio
import logging
import time

import pytest

from paceline.gateway.http import app as loop_watchdog
from paceline.gateway.http.app import LoopWatchdog


async def block(records: list[logging.LogRecord]) -> None:
    end = time.monotonic() + 60
    while not records and time.monotonic() < end:
        pass


def test_a_blocked_loop_is_measured_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_watchdog, "STUCK_SECONDS", 0.1)
    lags: list[float] = []

    async def run() -> None:
        async with LoopWatchdog(lags.append).running():
            while not lags:
                await asyncio.sleep(0.01)
            await block(caplog.records)
            while max(lags) < 0.1:
                await asyncio.sleep(0.01)

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert "in block" in caplog.text  # the stack of the callback that blocks
