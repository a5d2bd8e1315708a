"""`paceline orchestrate`: speculative decoding over two servers that speak the OpenAI API."""

import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import console
from paceline.cli.generate import read_prompt
from paceline.cli.options import Seed
from paceline.core.config import DepthRule, SpeculationConfig
from paceline.core.errors import MissingDependency
from paceline.core.request import SamplingParams
from paceline.tools.orchestrate import Answer, Orchestrator
from paceline.tools.prompts import load_prompts

DraftUrl = Annotated[str, typer.Option(metavar="URL", help="The server that drafts, with or without /v1.")]
TargetUrl = Annotated[str, typer.Option(metavar="URL", help="The server whose text is generated.")]
PromptText = Annotated[str | None, typer.Argument(help="The text to complete; `-` or none reads standard input.")]
PromptFile = Annotated[Path | None, typer.Option(help="Read the prompt from a file.", metavar="FILE")]
PromptsFile = Annotated[
    Path | None, typer.Option(help="Answer the first turn of every line of this JSON-lines file.", metavar="FILE")
]
Chat = Annotated[bool, typer.Option("--chat", help="Send prompts as user messages, through the template.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Sample from this many of the likeliest tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")]
Depth = Annotated[DepthRule, typer.Option(help="Rule that decides how many tokens to draft.")]
MaxDepth = Annotated[int, typer.Option(min=0, max=32, help="Most tokens drafted in a round.")]
DraftKey = Annotated[str | None, typer.Option(help="API key of the draft.", envvar="PACELINE_DRAFT_KEY", metavar="KEY")]
TargetKey = Annotated[
    str | None, typer.Option(help="API key of the target.", envvar="PACELINE_TARGET_KEY", metavar="KEY")
]
DraftModel = Annotated[str | None, typer.Option(help="Model of the draft server. The default is the first listed.")]
TargetModel = Annotated[str | None, typer.Option(help="Model of the target server.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Texts generated at the same time.")]
MetricsPort = Annotated[
    int | None, typer.Option(help="Serve Prometheus metrics on this port of the local host.", metavar="PORT")
]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print one JSON object for each answer.")]


@dataclass(frozen=True, slots=True)
class _Workload:
    """Texts to answer, and how."""

    questions: list[tuple[str, str]]
    """Texts with their categories."""
    sampling: SamplingParams
    is_chat: bool
    concurrency: int


def orchestrate(
    draft: DraftUrl,
    target: TargetUrl,
    prompt: PromptText = None,
    file: PromptFile = None,
    prompts: PromptsFile = None,
    chat: Chat = False,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    depth: Depth = "goodput",
    max_depth: MaxDepth = 8,
    draft_key: DraftKey = None,
    target_key: TargetKey = None,
    draft_model: DraftModel = None,
    target_model: TargetModel = None,
    concurrency: Concurrency = 1,
    metrics_port: MetricsPort = None,
    json_output: JsonOutput = False,
) -> None:
    """Generate the target's text with drafts of another server.

    Both servers speak the OpenAI API: Paceline, vLLM, llama.cpp. The text is exactly the target's. Vocabulary and chat template
    are compared first. Standard output receives only the texts.
    """
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    workload = _Workload(_questions(prompt, file, prompts), sampling, chat, concurrency)
    connection = Orchestrator.connect(
        draft,
        target,
        draft_key=draft_key,
        target_key=target_key,
        draft_model=draft_model,
        target_model=target_model,
        config=SpeculationConfig(depth=depth, max_depth=max_depth),
    )
    asyncio.run(_run(connection, workload, metrics_port, json_output))


async def _run(
    connection: AbstractAsyncContextManager[Orchestrator], workload: _Workload, metrics_port: int | None, is_json: bool
) -> None:
    async with connection as orchestrator:
        _print_servers(orchestrator)
        if metrics_port is not None:
            _serve_metrics(orchestrator, metrics_port)
        await _answer_all(orchestrator, workload, is_json)


def _questions(prompt: str | None, file: Path | None, prompts: Path | None) -> list[tuple[str, str]]:
    """Texts with their categories."""
    if prompts is not None:
        return [(prompt.turns[0], prompt.category) for prompt in load_prompts(prompts)]
    return [(read_prompt(prompt, file), "default")]


def _print_servers(orchestrator: Orchestrator) -> None:
    """Prints the two servers, and how their vocabularies and chat templates compare."""
    console.err.print(f"target: {orchestrator.target}\ndraft: {orchestrator.draft}", style="dim")
    for check in orchestrator.checks:
        console.err.print(str(check), style="dim", markup=False)


async def _answer_all(orchestrator: Orchestrator, workload: _Workload, is_json: bool) -> None:
    """Generates all answers, `concurrency` at a time, and writes them in the order of the questions."""
    limit = asyncio.Semaphore(workload.concurrency)

    async def answer(text: str, category: str) -> Answer:
        async with limit:
            prompt: Any = [{"role": "user", "content": text}] if workload.is_chat else text
            return await orchestrator.generate(prompt, workload.sampling, category)

    tasks = [asyncio.create_task(answer(*question)) for question in workload.questions]
    for (text, _), task in zip(workload.questions, tasks, strict=True):
        _write_answer(text, await task, is_json)


def _write_answer(prompt: str, found: Answer, is_json: bool) -> None:
    if is_json:
        values = {**asdict(found), "finish_reason": found.finish_reason.value, "prompt": prompt}
        sys.stdout.write(json.dumps(values, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(found.text + "\n")
    sys.stdout.flush()
    console.err.print(
        f"{len(found.token_ids)} tokens in {found.rounds} rounds ({found.tokens_per_round:.2f} per round, "
        f"{found.accepted} of {found.drafted} drafted accepted), {found.seconds:.2f} s",
        style="dim",
    )


def _serve_metrics(orchestrator: Orchestrator, port: int) -> None:
    """The metrics of an engine, under the names that every Paceline server uses."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise MissingDependency("prometheus-client", "metrics", "server") from None
    from paceline.gateway.metrics import EngineCollector

    registry = CollectorRegistry()
    registry.register(EngineCollector(orchestrator.target.model, orchestrator.status))
    start_http_server(port, "127.0.0.1", registry)
