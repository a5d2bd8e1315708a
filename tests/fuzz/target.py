"""What a fuzz target is, and where all of them are.

A target is a function of bytes. It returns whether the code under test accepts the input or refuses it with a typed error, and
raises anything else for a finding. Three programs call it: atheris and hypothesis (`make fuzz`), and the replay of the kept
corpus (`make test`).
"""

import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from types import FrameType

CORPUS = Path(__file__).parent / "corpus"
"""Kept inputs: a folder for each target. A file whose name begins with `seed` is accepted."""
SECONDS, MEGABYTES = 5, 500
"""Most processor time and memory of one input."""
MODULES = {
    "http": "http",
    "bodies": "answers",
    "resume": "answers",
    "formats": "formats",
    "codec": "codec",
    "config": "config",
    "template": "model_files",
    "tokenizer": "model_files",
    "tokenizer_config": "model_files",
    "gguf": "model_files",
    "safetensors": "model_files",
    "index": "model_files",
    "model_config": "model_files",
    "eagle": "drafts",
    "eagle_weights": "drafts",
    "medusa": "drafts",
    "distilled": "drafts",
    "speculators": "drafts",
    "sglang": "drafts",
    "dspark": "drafts",
    "pickled_medusa": "drafts",
}
"""Modules of `tests/fuzz/targets` by target. They are imported by the process that runs the target alone."""


@dataclass(frozen=True, slots=True)
class FuzzTarget:
    run: Callable[[bytes], bool]
    """Returns whether the input is accepted. Raises for a finding."""
    mutate: Callable[[bytes, Random], bytes]
    """Changes an input so that it stays near a well-formed one."""
    max_bytes: int = 4096


class TooSlow(BaseException):
    """An input took more than the limit of processor time."""


class TooLarge(Exception):
    """An input took more than the limit of memory."""


def load(name: str) -> FuzzTarget:
    found: FuzzTarget = import_module(f"tests.fuzz.targets.{MODULES[name]}").TARGETS[name]
    return found


def corpus(name: str) -> dict[str, bytes]:
    """Kept inputs of a target, by file name."""
    return {path.name: path.read_bytes() for path in sorted((CORPUS / name).iterdir())}


class Checked:
    """Runs inputs of a target under the limits of time and memory."""

    def __init__(self, target: FuzzTarget) -> None:
        self._run = target.run
        self._megabytes = peak_megabytes()
        signal.signal(signal.SIGPROF, _stop)

    def __call__(self, data: bytes) -> bool:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            is_accepted = self._run(data)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if (grown := peak_megabytes() - self._megabytes) > MEGABYTES:
            raise TooLarge(f"the memory grew by {grown:.0f} MB")
        return is_accepted


def peak_megabytes() -> float:
    """The largest resident memory of this process since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {SECONDS} seconds")
