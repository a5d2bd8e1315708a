"""Traffic of the embedded model in several domains, for the benchmarks of learning."""

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.server.learning.sample_ring import LearningSample

CHAT = ("writing", "roleplay", "humanities", "qa", "reasoning", "stem", "extraction", "rag", "summarization")
"""Categories of the prompt file that count as chat."""
THINGS = (
    "eine Reise nach Hamburg|den Wald im Winter|gutes Brot|einen alten Freund|die Geschichte der Eisenbahn|das Meer|"
)
THINGS += (
    "einen Markt am Samstag|gesunde Ernährung|die Stadt Wien|einen Hund|den Sommer|das Lesen|alte Häuser|Musik|Vögel"
)
GERMAN = (
    "Schreibe einen kurzen Text über {}.",
    "Erzähle mir auf Deutsch etwas über {}.",
    "Was weißt du über {}? Antworte auf Deutsch.",
    "Schreibe einen Brief über {}.",
    "Nenne drei Gedanken über {}, auf Deutsch.",
)
TASKS = "reverses a string|counts words in a file|sorts a list of dictionaries by a key|checks if a number is prime|merges two "
TASKS += (
    "sorted lists|finds duplicates in a list|computes the nth Fibonacci number|parses a date|flattens a nested list|"
)
TASKS += "reads a CSV file|removes punctuation|finds the longest word|computes a factorial|checks balanced brackets|"
TASKS += "transposes a matrix"
CODE = (
    "Write a Python function that {}.",
    "Write a JavaScript function that {}.",
    "Show me C code that {}, with comments.",
    "Write a Rust function that {}, and a test.",
    "Implement a Java class with a method that {}.",
)
TOOLS = "get_weather(city)|send_email(to, subject)|search_flights(origin, destination)|set_alarm(time)|"
TOOLS += "convert(amount, currency)"
REPETITION = (
    "Repeat the word {0} forever: {0} {0} {0} {0}",
    "Write only {0}, {0}, {0}, again and again, without an end.",
    "{0} {0} {0} {0} {0} {0}",
)
NAMES = "Berlin|Anna|noon|the office|12 euros|Paris|Tom|Friday|Rome|20 dollars|Lisbon|Maria|7 o'clock|Oslo|the team"


def fill(templates: Sequence[str], words: str, draw: random.Random) -> Iterator[str]:
    found = [one.format(word) for one in templates for word in words.split("|")]
    draw.shuffle(found)
    yield from found


def prompts(domain: str, data: Path, count: int) -> list[str]:
    """Different prompts of one domain, the same for the same arguments."""
    draw = random.Random(domain)
    if domain == "german":
        return [*fill(GERMAN, THINGS, draw)][:count]
    if domain == "code":
        return [*fill(CODE, TASKS, draw)][:count]
    if domain == "tools":
        line = "You can call {}. Answer with JSON only: name and arguments. Request: do it for "
        calls = [line.format(tool) + f"{name}." for tool in TOOLS.split("|") for name in NAMES.split("|")]
        return draw.sample(calls, min(count, len(calls)))
    if domain == "repetition":
        return [*fill(REPETITION, NAMES, draw)][:count]
    if domain == "mathematics":
        lines = (data.parent / "gsm8k_train_questions.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line)["question"] for line in draw.sample(lines, count)]
    entries = [json.loads(line) for line in data.read_text("utf-8").splitlines()]
    found = [one["turns"][0] for one in entries if one["category"] in CHAT and len(one["turns"][0]) < 400]
    draw.shuffle(found)
    return found[:count]


def answer(
    llm: LLM, domain: str, texts: Sequence[str], tokens: int, first: int, plain: bool = False
) -> list[LearningSample]:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    options = {"enabled": False} if plain else None
    done = llm.generate([[{"role": "user", "content": text}] for text in texts], sampling, speculation=options)
    return [
        LearningSample(first + i, one.prompt_token_ids, one.completions[0].token_ids, (), 0, 1, "tenant", domain)
        for i, one in enumerate(done)
    ]


def traffic(data: Path, file: Path, counts: Mapping[str, int], tokens: int) -> list[LearningSample]:
    """Samples of all domains, generated unless `file` holds them. Answers have up to `tokens` tokens."""
    stored: dict[str, list[LearningSample]] = {}
    if file.exists():
        for name, rows in json.loads(file.read_text("utf-8")).items():
            stored[name] = [
                LearningSample(**one | {k: tuple(one[k]) for k in ("prompt", "output", "accepted")}) for one in rows
            ]
    missing = [one for one in counts if len(stored.get(one, ())) < counts[one]]
    if missing:
        with LLM("smollm2", max_num_seqs=16, max_model_len=1024, kv_tokens=16384) as llm:
            for domain in missing:
                started = time.perf_counter()
                stored[domain] = answer(llm, domain, prompts(domain, data, counts[domain]), tokens, 1)
                count = sum(len(one.output) for one in stored[domain])
                print(
                    f"{domain}: {len(stored[domain])} answers, {count} tokens in {time.perf_counter() - started:.0f} s",
                    flush=True,
                )
                file.write_text(json.dumps({name: [asdict(one) for one in rows] for name, rows in stored.items()}))
    return [one for domain in counts for one in stored[domain][: counts[domain]]]
