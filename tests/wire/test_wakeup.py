import select
import threading

from paceline.wire.transport import CommandQueue, Wakeup


def is_readable(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup.fd], [], [], 0.0)[0])


def test_wakeup_stays_readable_until_cleared() -> None:
    wakeup = Wakeup()
    assert not is_readable(wakeup)
    wakeup.notify()
    wakeup.notify()
    assert is_readable(wakeup)
    wakeup.clear()
    assert not is_readable(wakeup)
    wakeup.clear()  # does not block
    wakeup.close()


def test_notify_never_blocks() -> None:
    wakeup = Wakeup()
    for _ in range(100_000):  # more than a pipe holds
        wakeup.notify()
    wakeup.clear()
    assert not is_readable(wakeup)
    wakeup.close()


def test_notify_after_close_writes_to_no_other_file() -> None:
    wakeup = Wakeup()
    wakeup.close()
    other = Wakeup()  # reuses the closed descriptors' numbers
    wakeup.notify()
    assert not is_readable(other)
    other.close()


def test_command_ends_the_wait_and_runs_on_the_waiting_thread() -> None:
    commands, ran = CommandQueue(), []
    thread = threading.Thread(target=lambda: commands.put(lambda: ran.append(threading.current_thread())))
    thread.start()
    commands.wait((), 60.0)
    thread.join()
    assert ran == []
    commands.run_all()
    assert ran == [threading.current_thread()]
    commands.close()
    commands.put(lambda: None)  # has no effect, raises nothing
