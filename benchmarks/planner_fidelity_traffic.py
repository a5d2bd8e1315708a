"""Traffic of planner_fidelity.py: random prompts that arrive at a rate, and texts in a closed loop."""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from planner_load import Answer, Arrival, _ask, random_prompts

from paceline.bench.prompts import load_prompts
from paceline.models.tokenizer.chat_template import ChatTemplate
from paceline.models.tokenizer.load import load_tokenizer

PROMPTS, OUTPUTS = (16, 24, 32, 48), (8, 12, 16, 24)
VOCABULARY = 49_000
MAX_CHARACTERS = 4000
FIT_EVERY = 5
"""Every fifth text belongs to the traffic of the fit, the others to the traffic that is compared."""


def random_arrivals(rate: float, requests: int) -> list[Arrival]:
    dice, now, made = random.Random(f"fidelity/{rate}"), 0.0, []
    for prompt in random_prompts(requests, PROMPTS, VOCABULARY, seed=round(1000 * rate)):
        made.append(Arrival(now, prompt, dice.choice(OUTPUTS)))
        now += dice.expovariate(rate)
    return made


def text_requests(model: str, path: Path, tokens: int) -> tuple[list[Arrival], list[Arrival]]:
    """Requests with the first turns of the file as chats: those to compare, and those of the fit."""
    tokenizer = load_tokenizer(model)
    template = ChatTemplate.of(tokenizer)
    kept: tuple[list[Arrival], list[Arrival]] = [], []
    for number, prompt in enumerate(load_prompts(path)):
        text = template.render([{"role": "user", "content": prompt.turns[0][:MAX_CHARACTERS]}])
        ids = tokenizer.encode(text, add_special=False)
        kept[number % FIT_EVERY == 0].append(Arrival(0.0, tuple(ids), tokens))
    return kept


def cycled(requests: Sequence[Arrival], count: int) -> list[Arrival]:
    return [requests[i % len(requests)] for i in range(count)]


def closed_loop(url: str, requests: Sequence[Arrival], streams: int) -> list[Answer]:
    """The answers in the order of the requests. Every stream sends the next request when its last one has ended."""
    numbers, lock, started = iter(range(len(requests))), threading.Lock(), time.monotonic()
    answers: dict[int, Answer] = {}

    def stream() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            arrival = replace(requests[number], time=time.monotonic() - started)
            answers[number] = _ask(url, arrival, started)

    with ThreadPoolExecutor(streams) as pool:
        for future in [pool.submit(stream) for _ in range(streams)]:
            future.result()
    return [answers[number] for number in range(len(requests))]
