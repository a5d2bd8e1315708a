"""Traffic of the embedded model in several domains, for the benchmarks of learning."""

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from paceline import LLM, SamplingParams
from paceline.models.loading.load import open_checkpoint
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.server.learning.sample_ring import LearningSample
from paceline.train.data.corpus import Corpus, Prompt
from paceline.train.data.generator import TextGenerator
from paceline.train.data.text_file import generate_text
from paceline.train.data.turn_tokens import turn_tokens
from paceline.train.drafts.target import Target
from paceline.train.evaluate import answers
from paceline.train.run import pick_device

CHAT = (
    "writing", "roleplay", "humanities", "qa", "reasoning", "stem", "extraction", "rag", "summarization", "questions", "tasks",
)  # fmt: skip
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
MORE_THINGS = (
    "den Rhein|eine Bäckerei|die Berge|das Fahrrad|den Herbst|einen Flohmarkt|die Schule|einen Garten|das Theater|Schnee|"
    "eine Wanderung|die Ostsee|den Bahnhof|Kaffee|einen Nachbarn|das Handwerk|die Feuerwehr|einen Zoo|alte Bücher|Fußball|"
    "die Küche|eine Brücke|den Mond|das Wetter|einen Arzt|die Zeitung|eine Insel|den Karneval|Pilze|das Museum"
)
MORE_GERMAN = (
    "Erkläre einem Kind {}.",
    "Schreibe ein Gedicht über {}.",
    "Beschreibe {} in fünf Sätzen.",
    "Warum mögen viele Menschen {}? Antworte auf Deutsch.",
    "Schreibe eine kurze Geschichte über {}.",
)
MORE_TASKS = (
    "rotates a list|counts vowels|computes the greatest common divisor|converts Celsius to Fahrenheit|finds the median|"
    "validates an email address|generates a random password|capitalizes every word|computes a running average|"
    "finds the second largest number|splits a list into chunks|converts a number to binary|removes duplicates from a list|"
    "checks if two strings are anagrams|computes compound interest|groups words by length|reads a JSON file|"
    "counts lines of a file|finds common elements of two lists|computes the sum of digits|searches a sorted list|"
    "implements a stack|implements a queue|computes the power of a number|replaces tabs with spaces|checks a palindrome|"
    "finds the maximum of a matrix|converts a string to an integer|zips two lists|prints a multiplication table"
)
MORE_CODE = (
    "Write a Go function that {}.",
    "Write a TypeScript function that {}, with types.",
    "Write a Ruby method that {}.",
    "Write a Python script that {}, and explain it.",
    "Write a unit test for a Python function that {}.",
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
    """At most `count` different prompts of one domain, the same for the same arguments."""
    draw = random.Random(domain)
    if domain == "german":
        first = [*fill(GERMAN, THINGS, draw)]
        more = fill((*GERMAN, *MORE_GERMAN), f"{THINGS}|{MORE_THINGS}", draw)
        return list(dict.fromkeys((*first, *more)))[:count]
    if domain == "code":
        first = [*fill(CODE, TASKS, draw)]
        more = fill((*CODE, *MORE_CODE), f"{TASKS}|{MORE_TASKS}", draw)
        return list(dict.fromkeys((*first, *more)))[:count]
    if domain == "tools":
        line = "You can call {}. Answer with JSON only: name and arguments. Request: do it for "
        calls = [line.format(tool) + f"{name}." for tool in TOOLS.split("|") for name in NAMES.split("|")]
        return draw.sample(calls, min(count, len(calls)))
    if domain == "repetition":
        return [*fill(REPETITION, NAMES, draw)][:count]
    if domain == "mathematics":
        lines = (data.parent / "gsm8k_train_questions.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line)["question"] for line in draw.sample(lines, count)]
    entries = [json.loads(line) for line in data.read_text("utf-8").split("\n") if line]
    texts = [one["turns"][0] if "turns" in one else one["prompt"] for one in entries if one["category"] in CHAT]
    found = [text for text in texts if len(text) < 400]
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


def answer_on_gpu(
    target: Target, tokenizer: Tokenizer, domain: str, texts: Sequence[str], tokens: int
) -> list[LearningSample]:
    """Greedy answers in bfloat16, all prompts in one batch."""
    turns = turn_tokens(tokenizer)
    corpus = Corpus(tokenizer, turns, (), 0.0)
    scripts = [corpus.script_for(Prompt(text, domain)) for text in texts]
    length = max(len(one.ids) for one in scripts) + len(turns.to_answer) + tokens
    generator = TextGenerator(target, turns, len(scripts), length, 0, answer_limit=tokens)
    text = generate_text(generator, scripts, 0.0, lambda done: None)
    found = []
    for row, ids in enumerate(text.ids.tolist()):
        start, end = next(answers(text.answer[row]))
        output = tuple(ids[start : min(end, start + tokens)])
        found.append(LearningSample(row + 1, tuple(ids[:start]), output, (), 0, 1, "tenant", domain))
    return found


def traffic(
    data: Path, file: Path, counts: Mapping[str, int], tokens: int, device: str = "cpu", model: str = "smollm2"
) -> list[LearningSample]:
    """Samples of all domains, generated unless `file` holds them. Answers have up to `tokens` tokens."""
    stored: dict[str, list[LearningSample]] = {}
    if file.exists():
        for name, rows in json.loads(file.read_text("utf-8")).items():
            stored[name] = [
                LearningSample(**one | {k: tuple(one[k]) for k in ("prompt", "output", "accepted")}) for one in rows
            ]
    missing = [one for one in counts if len(stored.get(one, ())) < counts[one]]
    if missing and device == "cuda":
        checkpoint = open_checkpoint(model)
        target, tokenizer = Target(checkpoint, pick_device(device), torch.bfloat16), checkpoint.read_tokenizer()
        for domain in missing:
            stored[domain] = answer_on_gpu(target, tokenizer, domain, prompts(domain, data, counts[domain]), tokens)
        file.write_text(json.dumps({name: [asdict(one) for one in rows] for name, rows in stored.items()}))
    elif missing:
        with LLM(model, max_num_seqs=16, max_model_len=1024, kv_tokens=16384) as llm:
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
