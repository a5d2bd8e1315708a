"""A cluster under steady traffic that is scaled and whose draft is swapped: no stream lost or different, and memory stays flat.

    make soak                                    # an hour, a change every two minutes, models of random weights
    make soak ARGS="--minutes 6 --every 20"

`paceline up` starts a target, a draft worker, and a draft worker whose draft is swapped; `paceline serve` is the gateway. The
script types `paceline scale` and `paceline draft swap`. Exit status 1: a stream was lost or different, something was left,
or a process that lived through the run grew by more than 2% after the first sixth of it.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from chaos_cluster import LIMITS, Gateway, MemoryLog, get, held, leaks, mark, models, orphans, until
from chaos_load import Results, Streams, cases, plain

from paceline.core.cluster_config import cluster_config
from paceline.deploy.processes.state import StateFolder

GROWTH = 0.02
START_SECONDS = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=120.0, help="seconds between two changes")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two streams of a client")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        failures = run(options, Path(folder))
    for failure in failures:
        print(f"FAILED: {failure}")
    sys.exit(1 if failures else 0)


def run(options: argparse.Namespace, folder: Path) -> list[str]:
    """Runs the cluster under load and prints the report. Returns what must not happen and did."""
    mark(folder)
    target, first, second = models(folder / "models")
    common = {"devices": ["cpu"], "limits": LIMITS}
    targets = {"name": "target", "role": "target", "model": target, "speculation": {"depth": "fixed", "max_depth": 3}}
    drafts = [{"name": name, "role": "draft", "model": first, **common} for name in ("draft", "swapped")]
    config = {"name": "soak", "state_dir": str(folder / "state"), "pools": [{**targets, **common}, *drafts]}
    file, results, num_changes = str(folder / "cluster.yaml"), Results(), 0
    Path(file).write_text(json.dumps(config))  # JSON is YAML
    scale, swap = ("scale", "target"), ("draft", "swap", "swapped")
    changes = itertools.cycle([(*scale, "2"), (*swap, second), (*scale, "1"), (*swap, first)])
    with ExitStack() as stack:
        _command("up", file)
        stack.callback(_command, "down", file)
        supervisor = StateFolder.of(cluster_config(config)).read()
        assert supervisor is not None
        gateway = Gateway(config, folder)
        stack.callback(gateway.close)
        url = f"http://127.0.0.1:{gateway.port}"
        until(lambda: get(f"{url}/ready") != "", START_SECONDS, "the gateway")
        expected = {case: plain(url, case) for case in cases(0, 12, options.tokens)}
        streams = Streams(url, expected, results, options.streams, "soak", options.pause)
        log = stack.enter_context(MemoryLog(lambda: _pids(gateway.pid, supervisor.pid)))
        end = time.monotonic() + 60 * options.minutes
        while time.monotonic() + options.every < end:
            time.sleep(options.every)
            change = next(changes)
            _command(*change, *(("--seconds", "0", "--wait", "3600") if change[0] == "draft" else ()), "--config", file)
            num_changes += 1
        time.sleep(max(0.0, end - time.monotonic()))
        streams.join(START_SECONDS)
        left = leaks(lambda: held(url))
    left += leaks(orphans)
    print(
        f"\n{options.streams} streams of {options.tokens} tokens, {options.minutes:g} minutes, {num_changes} changes\n"
    )
    print("| streams | tokens | lost | different | longest gap |\n|---|---|---|---|---|")
    lost, different = len(results.lost), len(results.different)
    print(f"| {len(results.spans)} | {results.tokens} | {lost} | {different} | {results.longest_gap():.1f} s |\n")
    shown = [60 * options.minutes * part for part in (1 / 6, 1 / 2, 1)]
    print("\n".join(log.table(shown)))
    grown = [f"{name} grew by {growth:.1%}" for name, growth in log.growths(shown).items() if growth > GROWTH]
    return [*results.lost[:5], *results.different[:5], *left, *grown]


def _command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "paceline", *words], check=True, stdout=subprocess.DEVNULL)


def _pids(*parents: int) -> dict[str, int]:
    """The gateway, the supervisor, and the processes below them."""
    found = dict(zip(("gateway", "supervisor"), parents, strict=True))
    for name, pid in list(found.items()):
        with suppress(psutil.Error):
            for child in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error):
                    found[f"{name}: {_name(child.cmdline())} {child.pid}"] = child.pid
    return found


def _name(command: list[str]) -> str:
    """The worker that a command runs, or else its module."""
    with suppress(ValueError, KeyError, TypeError, IndexError):
        return str(json.loads(command[-1])["name"])
    return next((word for word in command if word.startswith("paceline.")), " ".join(command)[-40:])


if __name__ == "__main__":
    main()
