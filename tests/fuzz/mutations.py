"""Changes of well-formed inputs, which reach further than random bytes.

The choices come from a `Random`. Atheris gives a seed, and hypothesis gives a `Random` whose choices it can make smaller.
"""

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

NUMBERS = (0, 1, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**24, 2**31, 2**40, 2**63 - 1, 2**64 - 1, 10**400),
    *(0.5, 1.5, -1e308, 1e308, float("nan"), float("inf")),
    *("", "llama", "rejection", "draft_model", "../../etc/passwd", "\0", "\ud800", '{"type": "nonsense"}'),
    *("x" * 300, "x" * 100_000, "[" * 5000),
    *([], {}, [[]], [1, 2], [0, -1], [{}], {"a": 1}, {"a": {}}, ["x"] * 1000),
)
"""Values that readers of JSON or msgpack meet where they expect others."""
TEMPLATE_FRAGMENTS = (
    *("{% for a in range(99999) %}", "{% endfor %}", "{{ 'a' * 10**9 }}", "{{ m ** m }}", "{% macro m() %}"),
    *("{% endmacro %}", "{{ m() }}", "{% set x = x ~ x %}", "{{ messages | tojson(indent=99999) }}", "{{ 1 / 0 }}"),
    *("{{ '%9999999d' % 1 }}", "{{ messages[9] }}", "{{ (1).__class__ }}", "{% if", "%}", "{{", "}}", "{% else %}"),
    *("{% include 'x' %}", "{{ ''.join(messages) }}", "{% endif %}", "{% if x is defined %}", " | join(x) ", "[::-1]"),
    *(" | map(attribute='x') ", " | list ", " | sort ", "{% set n = namespace(a=1) %}", "{%- generation -%}"),
    *("{{ tools | tojson }}", " | indent(4000) ", " | replace('a', 'aa') ", ".split('a')", " | batch(3) "),
)


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """One to four changes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed)) if changed else 0
        kind = rng.randrange(6)
        if kind == 0:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            width = rng.choice((4, 8))
            changed[at : at + width] = (rng.choice(NUMBERS) % 2 ** (8 * width)).to_bytes(width, "little")
        elif kind == 2:
            del changed[at : at + rng.randint(1, 64)]
        elif kind == 3:
            changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 16)))
        elif kind == 4:
            changed[at:at] = changed[at : at + rng.randint(1, 256)]
        elif rng.random() < 0.3:
            del changed[at:]
    return bytes(changed)


def mutate_json(data: bytes, rng: Random) -> bytes:
    """Other values at one to three places of a JSON document, or other bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng)
    for _ in range(rng.randint(1, 3)):
        change_value(document, rng)
    text = json.dumps(document)
    if rng.random() < 0.02:
        text = '{"a":' * 100_000 + text
    return text.encode()


def change_value(document: Any, rng: Random, values: Sequence[Any] = VALUES) -> None:
    """Replaces, copies or removes a value somewhere in a list or a mapping."""
    place = document
    while isinstance(place, dict | list) and place:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and rng.random() < 0.8:
            place = place[key]
            continue
        kind = rng.random()
        if kind < 0.2:
            del place[key]
        elif kind < 0.4:  # a value of another place
            place[key] = copy.deepcopy(place[rng.choice(keys)])
        else:
            place[key] = copy.deepcopy(rng.choice(values))
        return


def text_mutator(fragments: Sequence[str]) -> Callable[[bytes, Random], bytes]:
    """A function that writes `fragments` into a text, or cuts it."""
    pieces = [fragment.encode() for fragment in fragments]

    def mutate(data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.2:
            return mutate_bytes(data, rng)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            data = data[:at] + rng.choice(pieces) + data[at + rng.choice((0, 0, 1, 20)) :]
        return data

    return mutate
