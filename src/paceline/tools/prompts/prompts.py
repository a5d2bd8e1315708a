"""Prompts and scenarios, built in or from files, and the arrivals of answers.

A `Preset` is a built-in scenario: the kind of traffic, its sampling, and the length of answers. `load_prompts` reads a file of
JSON lines, one conversation each. A line has `prompt` or `question` (one user turn), `turns` (several, as in Spec-Bench) or
`messages` (user messages only), and optionally `category`. Other keys are ignored.

`AnswerTimes` has the arrivals of one request's tokens, in seconds on one clock.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.core.errors import InvalidRequest
from paceline.core.output import StepOutput


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """The user turns of one conversation."""

    turns: tuple[str, ...]
    """User messages. Each is answered before the next is sent."""
    category: str = "default"


def load_prompts(path: Path) -> list[BenchPrompt]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidRequest(
            f"cannot read the prompts in {path}: {why}. Give a file with one JSON object per line, such as "
            '{"prompt": "Why is the sky blue?"}',
            field="prompts",
        ) from error
    prompts = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidRequest(f"{path} holds no prompts: give one JSON object per line", field="prompts")
    return prompts


def select(
    prompts: Sequence[BenchPrompt], categories: Iterable[str] | None = None, limit: int | None = None
) -> list[BenchPrompt]:
    """The prompts of `categories`, or all prompts. They are at most `limit`, taken from all categories in turn."""
    if categories is not None:
        wanted = set(categories)
        known = dict.fromkeys(prompt.category for prompt in prompts)
        prompts = [prompt for prompt in prompts if prompt.category in wanted]
        if not prompts:
            raise InvalidRequest(
                f"no prompt is of category {', '.join(sorted(wanted))}; there are: {', '.join(known)}", field="category"
            )
    if limit is None:
        return list(prompts)
    place: dict[str, int] = {}
    ranked = []
    for i, prompt in enumerate(prompts):
        rank = place[prompt.category] = place.get(prompt.category, -1) + 1
        ranked.append((rank, i))
    kept = sorted(i for _, i in sorted(ranked)[:limit])
    return [prompts[i] for i in kept]


def _parse(line: str, where: str) -> BenchPrompt:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}", field="prompts") from None
    turns = _turns(entry) if isinstance(entry, dict) else None
    if isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise InvalidRequest(
            f"{where} needs `prompt` or `question` (a text), `turns` (a list of texts), or `messages`", field="prompts"
        )
    return BenchPrompt(tuple(turns), str(entry.get("category", "default")))


def _turns(entry: dict[str, Any]) -> Any:
    for key in ("turns", "prompt", "question"):
        if key in entry:
            return entry[key]
    messages = entry.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    return [message.get("content") for message in messages if message.get("role") == "user"]


SUPPORT_SYSTEM = """You are the first line of support of Harbor Internet. You answer billing and outage tickets.
Be brief, friendly and exact. Never promise a refund; say that billing will look at the case within two working days.
For an outage, ask the customer to restart the router: unplug it, wait thirty seconds, plug it in again, wait for the green
light. If that does not help, ask for the customer number and the colour of the light, and open a ticket.
Close every answer with: Is there anything else I can help you with?"""

DEFAULT_PROMPTS: tuple[BenchPrompt, ...] = (
    BenchPrompt(
        (
            "My internet has been down since this morning. What should I do?",
            "I restarted the router and the light is still red. My customer number is 48213.",
        ),
        "support",
    ),
    BenchPrompt(
        (
            "I was charged twice in May: 39.90 on the 2nd and 39.90 on the 3rd. Please help.",
            "How long will that take, and will I get an e-mail?",
        ),
        "support",
    ),
    BenchPrompt(("Write a Python function that returns the n-th Fibonacci number without recursion.",), "code"),
    BenchPrompt(
        (
            "Rename the variable x to total in this code and change nothing else:\n"
            "def add_all(values):\n    x = 0\n    for value in values:\n        x = x + value\n"
            '    print("the sum is", x)\n    return x\n',
        ),
        "code",
    ),
    BenchPrompt(
        (
            "Summarise in two sentences: The city council met on Tuesday to discuss the new tram line between the harbour "
            "and the university. Supporters said the line would carry 12,000 passengers a day and take cars off the bridge. "
            "Opponents said the cost of 180 million would be better spent on buses. The council postponed the vote until "
            "March, when a study of the bridge will be ready.",
        ),
        "summarisation",
    ),
    BenchPrompt(
        (
            "Summarise in one sentence: Honeybees tell each other where flowers are by dancing. A bee that returns to the "
            "hive runs in a figure of eight; the angle of its run gives the direction relative to the sun, and the length "
            "of the run gives the distance. Other bees follow the dancer with their antennae and then fly out themselves.",
        ),
        "summarisation",
    ),
    BenchPrompt(
        (
            "List every person and their job, one a line, from this text: Anna Weber, head of sales, met Peter Lund, the "
            "finance director, in Oslo. They were joined by Maria Rossi, who leads engineering, and by John Okafor, the "
            "company's lawyer.",
        ),
        "extraction",
    ),
    BenchPrompt(
        (
            "Copy only the rows with a status of late, exactly as they are:\n"
            "order,date,status\n1041,2024-03-01,late\n1042,2024-03-01,sent\n1043,2024-03-02,late\n1044,2024-03-03,sent\n"
            "1045,2024-03-03,late\n1046,2024-03-04,sent\n",
        ),
        "extraction",
    ),
    BenchPrompt(("Write the opening of a story about a lighthouse keeper who finds a door in the sea.",), "creative"),
    BenchPrompt(("Write a short poem about rust, in which nothing rhymes.",), "creative"),
    BenchPrompt(
        (
            "Give this as a JSON object with the keys name, age, city and hobbies: Lena is 34, lives in Graz and likes "
            "climbing, chess and baking.",
        ),
        "json",
    ),
    BenchPrompt(
        ('Return a JSON object with a key "books": a list of three novels, each with title, author and year.',),
        "json",
    ),
    BenchPrompt(
        ("Write a COBOL program that reads a file of customer records and prints the total of all balances.",), "legacy"
    ),
    BenchPrompt(("Write a Fortran 77 subroutine that multiplies two matrices, with comments.",), "legacy"),
)


@dataclass(frozen=True, slots=True)
class Preset:
    """One scenario."""

    name: str
    about: str
    categories: tuple[str, ...] | None
    """Categories of the built-in prompts. None for all categories. A prompt file is used whole."""
    tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams`."""
    concurrency: int = 1
    system: str | None = None


DEFAULT = Preset("default", "all categories, greedy, one request at a time", None, 96, {"temperature": 0.0})

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            DEFAULT,
            Preset(
                "support-chat",
                "billing and outage tickets after a long system prompt, temperature 0.7, several turns",
                ("support",),
                96,
                {"temperature": 0.7},
                system=SUPPORT_SYSTEM,
            ),
            Preset("code", "functions and edits of given code, greedy", ("code",), 160, {"temperature": 0.0}),
            Preset(
                "extraction",
                "summaries and facts taken from a given text: answers repeat their prompt",
                ("summarisation", "extraction"),
                96,
                {"temperature": 0.0},
            ),
            Preset(
                "creative",
                "stories and verse at temperature 1: the hardest to draft",
                ("creative",),
                128,
                {"temperature": 1.0},
            ),
            Preset(
                "json",
                "answers constrained to a JSON object by a grammar",
                ("json",),
                96,
                {"temperature": 0.0, "json_schema": {"type": "object"}},
            ),
            Preset(
                "low-acceptance",
                "legacy languages with low acceptance: speculation must not be slower than plain decoding",
                ("legacy",),
                128,
                {"temperature": 0.7},
            ),
            Preset(
                "public-api",
                "all categories, eight concurrent requests, sampled as on a public API",
                None,
                96,
                {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
                concurrency=8,
            ),
        )
    }
)


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise InvalidRequest(f"unknown preset {name!r}; choose from: {', '.join(PRESETS)}", field="preset")
    return PRESETS[name]


@dataclass(frozen=True, slots=True)
class Arrival:
    """The tokens of one step, which arrive together."""

    at: float
    tokens: int
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, output: StepOutput, at: float) -> "Arrival":
        return cls(at, len(output.tokens), output.drafted, output.accepted)


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """One request and its answer."""

    category: str
    started: float
    arrivals: tuple[Arrival, ...]
    text: str
    token_ids: tuple[int, ...] | None = None
    """Token ids. None if the server returns text only."""
    rounds: int | None = None
    """Passes of the target after the first token. 0 if the number is unknown. None if every arrival is a pass."""

    @property
    def tokens(self) -> int:
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].at - self.started if self.arrivals else 0.0

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.arrivals[0].at - self.started if self.arrivals else None

    @property
    def token_seconds(self) -> list[float]:
        """The time of each token after the first arrival. Tokens that arrive together share it."""
        waits: list[float] = []
        last = self.arrivals[0].at if self.arrivals else 0.0
        for arrival in self.arrivals[1:]:
            if arrival.tokens:
                waits += [(arrival.at - last) / arrival.tokens] * arrival.tokens
                last = arrival.at
        return waits

    @property
    def num_rounds(self) -> int:
        """Passes of the target after the prefill."""
        return max(0, len(self.arrivals) - 1) if self.rounds is None else self.rounds

    @property
    def round_tokens(self) -> int:
        """Tokens of those rounds. 0 if the number is unknown."""
        return self.tokens - 1 if self.num_rounds else 0
