"""Acceptance of a static draft and of a draft that learns, on a stream that moves from chat to German to code.

    python benchmarks/drafts/learning.py --data PROMPTS.jsonl [--draft smollm2-distilled] [--each 40] [--chat 16] [--plot FILE]
    python benchmarks/drafts/learning.py --data PROMPTS.jsonl --domains code,mathematics,german,tools
    python benchmarks/drafts/learning.py --data PROMPTS.jsonl --as-shipped --device cuda --each 400 --tokens 128 --window 32

The embedded model answers every prompt once, greedily; answers are stored in `--traffic`. The stream is then replayed in
windows, in the order of the domains. Every window is first scored with both drafts, and only then given to the learner
(prequential), so that no score is on samples that were learned from. The learner is that of `paceline learn`, with the
offline gate; there is no server, so that a version that passes it is used at once. Seconds are processor time on a CPU, and
wall time on a GPU. At the end the newest version serves the last window with drafts of five nodes, on a GPU one request at a
time: its texts are compared with those of the static draft and of plain decoding. `--as-shipped`: the settings of
`paceline learn`.

With `--domains` each domain is learned alone from the shipped draft: the first three fifths of its samples, and scores on
the rest.
"""

import argparse
import io
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from paceline.core.clock import Clock, WallClock
from paceline.core.request import SamplingParams
from paceline.engine.start.llm import LLM
from paceline.gateway.sessions.samples import LearningSample, SampleRing
from paceline.model_files.hub.hub import find_model
from paceline.tools.learn.learner import Learner, LearnerLimits, decide_offline
from paceline.tools.learn.memory import MemoryLimits, SampleMemory
from paceline.tools.learn.versions import TrialResult, VersionFolder
from paceline.tools.progress.progress import PlainProgress, StopRequest
from paceline.tools.train.evaluate import Score
from paceline.tools.train.further import DraftTraining, Pacer
from paceline.tools.train.plan import LearnPlan

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
NAMES = "Berlin|Anna|noon|the office|12 euros|Paris|Tom|Friday|Rome|20 dollars|Lisbon|Maria|7 o'clock|Oslo|the team"


def fill(templates: Sequence[str], words: str, draw: random.Random) -> Iterator[str]:
    found = [template.format(word) for template in templates for word in words.split("|")]
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
    if domain == "mathematics":
        lines = (data.parent / "gsm8k_train_questions.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line)["question"] for line in draw.sample(lines, count)]
    entries = [json.loads(line) for line in data.read_text("utf-8").split("\n") if line]
    texts = [
        entry["turns"][0] if "turns" in entry else entry["prompt"] for entry in entries if entry["category"] in CHAT
    ]
    found = [text for text in texts if len(text) < 400]
    draw.shuffle(found)
    return found[:count]


def answer(llm: LLM, domain: str, texts: Sequence[str], tokens: int, first: int) -> list[LearningSample]:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    done = llm.generate([[{"role": "user", "content": text}] for text in texts], sampling)
    return [
        LearningSample(first + i, answer.prompt_token_ids, answer.completions[0].token_ids, (), 0, 1, "tenant", domain)
        for i, answer in enumerate(done)
    ]


def traffic(
    data: Path, file: Path, counts: Mapping[str, int], tokens: int, device: str = "cpu", model: str = "smollm2"
) -> list[LearningSample]:
    """Samples of all domains, generated unless `file` holds them. Answers have up to `tokens` tokens."""
    stored: dict[str, list[LearningSample]] = {}
    if file.exists():
        for name, rows in json.loads(file.read_text("utf-8")).items():
            stored[name] = [
                LearningSample(**row | {k: tuple(row[k]) for k in ("prompt", "output", "accepted")}) for row in rows
            ]
    missing = [domain for domain in counts if len(stored.get(domain, ())) < counts[domain]]
    if missing:
        with LLM(model, draft=None, device=device, max_num_seqs=16, max_model_len=1024, kv_tokens=16384) as llm:
            for domain in missing:
                started = time.perf_counter()
                stored[domain] = answer(llm, domain, prompts(domain, data, counts[domain]), tokens, 1)
                count = sum(len(sample.output) for sample in stored[domain])
                print(
                    f"{domain}: {len(stored[domain])} answers, {count} tokens in {time.perf_counter() - started:.0f} s",
                    flush=True,
                )
                file.write_text(json.dumps({name: [asdict(row) for row in rows] for name, rows in stored.items()}))
    return [sample for domain in counts for sample in stored[domain][: counts[domain]]]


SETTINGS = ("new_tokens", "recent_tokens", "min_held_out", "held_out", "length", "rows", "epochs", "learning_rate")


@dataclass(frozen=True)
class Window:
    domain: str
    static: Score
    learned: Score
    version: int
    seconds: float
    """Training time of the learner before this window was scored."""


class Feed:
    """The samples of the windows so far, and trials that keep every version that the offline gate let through."""

    def __init__(self, draft: Path) -> None:
        self.ring, self.draft = SampleRing(10**6, 10**9), str(draft)
        self.samples = self.ring.after

    def in_use(self) -> str:
        return self.draft

    def run(
        self, draft: Path, wait: Callable[[], bool], report: Callable[[str], None], is_tried: bool = True
    ) -> TrialResult:
        self.draft = str(draft)
        return TrialResult(True, None, "not tried under load")


class ProcessorClock:
    """Processor time of this process."""

    def now(self) -> float:
        return time.process_time()


def make_clock(device: str) -> Clock:
    return WallClock() if device == "cuda" else ProcessorClock()


def make_training(args: argparse.Namespace, out: Path) -> DraftTraining:
    plan = LearnPlan(
        server="http://none", draft=args.draft, out=out, model=args.model, length=args.length, rows=args.rows,
        epochs=args.epochs, learning_rate=args.learning_rate, device=args.device, share=1.0,
    )  # fmt: skip
    clock = make_clock(args.device)
    return DraftTraining(
        plan, "benchmarks/drafts/learning.py", clock, PlainProgress(clock, io.StringIO()), Pacer(1.0, clock, time.sleep)
    )


def overall(training: DraftTraining, draft: Path, samples: Sequence[LearningSample]) -> Score:
    return training.score(draft, samples).chain_overall


def replay(
    args: argparse.Namespace, samples: Sequence[LearningSample], out: Path
) -> tuple[list[Window], VersionFolder]:
    base = find_model(args.draft).resolve()
    folder, feed, training = VersionFolder(out), Feed(base), make_training(args, out)
    folder.create(base, "http://none")
    clock = WallClock()
    memory = SampleMemory(MemoryLimits(args.recent_tokens, held_out=args.held_out, replay=0.25))
    limits = LearnerLimits(args.new_tokens, min_held_out=args.min_held_out, margin=0.01)
    learner = Learner(
        folder, feed, feed, training, memory, limits, PlainProgress(clock), lambda seconds: None, StopRequest(),
        lambda lineages, path: None,
    )  # fmt: skip
    windows = []
    for start in range(0, len(samples), args.window):
        part = samples[start : start + args.window]
        version = folder.current()
        static = overall(training, base, part)
        learned = static if version == 0 else overall(training, folder.draft(version), part)
        spent = sum(lineage.seconds for lineage in folder.lineages())
        windows.append(Window(part[0].category, static, learned, version, spent))
        print(
            f"{part[0].category:8} static {static.tokens_per_round:.2f} learned {learned.tokens_per_round:.2f} "
            f"version {version}", flush=True,
        )  # fmt: skip
        for sample in part:
            feed.ring.add(sample.prompt, sample.output, (), 0, 1, sample.tenant, sample.category)
        learner.tick()
    return windows, folder


def summary(windows: Sequence[Window], folder: VersionFolder) -> str:
    lines = [
        "| domain | windows | static: alpha, tokens per round | learned, whole domain | learned, last window | "
        "better than static from | trained until then |",
        "|---|---|---|---|---|---|---|",
    ]
    for domain in dict.fromkeys(window.domain for window in windows):
        own = [window for window in windows if window.domain == domain]
        static, learned = (sum((getattr(window, name) for window in own), Score()) for name in ("static", "learned"))
        last, last_static = own[-1].learned, own[-1].static
        better = next((i for i, window in enumerate(own) if window.learned.rounds < 0.98 * window.static.rounds), None)
        since = "never | " if better is None else f"window {better + 1} | {own[better].seconds - own[0].seconds:.1f} s"
        lines.append(
            f"| {domain} | {len(own)} | {shown(static)} | {shown(learned)} | "
            f"{shown(last)} (static {last_static.tokens_per_round:.2f}) | {since} |"
        )
    lineages = folder.lineages()
    kept = sum(lineage.status == "kept" for lineage in lineages)
    seconds = sum(lineage.seconds for lineage in lineages)
    return "\n".join([*lines, "", f"{len(lineages)} versions, {kept} kept, {seconds:.0f} s of training in all"])


def shown(score: Score) -> str:
    return f"{score.alphas[0]:.3f}, {score.tokens_per_round:.2f}"


def plot(windows: Sequence[Window], path: Path, draft: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    values: tuple[tuple[str, Callable[[Score], float]], ...] = (
        ("Alpha of the first draft", lambda score: score.alphas[0]),
        ("Tokens per round, chain of 5", lambda score: score.tokens_per_round),
    )
    figure, axes = pyplot.subplots(1, 2, figsize=(10.5, 3.8), layout="constrained")
    numbers = range(1, len(windows) + 1)
    for axis, (title, value) in zip(axes, values, strict=True):
        axis.plot(
            numbers,
            [value(window.static) for window in windows],
            "o--",
            color="#888888",
            markersize=4,
            label=f"{draft}, static",
        )
        axis.plot(
            numbers,
            [value(window.learned) for window in windows],
            "o-",
            color="#1f5fa8",
            markersize=4,
            label="with learn",
        )
        for i, window in enumerate(windows):
            if i and window.domain != windows[i - 1].domain:
                axis.axvline(i + 0.5, color="#cccccc", linewidth=1)
            if i == 0 or window.domain != windows[i - 1].domain:
                axis.text(
                    i + 0.6, 0.02, window.domain, transform=axis.get_xaxis_transform(), fontsize=9, color="#555555"
                )
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("window of traffic, scored before it is learned from")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def serve(args: argparse.Namespace, samples: Sequence[LearningSample], learned: Path) -> str:
    """Texts of a window that change with the draft or against plain decoding, and the speed of each."""
    clock, plain = make_clock(args.device), list[tuple[int, ...]]()
    unit = "second" if args.device == "cuda" else "processor second"
    lines = [f"| draft | texts different | tokens per round | tokens per {unit} |", "|---|---|---|---|"]
    sampling = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    # On a GPU, texts are bitwise the same with up to 16 rows.
    batch = 1 if args.device == "cuda" else args.window
    options = {"depth": "fixed", "max_depth": 5, "breaker_rounds": 10**9}
    for names, draft in ((("plain", "static"), args.draft), (("learned",), str(learned))):
        with LLM(
            args.model, draft=draft, device=args.device, max_num_seqs=batch, max_model_len=1024, speculation=options
        ) as llm:
            llm.warm_up()
            for name in names:
                chosen = {"enabled": name != "plain"}
                llm.generate([list(samples[0].prompt)], sampling, speculation=chosen)  # not counted
                started = clock.now()
                texts = llm.generate([list(sample.prompt) for sample in samples], sampling, speculation=chosen)
                seconds, done = clock.now() - started, [text.completions[0] for text in texts]
                plain = plain or [answer.token_ids for answer in done]
                changed = sum(answer.token_ids != text for answer, text in zip(done, plain, strict=True))
                tokens = sum(len(answer.token_ids) - 1 for answer in done)
                rounds = sum(answer.speculation.num_spec_steps for answer in done)
                rate = f"{tokens / rounds:.2f}" if rounds else "1.00"
                lines.append(f"| {name} | {changed} of {len(done)} | {rate} | {tokens / seconds:.1f} |")
    return "\n".join(lines)


def adapt(args: argparse.Namespace, domains: Sequence[str], samples: Sequence[LearningSample], out: Path) -> str:
    """Scores before and after further training on each domain alone."""
    base, training = find_model(args.draft).resolve(), make_training(args, out)
    lines = [
        "| domain | before: alpha, tokens per round | after | samples trained on | seconds | offline gate |",
        "|---|---|---|---|---|---|",
    ]
    for domain in domains:
        own = [sample for sample in samples if sample.category == domain]
        half = len(own) * 3 // 5
        (out / domain).mkdir(parents=True)
        found = training.run(base, own[:half], own[half:], out / domain, StopRequest())
        assert found is not None
        before, after = (sum(scores, Score()) for scores in (found.before, found.after))
        reason = decide_offline(
            [score.rounds for score in found.before], [score.rounds for score in found.after]
        ).reason
        lines.append(f"| {domain} | {shown(before)} | {shown(after)} | {half} | {found.seconds:.0f} | {reason} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--traffic", type=Path, default=Path("traffic.json"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="smollm2-distilled")
    parser.add_argument("--domains")
    parser.add_argument("--each", type=int, default=40, help="samples of a domain")
    parser.add_argument("--chat", type=int, help="samples of chat, if not as many as of the other domains")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--window", type=int, default=8, help="samples of a window")
    parser.add_argument("--new-tokens", type=int, default=550)
    parser.add_argument("--recent-tokens", type=int, default=4000)
    parser.add_argument("--min-held-out", type=int, default=6)
    parser.add_argument("--held-out", type=float, default=0.3)
    parser.add_argument("--length", type=int, default=160)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--as-shipped", action="store_true", help="the learner's settings are those of `paceline learn`"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--windows", type=Path, help="file for the scores of all windows")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.as_shipped:
        shipped = LearnPlan(server="http://none", draft=args.draft, out=Path())
        for name in SETTINGS:
            setattr(args, name, getattr(shipped, name))
    with tempfile.TemporaryDirectory() as name:
        if args.domains is not None:
            domains = args.domains.split(",")
            samples = traffic(
                args.data, args.traffic, dict.fromkeys(domains, args.each), args.tokens, args.device, args.model
            )
            print(adapt(args, domains, samples, Path(name)))
            return
        counts = {"chat": args.chat or args.each, "german": args.each, "code": args.each}
        samples = traffic(args.data, args.traffic, counts, args.tokens, args.device, args.model)
        windows, folder = replay(args, samples, Path(name) / "out")
        print(summary(windows, folder))
        for lineage in folder.lineages():
            reason = lineage.offline.reason if lineage.offline is not None else lineage.note
            print(
                f"version {lineage.version}: {lineage.samples} samples, {lineage.seconds:.1f} s, {lineage.status}: {reason}"
            )
        if args.windows is not None:
            args.windows.write_text(json.dumps([asdict(window) for window in windows]))
        if args.plot is not None:
            plot(windows, args.plot, args.draft)
        print(serve(args, samples[-args.window :], folder.draft(folder.current())))


if __name__ == "__main__":
    main()
