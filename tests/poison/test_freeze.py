"""A gateway that is suspended for longer than a worker waits for it."""

import os
import signal
import threading

import pytest

from paceline.worker.server.gateways import GATEWAY_TIMEOUT
from tests.gateway.process import server_process
from tests.poison.attack import run_streams


@pytest.mark.slow
def test_streams_survive_a_freeze_of_the_gateway() -> None:
    with server_process(max_num_seqs=8) as process:
        plain = run_streams(process.url, 8, 150)
        pid, pause = process.popen.pid, threading.Event()

        def freeze() -> None:
            pause.wait(0.5)
            os.kill(pid, signal.SIGSTOP)
            pause.wait(GATEWAY_TIMEOUT + 3.0)
            os.kill(pid, signal.SIGCONT)

        freezer = threading.Thread(target=freeze)
        freezer.start()
        frozen = run_streams(process.url, 8, 150)
        freezer.join()
        assert frozen.longest_gap > GATEWAY_TIMEOUT
        assert frozen.num_lost == 0
        assert frozen.num_different(plain) == 0
