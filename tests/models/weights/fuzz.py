"""Loads mutated model files and reports how each load ended: `python -m tests.models.weights.fuzz SEED COUNT FOLDER`.

It runs in a process of its own, because a loader that crashes must not end the tests. The seed of a mutation is
`FORMAT-SEED-i`.
"""

import copy
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.core.errors import PacelineError
from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.models.drafts import load as drafts
from paceline.models.drafts.load import open_draft_folder
from paceline.models.loading import load
from paceline.models.loading.load import LoadedModel
from tests.models.drafts.test_load import loaded_target

SECONDS, MEGABYTES = 5.0, 500
FREE_MEMORY = 256 << 20
"""Memory that the loaders believe to be free: they must reject models that need more."""

NUMBERS = (0, 1, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**24, 2**31, 2**40, 10**400, 0.5, -1e308, 1e308, float("nan"), float("inf")),
    *("", "llama", "../../etc/passwd", "\0", "x" * 100_000, [], {}, [[]], [0, -1], [{}], {"a": {}}, ["x"] * 1000),
)
FRAGMENTS = (
    *(
        "{% for a in range(99999) %}",
        "{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ m ** m }}",
        "{% macro m() %}",
        "{% endmacro %}",
    ),
    *(
        "{{ m() }}",
        "{% set x = x ~ x %}",
        "{{ messages | tojson(indent=99999) }}",
        "{{ '%9999999d' % 1 }}",
        "{{ 1 / 0 }}",
    ),
    *(
        "{{ messages[9] }}",
        "{{ (1).__class__ }}",
        "{% if",
        "%}",
        "{{",
        "}}",
        "{% include 'x' %}",
        "{{ ''.join(messages) }}",
    ),
)


class TooSlow(BaseException):
    """A load took more than the limit of seconds."""


def mutate_bytes(data: bytes, rng: random.Random, header: int) -> bytes:
    """One to four changes; most of them in the first `header` bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(header, len(changed)) if rng.random() < 0.9 else len(changed)) if changed else 0
        kind = rng.randrange(6)
        if kind == 0:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            width = rng.choice((4, 8))
            changed[at : at + width] = (rng.choice(NUMBERS) % 2 ** (8 * width)).to_bytes(width, "little")
        elif kind == 2:
            del changed[at : at + rng.randint(1, 64)]
        elif kind == 3:
            changed[at:at] = rng.randbytes(rng.randint(1, 64))
        elif kind == 4:
            changed[at:at] = changed[at : at + rng.randint(1, 256)]
        elif rng.random() < 0.3:
            del changed[at:]
    return bytes(changed)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Other values at one to three places of a JSON document, or other bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng, len(data))
    document = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        place = document
        while True:
            keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and rng.random() < 0.8:
                place = place[key]
                continue
            if rng.random() < 0.2:
                del place[key]
            else:
                place[key] = copy.deepcopy(rng.choice(VALUES))
            break
    text = json.dumps(document)
    if rng.random() < 0.02:
        text = '{"a":' * 100_000 + text
    return text.encode()


def mutate_template(data: bytes, rng: random.Random) -> bytes:
    text = data.decode()
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(FRAGMENTS) + text[at + rng.choice((0, 0, 1, 20)) :]
    return text.encode()


def load_model(path: Path) -> None:
    loaded = load.load_model(path)
    loaded.tokenizer.decode(loaded.tokenizer.encode("ab c 1"))
    if loaded.tokenizer.chat_template is not None:
        ChatTemplate.of(loaded.tokenizer).render([{"role": "user", "content": "x"}])


@cache
def target() -> LoadedModel:
    return loaded_target()


def load_draft(path: Path) -> None:
    folder = open_draft_folder(path)
    if folder is not None:
        drafts.load_draft(folder, target())


FORMATS: dict[str, tuple[str, Callable[[bytes, random.Random], bytes]]] = {
    "gguf": ("tiny.gguf", lambda data, rng: mutate_bytes(data, rng, 9000)),
    "safetensors": ("folder/model.safetensors", lambda data, rng: mutate_bytes(data, rng, 3000)),
    "index": ("sharded/model.safetensors.index.json", mutate_json),
    "config": ("sharded/config.json", mutate_json),
    "tokenizer": ("folder/tokenizer.json", mutate_json),
    "tokenizer_config": ("folder/tokenizer_config.json", mutate_json),
    "template": ("folder/chat_template.jinja", mutate_template),
    "eagle": ("draft-eagle/config.json", mutate_json),
    "eagle_weights": ("draft-eagle/model.safetensors", lambda data, rng: mutate_bytes(data, rng, 2000)),
    "medusa": ("draft-medusa/config.json", mutate_json),
    "distilled": ("draft-distilled/config.json", mutate_json),
}
"""Format -> the file that is mutated, and how. Its folder, or the GGUF file itself, is loaded."""


def peak_megabytes(reset: bool = False) -> float:
    """Largest resident memory since the last reset."""
    if reset:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def run(kind: str, seed: int, count: int, folder: Path) -> dict[str, Any]:
    name, mutate = FORMATS[kind]
    file = folder / name
    original, path = file.read_bytes(), file if kind == "gguf" else file.parent
    load_file = load_draft if path.name.startswith("draft-") else load_model
    load.available_memory = lambda: FREE_MEMORY
    load_file(path)  # imports everything, so that the memory of a load is that of the file
    ends: Counter[str] = Counter()
    failures: list[str] = []
    slowest, largest = 0.0, 0.0
    for i in range(count):
        file.write_bytes(mutate(original, random.Random(f"{kind}-{seed}-{i}")))
        before, started = peak_megabytes(reset=True), time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            load_file(path)
            ends["loaded"] += 1
        except PacelineError:
            ends["typed"] += 1
        except BaseException as error:
            ends["untyped"] += 1
            failures.append(f"{kind}-{seed}-{i}: {type(error).__name__}: {error!s:.200}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        slowest = max(slowest, time.perf_counter() - started)
        largest = max(largest, peak_megabytes() - before)
    file.write_bytes(original)
    return {
        "format": kind,
        **{end: ends[end] for end in ("loaded", "typed", "untyped")},
        "failures": failures,
        "slowest_s": round(slowest, 2),
        "largest_mb": round(largest),
    }


def stop(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {SECONDS} seconds")


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, stop)
    for one in FORMATS:
        print(json.dumps(run(one, int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))), flush=True)
