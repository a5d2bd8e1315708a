"""Speed of a batch of which one request, or every request, has a feature of sampling, compared with the same batch without it.

    python benchmarks/neighbours/features.py --streams 4 --tokens 32 --rounds 1          # the embedded model on a CPU
    python benchmarks/neighbours/features.py --device cuda --model "inflate:llama-8b?base=smollm2&noise=0.06" --streams 32
    python benchmarks/neighbours/features.py --device cuda --model FOLDER --draft FOLDER --features logprobs penalty

One process and one engine. In every round the batch without the feature runs, then with one request that has it, then with all.
Speeds are those from the first token of the last stream to the end of the first. `others` are the requests without the feature,
`all` every request of a batch in which all have it; both over the same streams without it, median of the rounds.
"""

import argparse
import json
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from paceline import LLM
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request, SamplingParams, SpeculationParams
from paceline.engine.step.step import GRAPH
from paceline.model_files.tokenizer.chat_template import ChatTemplate

TOPICS = ("rivers", "prime numbers", "bread", "sorting a list", "the moon", "tax law", "chess openings", "jazz")
SCHEMA = {"type": "object", "properties": {"facts": {"type": "array", "items": {"type": "string"}, "minItems": 60}}}
FEATURES: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.1},
    "counts": {"presence_penalty": 0.4, "frequency_penalty": 0.4},
    "bias": {"logit_bias": dict.fromkeys(range(1000, 1300), 0.5)},
    "min_tokens": {"min_tokens": 10**6},
    "logprobs": {"logprobs": 5},
    "top_logprobs": {"logprobs": 20},
    "top_p": {"top_p": 0.9},
    "qwen": {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    "three": {"repetition_penalty": 1.1, "logit_bias": {1000: 0.5}, "logprobs": 5},
    "rejection": {},
    "json_schema": {"json_schema": SCHEMA},
}
"""Fields of `SamplingParams` by feature; `qwen` is what generation_config.json of Qwen2.5 recommends. `rejection` is one of
`SpeculationParams`."""


class Speed(NamedTuple):
    tokens_each: list[float]
    """Tokens per second of each stream."""
    steps: Counter[str]
    """Steps by executor and reason."""
    accepted: float
    """Accepted drafts for each output of a stream."""


class Load:
    """Batches of the same prompts."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self._llm, self._options, self._runs = llm, options, 0
        template = ChatTemplate.of(llm.tokenizer)
        questions = [f"Write {20 + i} sentences about {TOPICS[i % len(TOPICS)]}." for i in range(options.streams)]
        if options.prompts is not None:
            lines = options.prompts.read_text("utf-8").splitlines()
            rows = [json.loads(line) for line in lines[: options.streams]]
            questions = [row.get("prompt") or row.get("question") or row["turns"][0] for row in rows]
            assert len(questions) == options.streams, f"--prompts has {len(questions)} prompts: lower --streams"
        self._prompts = [
            tuple(llm.tokenizer.encode(template.render([{"role": "user", "content": text}]))) for text in questions
        ]

    def run(self, feature: str, count: int) -> Speed:
        """The first `count` requests have the feature."""
        self._runs += 1
        outputs: list[list[tuple[float, StepOutput]]] = [[] for _ in self._prompts]
        done, failures = threading.Semaphore(0), list[Exception]()

        def listener(number: int) -> Any:
            def receive(event: OutputEvent) -> None:
                if isinstance(event, Exception):
                    failures.append(event)
                    done.release()
                    return
                outputs[number].append((time.perf_counter(), event))
                if event.finish_reason is not None:
                    done.release()

            return receive

        before = self._llm.engine.executors.counts.copy()
        for number in range(len(self._prompts)):
            self._llm.submit(self._request(number, feature if number < count else ""), listener(number))
        for _ in self._prompts:
            done.acquire()
        if failures:
            raise failures[0]
        begin = max(times[0][0] for times in outputs)
        end = min(times[-1][0] for times in outputs)
        assert end > begin, "the first stream ended before the last began: raise --tokens"
        inside = [[event for at, event in times if begin < at <= end] for times in outputs]
        events = [event for some in inside for event in some]
        return Speed(
            [sum(len(event.tokens) for event in some) / (end - begin) for some in inside],
            self._llm.engine.executors.counts - before,
            sum(event.accepted for event in events) / max(1, len(events)),
        )

    def _request(self, number: int, feature: str) -> Request:
        options = self._options
        sampling = SamplingParams(
            max_tokens=options.tokens, temperature=options.temperature, seed=number, ignore_eos=True
        )
        changes = dict(FEATURES[feature]) if feature else {}
        if "min_tokens" in changes:  # the end tokens that it blocks
            changes |= {"min_tokens": options.tokens, "stop_token_ids": tuple(sorted(self._llm.tokenizer.eos_ids))}
        speculation = SpeculationParams(verification="rejection" if feature == "rejection" else None)
        name = f"run{self._runs}.{number}"
        return Request(name, self._prompts[number], replace(sampling, **changes), speculation)


def compare(load: Load, feature: str, streams: int, rounds: int) -> str:
    """A row of the table."""
    others, every, alone, host, accepted = (
        list[float](),
        list[float](),
        list[float](),
        Counter[str](),
        list[float](),
    )
    for _ in range(rounds):
        plain, single, whole = (load.run(feature, count) for count in (0, 1, streams))
        if streams > 1:
            others.append(sum(single.tokens_each[1:]) / sum(plain.tokens_each[1:]))
        alone.append(single.tokens_each[0] / plain.tokens_each[0])
        every.append(sum(whole.tokens_each) / sum(plain.tokens_each))
        accepted.append(whole.accepted - plain.accepted)
        host += single.steps + whole.steps
    steps = sum(host.values())
    reasons = ", ".join(f"{name} {count / steps:.1%}" for name, count in host.most_common() if name != GRAPH)
    shown = f"{median(others):.3f}" if others else ""
    return f"| {feature} | {shown} | {median(alone):.3f} | {median(every):.3f} | {median(accepted):+.2f} | {reasons} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="{}", help="further fields of EngineConfig, in JSON")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `prompt`, `question` or `turns`")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--features", nargs="+", choices=FEATURES, default=[*FEATURES])
    options = parser.parse_args()
    engine = {"device": options.device, "draft": None if options.draft == "none" else options.draft}
    engine |= {"max_num_seqs": options.streams, "prefix_caching": False, "audit_fraction": 0.0} | json.loads(
        options.engine
    )
    with LLM(options.model, **engine) as llm:
        llm.warm_up()
        llm.finish_idle_work()
        load = Load(llm, options)
        plain = [load.run("", 0) for _ in range(2)][-1]
        print(
            f"without features: {sum(plain.tokens_each):.0f} tok/s, {plain.accepted:.2f} accepted drafts for each output"
        )
        print("| feature | others, one with it | the one | all with it | accepted drafts | steps on the host |")
        print("|---|---|---|---|---|---|")
        for feature in options.features:
            print(compare(load, feature, options.streams, options.rounds), flush=True)


if __name__ == "__main__":
    main()
