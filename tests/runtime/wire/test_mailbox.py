"""Threads that hand work to one that waits on sockets."""

import select
import threading

from paceline.runtime.wire.mailbox import Mailbox
from paceline.runtime.wire.wakeup import Bell


def is_rung(bell: Bell) -> bool:
    return bool(select.select([bell.descriptor], [], [], 0.0)[0])


def test_a_bell_stays_rung_until_it_is_quieted() -> None:
    bell = Bell()
    assert not is_rung(bell)
    bell.ring()
    bell.ring()
    assert is_rung(bell)
    bell.quiet()
    assert not is_rung(bell)
    bell.quiet()  # waits for nothing
    bell.close()


def test_a_bell_that_nobody_hears_keeps_nobody_waiting() -> None:
    bell = Bell()
    for _ in range(100_000):  # more than a pipe holds
        bell.ring()
    bell.quiet()
    assert not is_rung(bell)
    bell.close()


def test_ringing_a_closed_bell_writes_into_no_other_file() -> None:
    bell = Bell()
    bell.close()
    other = Bell()  # takes over the closed one's numbers
    bell.ring()
    assert not is_rung(other)
    other.close()


def test_a_command_ends_the_wait_and_runs_on_the_waiting_thread() -> None:
    mailbox, ran = Mailbox(), []
    thread = threading.Thread(target=lambda: mailbox.put(lambda: ran.append(threading.current_thread())))
    thread.start()
    mailbox.wait((), 60.0)
    thread.join()
    assert ran == []
    mailbox.run_all()
    assert ran == [threading.current_thread()]
    mailbox.close()
    mailbox.put(lambda: None)  # too late, and no error
