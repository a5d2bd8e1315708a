"""Write the training prompts of the shipped drafts: .jsonl files by category, for train_h200.py.

    python benchmarks/drafts/train_prompts.py --self-instruct REPO --natural-questions REPO --german REPO [REPO] \\
        --gsm8k gsm8k_train_questions.jsonl --exclude spec_bench_dev.jsonl OUT

REPO are git repositories, with or without a work tree: yizhongw/self-instruct, google-research-datasets/natural-questions,
UniversalDependencies/UD_German-GSD and UD_German-PUD. No prompt is kept that equals one of `--exclude` or shares eight words in
a row with one. The target writes the answers (train_h200.py), so that none of these texts is stored in a draft.
"""

import argparse
import json
import random
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

TEMPLATES = "data/finetuning/t0_train_50k/data_per_template/"
SHARED_WORDS = 8
LONGEST = 3000
"""Characters of a text."""
Templates = dict[str, list[str]]


def read(repository: Path, path: str) -> str:
    """Content of a file; empty, with a message, if a partial copy of the repository lacks it."""
    shown = subprocess.run(["git", "-C", str(repository), "show", f"HEAD:{path}"], capture_output=True, check=False)
    if shown.returncode:
        print(f"{repository.name} has no {path}: left out", flush=True)
        return ""
    return shown.stdout.decode()


def read_templates(repository: Path) -> Templates:
    listed = subprocess.run(
        ["git", "-C", str(repository), "ls-tree", "--name-only", "HEAD", TEMPLATES],
        capture_output=True,
        check=True,
        text=True,
    )
    return {Path(line).stem: records(read(repository, line), "prompt") for line in listed.stdout.split()}


def records(text: str, field: str) -> list[str]:
    return [str(json.loads(line)[field]).strip() for line in text.split("\n") if line]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def runs(text: str) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[i : i + SHARED_WORDS]) for i in range(len(found) - SHARED_WORDS + 1)}


def cut(text: str, most: int = LONGEST) -> str:
    """At most `most` characters, whole sentences."""
    return text if len(text) <= most else text[:most].rsplit(". ", 1)[0] + "."


def questions(templates: Templates, natural: Path) -> list[str]:
    found = []
    for part in ("dev.1.1", "test.1.1"):
        found += records(read(natural, f"nq_open/NQ-open.efficientqa.{part}.jsonl"), "question")
    asked = [text[0].upper() + text[1:].rstrip("?") + "?" for text in found]
    asked += templates["kilt_tasks_hotpotqa_straighforward_qa"] + templates["sciq_Direct_Question_Closed_Book_"]
    return asked + [
        template.split("\n")[0].removeprefix("Question: ").capitalize()
        for template in templates["wiki_qa_found_on_google"]
    ]


def german(repositories: Sequence[Path], dice: random.Random) -> list[str]:
    """Sentences to translate, most of them with spaces before the punctuation as in Spec-Bench."""
    sentences = []
    for repository in repositories:
        listed = subprocess.run(
            ["git", "-C", str(repository), "ls-tree", "--name-only", "HEAD"], capture_output=True, check=True, text=True
        )
        for name in listed.stdout.split():
            if name.endswith(".conllu"):
                sentences += re.findall(r"^# text = (.*)$", read(repository, name), re.MULTILINE)
    dice.shuffle(sentences)
    spaced = (
        re.sub(r"([.,!?;:])(?=\s|$)", r" \1", sentence) if dice.random() < 0.7 else sentence for sentence in sentences
    )
    return [f"Translate German to English: {sentence}" for sentence in spaced if 5 <= len(sentence.split()) <= 45]


def passages(templates: Templates) -> list[tuple[str, str]]:
    """(passage, question about it)"""
    forms = (
        (
            r"adversarial_qa_.*_answer_the_following_q",
            r'Given the following passage\n\n"(.*)",\n\nanswer.*Question: (.*)$',
            False,
        ),
        (
            r"quoref_What_Is_The_Answer",
            r"What is the answer for the question: (.*) from the following article \?\n\n(.*)$",
            True,
        ),
        (r"wiki_hop_original_generate_object", r"Information:\n\n(.*)\n\n+(What .*)$", False),
    )
    found = []
    for name, form, is_question_first in forms:
        for prompts in (prompts for key, prompts in templates.items() if re.match(name, key)):
            for match in filter(None, (re.match(form, prompt, re.DOTALL) for prompt in prompts)):
                first, second = match[1].strip(), match[2].strip()
                found.append((second, first) if is_question_first else (first, second))
    return found


def summaries(templates: Templates, texts: Sequence[tuple[str, str]], dice: random.Random) -> list[str]:
    articles = [
        template.removeprefix("Summarise the article:\n\n")
        for template in templates["cnn_dailymail_3_0_0_news_summary"]
    ]
    articles += [template.removeprefix("Summarize: ") for template in templates["xsum_summarize_DOC"]]
    for several in templates["multi_news_distill"]:
        articles += [article.strip() for article in several.split("Article: ")[1:] if len(article) > 500]
    reviews = templates["imdb_Movie_Expressed_Sentiment"] + templates["yelp_review_full_so_i_would"]
    others = [review for review in reviews if len(review) > 700] + [
        template.split("\n", 1)[-1] for template in templates["samsum_Summarize_"]
    ]
    joined = ["\n".join(text for text, _ in dice.sample(texts, 3)) for _ in range(700)]
    forms = "Summarize: ", "Summarize the following text: ", "TL;DR: "
    return [
        *("Summarize: " + cut(article, dice.randint(1800, LONGEST)) for article in (*articles, *joined)),
        *("Summarize: " + cut(text) for text, _ in texts),
        *(dice.choice(forms) + cut(text) for text in others),
    ]


def with_passages(texts: Sequence[tuple[str, str]], asked: Sequence[str], dice: random.Random) -> list[str]:
    """Questions after several passages, of which one or none holds the answer."""
    made = []
    for number in range(3):
        for text, question in texts:
            some = [text, *(other for other, _ in dice.sample(texts, dice.randint(1, 4)))]
            dice.shuffle(some)
            body = cut("\n".join(cut(text, 900) for text in some), LONGEST - 100)
            made.append(f"{body}\n{question if number == 0 else dice.choice(asked)}")
    return made


def tasks(templates: Templates, self_instruct: Path, dice: random.Random) -> list[str]:
    found = []
    for prompts in templates.values():
        short = [prompt for prompt in prompts if len(prompt) < 1500]
        found += dice.sample(short, min(16, len(short)))
    for file in ("data/seed_tasks.jsonl", "human_eval/user_oriented_instructions.jsonl"):
        for line in read(self_instruct, file).splitlines():
            task = json.loads(line)
            found.append(f"{task['instruction']}\n{task['instances'][0]['input']}")
    return found


def write(folder: Path, category: str, prompts: Iterable[str], excluded: Sequence[str]) -> None:
    equal, shared = {tuple(words(text)) for text in excluded}, set[tuple[str, ...]]().union(*map(runs, excluded))
    unique = dict.fromkeys(filter(None, (prompt.strip() for prompt in prompts)))
    kept = [prompt for prompt in unique if tuple(words(prompt)) not in equal and not runs(prompt) & shared]
    lines = (json.dumps({"prompt": prompt, "category": category}, ensure_ascii=False) + "\n" for prompt in kept)
    (folder / f"{category}.jsonl").write_text("".join(lines), "utf-8")
    print(f"{category}: {len(kept)} of {len(unique)} prompts", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--self-instruct", type=Path, required=True)
    parser.add_argument("--natural-questions", type=Path, required=True)
    parser.add_argument("--german", type=Path, nargs="+", required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--exclude", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    excluded = [turn for line in options.exclude.read_text("utf-8").splitlines() for turn in json.loads(line)["turns"]]
    dice, templates = random.Random(0), read_templates(options.self_instruct)
    asked, texts = questions(templates, options.natural_questions), passages(templates)
    files = {
        "questions": asked,
        "german": german(options.german, dice)[:9000],
        "summaries": summaries(templates, texts, dice),
        "passages": with_passages(texts, asked, dice),
        "tasks": tasks(templates, options.self_instruct, dice),
        "mathematics": records(options.gsm8k.read_text("utf-8"), "question"),
    }
    for category, prompts in files.items():
        write(options.out, category, prompts, excluded)


if __name__ == "__main__":
    main()
