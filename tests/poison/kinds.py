"""Requests that are made to harm a server: 24 kinds, each with seeded variations."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
MAX_BODY = 4 * 2**20
"""Bytes; the server's default `max_body_bytes`."""


class Poison(NamedTuple):
    path: str
    body: bytes


Make = Callable[[random.Random], Poison]


def text(rng: random.Random, **values: Any) -> Poison:
    body = {"prompt": "One, two,", "max_tokens": 4, "seed": rng.randrange(99), **values}
    return Poison(TEXT, json.dumps(body).encode())


def chat(rng: random.Random, **values: Any) -> Poison:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "seed": rng.randrange(99), **values}
    return Poison(CHAT, json.dumps(body).encode())


def schema(rng: random.Random, value: Mapping[str, Any]) -> Poison:
    named = {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}
    return chat(rng, response_format=named, max_tokens=16)


def pattern(rng: random.Random, regex: str) -> Poison:
    return schema(rng, {"type": "string", "pattern": regex})


def optional_fields(rng: random.Random) -> Poison:
    names = [f"field_{i}_{rng.randrange(10**6)}" for i in range(rng.choice((300, 500, 2000)))]
    return schema(rng, {"type": "object", "properties": {name: {"type": "string"} for name in names}})


def nested_schema(rng: random.Random) -> Poison:
    value: dict[str, Any] = {"type": "string", "maxLength": rng.randrange(1, 9)}
    for _ in range(rng.choice((10, 40, 200))):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return schema(rng, value)


def branching_schema(rng: random.Random) -> Poison:
    value: dict[str, Any] = {"type": "string", "minLength": rng.randrange(9)}
    for _ in range(rng.choice((8, 12))):
        value = {"anyOf": [value, {"type": "array", "items": value}]}
    return schema(rng, value)


def tool(parameters: Mapping[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def many_tools(rng: random.Random) -> Poison:
    size = rng.choice((1_000, 30_000))
    tools = [tool({"type": "object", "description": "x" * size}, f"f{i}") for i in range(120)]
    return chat(rng, tools=tools)


def tool_arguments(rng: random.Random) -> Poison:
    arguments = "[" * rng.choice((100, 50_000))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call] * 20}
    return chat(rng, messages=[{"role": "user", "content": "Hi"}, message])


def unknown_fields(rng: random.Random) -> Poison:
    return text(rng, **{f"unknown_{i}": 1 for i in range(rng.choice((300, 100_000)))})


def raw(rng: random.Random) -> Poison:
    body = rng.choice(
        (
            b"[" * 1_000_000,
            b'{"a":' * 100_000,
            b'"' * 1_000_000,
            b'{"prompt": "' + b"\\\\" * 500_000,
            b"\xff\xfe" * 1000,
            b'{"prompt": "\\ud800"}',
            b'{"prompt": 1e999, "max_tokens": NaN}',
            b"",
        )
    )
    return Poison(rng.choice((CHAT, TEXT, TOKENIZE)), body)


def long_text(rng: random.Random) -> Poison:
    unit = rng.choice(("a", "the quick brown fox ", "\U0001f600", '"\\', " "))
    content = unit * (3_000_000 // len(json.dumps(unit)))
    return rng.choice((lambda: text(rng, prompt=content), lambda: Poison(TOKENIZE, _tokenize(content))))()


def _tokenize(content: str) -> bytes:
    return json.dumps({"prompt": content[:200_000]}).encode()


def extreme_sampling(rng: random.Random) -> Poison:
    values = {
        "temperature": rng.choice((1e-30, 10)),
        "top_p": rng.choice((1e-30, 1)),
        "min_p": rng.choice((0, 1)),
        "top_k": rng.choice((-1, 1, 2**31 - 1)),
        "repetition_penalty": rng.choice((1e-30, 10)),
        "frequency_penalty": rng.choice((-2, 2)),
        "presence_penalty": rng.choice((-2, 2)),
        "logprobs": 20,
    }
    return text(rng, **values)


KINDS: Mapping[str, Make] = {
    "schema: optional fields": optional_fields,
    "schema: nested": nested_schema,
    "schema: branching": branching_schema,
    "schema: refers to itself": lambda rng: schema(rng, {"$ref": "#"}),
    "schema: long enumeration": lambda rng: schema(rng, {"enum": [f"{i}{rng.random()}" for i in range(5000)]}),
    "schema: huge counts": lambda rng: schema(
        rng, {"type": "array", "items": {}, "minItems": 10**6, "maxItems": 10**7}
    ),
    "schema: contradiction": lambda rng: schema(rng, {"allOf": [{"pattern": f"^.*{c}.*$"} for c in "abcdefghijkl"]}),
    "regex: repetitions": lambda rng: pattern(rng, rng.choice(("^((a{100}){100}){100}$", "^(a{1000}){1000}$"))),
    "regex: alternatives": lambda rng: pattern(rng, "^.*(a.{30}|b.{40}c.{30}).*$"),
    "regex: invalid": lambda rng: pattern(rng, rng.choice(("(", "a{99999999999}", "(?=a)b", "[z-a]", "\\u0000"))),
    "tools: evil parameters": lambda rng: chat(
        rng, tools=[tool({"type": "string", "pattern": "^((b{100}){100}){100}$"})], tool_choice="required"
    ),
    "tools: many": many_tools,
    "tools: arguments": tool_arguments,
    "ids: long list": lambda rng: text(rng, prompt=[rng.randrange(1000)] * rng.choice((50_000, 600_000))),
    "ids: wrong": lambda rng: text(rng, prompt=[rng.choice((-1, 2**31, 10**6, "a", None))] * rng.choice((1, 20_000))),
    "text: long": long_text,
    "text: special tokens": lambda rng: text(rng, prompt="<|im_end|><|endoftext|>\0\u202e" * rng.randrange(1, 50)),
    "messages: many": lambda rng: chat(rng, messages=[{"role": "user", "content": "a"}] * rng.choice((1500, 20_000))),
    "messages: wrong": lambda rng: chat(rng, messages=[{"role": "unknown"}] * 10_000),
    "parameters: extreme": extreme_sampling,
    "parameters: biases": lambda rng: text(rng, logit_bias={str(i): -100 for i in range(rng.choice((3000, 40_000)))}),
    "parameters: stops": lambda rng: text(rng, stop=["a" * 1000] * 16, stop_token_ids=list(range(256)), n=4),
    "parameters: unknown": unknown_fields,
    "body: not JSON": raw,
}

BODIES = [
    name for name in KINDS if name.startswith(("tools: many", "tools: arg", "ids", "text", "messages", "body"))
] + [
    "parameters: biases",
    "parameters: unknown",
]
"""Kinds whose bodies are large, of every shape: texts, lists, objects, nested values."""
