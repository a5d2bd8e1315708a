"""For pools_gpu.py: parts of a run, each with a time limit."""

import argparse
import faulthandler
import os
import threading
import time
from collections.abc import Callable

from pools_gpu_draft import LIVE, STARTED, log
from pools_gpu_report import Report


class Parts:
    """Runs parts one after the other, each with a time limit."""

    def __init__(self, report: Report, options: argparse.Namespace) -> None:
        self._report, self._options = report, options
        self.num_failed = 0

    def run(self, name: str, work: Callable[[], object], limit: float | None = None) -> bool:
        """Run a part; False if it failed or there was no time. A part that hangs ends the process."""
        options, report = self._options, self._report
        if time.perf_counter() - STARTED > options.budget:
            report.notes.append(f"{name}: skipped, {options.budget:.0f} s were over")
            return False
        timer = threading.Timer(limit or options.limit, self._give_up, (name, limit or options.limit))
        timer.daemon = True
        timer.start()
        try:
            work()
        except Exception as error:
            self.num_failed += 1
            report.notes.append(f"{name}: {error!r}")
            log(f"{name} failed: {error!r}")
            return False
        finally:
            timer.cancel()
            report.save(options.out)
        return True

    def _give_up(self, name: str, seconds: float) -> None:
        faulthandler.dump_traceback(all_threads=True)
        self._report.notes.append(f"{name}: timed out after {seconds:.0f} s; the run ended")
        self._report.save(self._options.out)
        print(self._report.table(), flush=True)
        for one in LIVE:
            one.kill()
        os._exit(3)
