"""A rank that never finishes its first command: `paceline.models.parallel.process`, as if its GPU waited for rank 0."""

import sys
import time

from paceline.models.parallel import process as rank_process


def sleep(self: rank_process.Caches, command: object) -> None:
    time.sleep(600)


if __name__ == "__main__":
    rank_process.ORPHAN_SECONDS = 1
    rank_process.Caches.execute = sleep  # type: ignore[method-assign]
    sys.exit(rank_process.main(*map(int, sys.argv[1:])))
