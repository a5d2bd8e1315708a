import asyncio
import logging
import time

import pytest

from paceline.gateway.http import app as loop_watchdog
from paceline.gateway.http.app import LoopWatchdog


async def block(caplog: pytest.LogCaptureFixture) -> None:
    end = time.monotonic() + 5
    while "in block" not in caplog.text and time.monotonic() < end:
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
            while "in block" not in caplog.text:  # it may be busy with a stop of the process before
                await block(caplog)
                await asyncio.sleep(0.2)
            while max(lags) < 0.1:
                await asyncio.sleep(0.01)

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert "in block" in caplog.text  # the stack of the callback that blocks
