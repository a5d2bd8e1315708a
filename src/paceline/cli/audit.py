"""`paceline audit`: what can be proved about what was generated."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.bench.prompts import load_prompts, select
from paceline.cli import console
from paceline.cli.audit_tables import print_report
from paceline.cli.bar import counting_bar
from paceline.cli.default_command import falls_back_to
from paceline.cli.models import loaded
from paceline.cli.options import ENGINE, with_settings
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidRequest, MissingDependency, PacelineError
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import Verification
from paceline.server.auth.audit_log import TrailBroken
from paceline.server.auth.audit_log import verify as verify_trail
from paceline.server.config.config import ServerConfig

if TYPE_CHECKING:
    from paceline.audit.auditor import Workload
    from paceline.audit.report import Report
    from paceline.engine.llm import LLM, Prompt

PROMPTS = "prompts"
NEVER = 2**31
"""Low windows in a row before the breaker opens: an audit wants drafts, whatever they bring."""

audit = typer.Typer(cls=falls_back_to(PROMPTS), rich_markup_mode="markdown")


@audit.callback()
def about() -> None:
    """What can be proved about what was generated."""


@audit.command(PROMPTS)
@with_settings({name: one for name, one in ENGINE.items() if name != "audit_fraction"})
def audit_prompts(
    config: ServerConfig,
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPTS.jsonl", help="Lines of JSON with `prompt` or `turns`, of which the first is asked."
        ),
    ],
    verification: Annotated[
        str | None, typer.Option(help="`coupled` or `rejection`.", show_default="as configured: coupled")
    ] = None,
    method: Annotated[str | None, typer.Option(help="How to draft.", show_default="as configured")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="Of an answer, at the most.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of the first prompt; the next has the next one.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts at the most, of all categories in turn.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Prompts at a time, in one batch.")] = 8,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.html", help="Write a report with plots there.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
) -> None:
    """Check that speculation leaves the text alone, on your prompts. `paceline audit verify` checks a trail of strict mode.

    Every prompt is answered with speculation and without. Coupled rounds are replayed from seed and position, and re-scored by
    one plain pass over the finished text. Of rejection rounds, the p and q that were used are compared with those of plain
    passes, draws are replayed, and the two sets of answers are put to a two-sample test. Drafts are as deep as
    --speculation-max-depth, always.

    Status 0: clean. 1: something drifted. 2: the audit could not be made.
    """
    try:
        report = _audit(
            _always_drafting(config.engine, verification, method),
            prompts,
            limit,
            SamplingParams(max_tokens=tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
            concurrency,
            report_file,
            json_file,
        )
    except (PacelineError, typer.Exit):
        raise
    except Exception:  # status 1 would say that something drifted
        logging.getLogger(__name__).exception("the audit could not be made")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.fail("stopped before the end: nothing was proved")
        raise typer.Exit(130) from None
    print_report(report, console.out)
    raise typer.Exit(0 if report.is_clean else 1)


@audit.command()
def verify(
    file: Annotated[Path, typer.Argument(help="The server's setting `audit_trail` names it.")],
    head: Annotated[
        str | None,
        typer.Option(
            metavar="HASH", help="A head that was noted earlier: it must be in the chain.", show_default=False
        ),
    ] = None,
) -> None:
    """Prove that a trail of strict mode is as it was written.

    A line that was changed, removed, added or moved breaks the chain of hashes: the first such line is named and the status is
    1. An end that was cut off, or a file written anew, shows only against a --head that was kept elsewhere: from the last
    verification, from the server's log, or from GET /admin/trail.
    """
    try:
        found = verify_trail(file, head)
    except TrailBroken as error:
        console.fail(str(error))
        raise typer.Exit(1) from None
    console.out.print(f"{found.records} records, none changed; the head is {found.head}", soft_wrap=True)
    if found.unfinished:
        console.out.print(f"without an end, so running or cut short: {', '.join(found.unfinished)}", soft_wrap=True)


def _always_drafting(engine: EngineConfig, verification: str | None, method: str | None) -> EngineConfig:
    """The same engine, which drafts in every round, whether that pays or not."""
    speculation = replace(
        engine.speculation, enabled=True, depth="fixed", min_depth=None, acceptance_threshold=None, breaker_rounds=NEVER
    )
    if verification is not None:
        speculation = replace(speculation, verification=verification)  # type: ignore[arg-type]
    if method is not None:
        speculation = replace(speculation, method=method)
    return replace(engine, speculation=speculation, audit_fraction=0.0)


def _audit(
    engine: EngineConfig,
    prompts: Path,
    limit: int | None,
    sampling: SamplingParams,
    concurrency: int,
    report_file: Path | None,
    json_file: Path | None,
) -> "Report":
    from paceline.audit.auditor import Auditor, Workload
    from paceline.audit.page import page
    from paceline.audit.report import Report

    for file in (report_file, json_file):  # now, not after minutes
        if file is not None and not file.parent.is_dir():
            raise InvalidRequest(f"cannot write {file}: there is no folder {file.parent}", field="file")
    if report_file is not None:
        _check_plots()
    chosen = select(load_prompts(prompts), limit=limit)
    rule: Verification = engine.speculation.verification
    with loaded(engine) as llm:
        asked: list[Prompt] = [one.turns[0] for one in chosen]
        if llm.tokenizer.chat_template is not None:
            asked = [[{"role": "user", "content": text}] for text in asked]
        workload = Workload(asked, sampling, rule, concurrency=concurrency)
        report = Report(_about(llm, workload, prompts), _run(Auditor(llm), workload), workload.is_coupled)
        if report.num_drafted == 0:
            raise InvalidRequest(
                "nothing was drafted, so nothing was proved: choose another --method, a --draft, or more --tokens",
                field="method",
            )
        if report_file is not None:
            report_file.write_text(page(report, lambda token: llm.tokenizer.decode([token])), "utf-8")
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n", "utf-8")
    return report


def _run(auditor: Any, workload: "Workload") -> Any:
    with counting_bar() as bar:
        task = bar.add_task("prompts", total=len(workload.prompts))
        return auditor.run(workload, lambda done: bar.advance(task, done))


def _about(llm: "LLM", workload: "Workload", prompts: Path) -> dict[str, Any]:
    from paceline.engine.build import draft_of

    engine, sampling = llm.config, workload.sampling
    return {
        "model": engine.model,
        "draft": draft_of(engine) or "none",
        "method": llm.snapshot().flags.method,
        "verification": workload.verification,
        "temperature": sampling.temperature,
        "top_p, top_k": f"{sampling.top_p:g}, {sampling.top_k}",
        "depth": engine.speculation.max_depth,
        "prompts": f"{len(workload.prompts)} of {prompts.name}, {workload.concurrency} at a time",
        "seed": sampling.seed,
        "tokens of an answer": f"up to {sampling.max_tokens}",
    }


def _check_plots() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise MissingDependency("matplotlib", "an audit's report", "bench")
