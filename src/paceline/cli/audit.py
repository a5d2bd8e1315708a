"""`paceline audit`: checks that speculation did not change the text."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli import console
from paceline.cli.console import counting_bar, loaded
from paceline.cli.options import ENGINE, JsonFile, check_folders, default_to, print_written, with_settings, write_json
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidRequest, MissingDependency, PacelineError
from paceline.core.request import SamplingParams, Verification
from paceline.gateway.audit import AuditLogBroken
from paceline.gateway.audit import verify as verify_log
from paceline.gateway.config import ServerConfig
from paceline.tools.prompts import DEFAULT_PROMPTS, load_prompts, select

if TYPE_CHECKING:
    from paceline.engine.start import LLM, Prompt
    from paceline.tools.audit import Report, Workload


PROMPTS = "prompts"
SHOWN = 10
"""Findings printed in full."""
NEVER = 2**31
"""Rounds before the circuit breaker opens: an audit drafts always."""

audit = typer.Typer(cls=default_to(PROMPTS), rich_markup_mode="markdown")


@audit.callback()
def about() -> None:
    """Check that speculation did not change the text, and verify audit logs."""


@audit.command(PROMPTS)
@with_settings({name: option for name, option in ENGINE.items() if name != "audit_fraction"})
def audit_prompts(
    config: ServerConfig,
    prompts: Annotated[
        Path | None,
        typer.Argument(
            metavar="PROMPTS.jsonl",
            help="Lines of JSON with `prompt` or `turns`; the first turn is used. Default: a built-in set.",
        ),
    ] = None,
    verification: Annotated[
        str | None, typer.Option(help="`coupled` or `rejection`.", show_default="as configured: coupled")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Drafting method.", show_default="as configured")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 32,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first prompt; every next prompt has the next seed.")
    ] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts, taken from all categories in turn.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Prompts in one batch.")] = 8,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.html", help="Write a report with plots.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Check on your prompts that speculation does not change the text. `paceline audit verify` checks an audit log.

    Every prompt is answered with and without speculation. Coupled rounds are replayed from seed and position, and re-scored by
    one plain pass over the finished text. For rejection rounds, the recorded p and q are compared with those of plain
    passes, samples are replayed, and a two-sample test compares the two sets of answers. The depth is always
    --speculation-max-depth.

    Exit status 0: no difference. 1: a difference. 2: the audit failed.
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
    except Exception:  # status 1 means a difference
        logging.getLogger(__name__).exception("the audit failed")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.fail("interrupted: the audit has no result")
        raise typer.Exit(130) from None
    print_report(report, console.out)
    print_written(report_file, json_file)
    raise typer.Exit(0 if report.is_clean else 1)


@audit.command()
def verify(
    file: Annotated[Path, typer.Argument(help="Audit log; the server's setting `audit_trail`.")],
    head: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="A head noted earlier; it must be in the chain.", show_default=False),
    ] = None,
) -> None:
    """Verify that an audit log of strict mode is unchanged.

    A line that was changed, removed, added or moved breaks the chain of hashes: the command prints the first such line and the
    exit status is 1. A truncated or rewritten file is detected only with a --head stored elsewhere: from the last verification,
    from the server's log, or from GET /admin/trail.
    """
    try:
        found = verify_log(file, head)
    except AuditLogBroken as error:
        console.fail(str(error))
        raise typer.Exit(1) from None
    console.out.print(f"{found.records} records, none changed; the head is {found.head}", soft_wrap=True)
    if found.unfinished:
        console.out.print(f"started but not finished: {', '.join(found.unfinished)}", soft_wrap=True)


def _always_drafting(engine: EngineConfig, verification: str | None, method: str | None) -> EngineConfig:
    """The same engine config, with a draft in every round."""
    speculation = replace(
        engine.speculation, enabled=True, depth="fixed", min_depth=None, acceptance_threshold=None, breaker_rounds=NEVER
    )
    if verification is not None:
        speculation = replace(speculation, verification=verification)  # type: ignore[arg-type]
    if method is not None:
        speculation = replace(speculation, method=method)
        speculation.check_method(engine.draft, has_pool=False)
    return replace(engine, speculation=speculation, audit_fraction=0.0)


def _audit(
    engine: EngineConfig,
    prompts: Path | None,
    limit: int | None,
    sampling: SamplingParams,
    concurrency: int,
    report_file: Path | None,
    json_file: Path | None,
) -> "Report":
    from paceline.tools.audit import Auditor, Report, Workload, page, require_scipy

    check_folders(report_file, json_file)  # before measuring
    if report_file is not None:
        _check_plots()
    chosen = select(load_prompts(prompts) if prompts else DEFAULT_PROMPTS, limit=limit)
    rule: Verification = engine.speculation.verification
    if rule == "rejection":
        require_scipy()
    with loaded(engine) as llm:
        questions: list[Prompt] = [entry.turns[0] for entry in chosen]
        if llm.tokenizer.chat_template is not None:
            questions = [[{"role": "user", "content": text}] for text in questions]
        workload = Workload(questions, sampling, rule, concurrency=concurrency)
        report = Report(_about(llm, workload, prompts), _run(Auditor(llm), workload), workload.is_coupled)
        if report.num_drafted == 0:
            raise InvalidRequest(
                "nothing was drafted, so nothing was checked: choose another --method, a --draft, or more --tokens",
                field="method",
            )
        if report_file is not None:
            report_file.write_text(page(report, lambda token: llm.tokenizer.decode([token])), "utf-8")
    if json_file is not None:
        write_json(json_file, report.to_json())
    return report


def _run(auditor: Any, workload: "Workload") -> Any:
    with counting_bar() as bar:
        task = bar.add_task("prompts", total=len(workload.prompts))
        return auditor.run(workload, lambda done: bar.advance(task, done))


def _about(llm: "LLM", workload: "Workload", prompts: Path | None) -> dict[str, Any]:
    from paceline.engine.start import draft_of

    engine, sampling = llm.config, workload.sampling
    source = prompts.name if prompts is not None else "the built-in set"
    return {
        "model": engine.model,
        "draft": draft_of(engine) or "none",
        "method": llm.snapshot().flags.method,
        "verification": workload.verification,
        "temperature": sampling.temperature,
        "top_p, top_k": f"{sampling.top_p:g}, {sampling.top_k}",
        "depth": llm.engine.validator.limits.max_depth,
        "prompts": f"{len(workload.prompts)} of {source}, {workload.concurrency} in a batch",
        "seed": sampling.seed,
        "tokens per answer": f"up to {sampling.max_tokens}",
    }


def _check_plots() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise MissingDependency("matplotlib", "an audit's report", "bench")


def print_report(report: "Report", terminal: Console) -> None:
    terminal.print(", ".join(f"{name} {value}" for name, value in report.about.items()), markup=False)
    terminal.print(_checks(report))
    for finding in report.findings[:SHOWN]:
        other = "" if finding.other is None else f", plain {finding.other}"
        terminal.print(
            f"{finding.kind}: prompt {finding.prompt}, output token {finding.index} ({finding.origin}): "
            f"{finding.token}{other}, {finding.figure:.3g}",
            style="red",
            markup=False,
        )
    if len(report.findings) > SHOWN:
        terminal.print(f"and {len(report.findings) - SHOWN:,} more", style="red")
    for line in report.power:
        terminal.print(line, style="dim", markup=False)
    drafts = f"{report.num_drafted:,} drafted tokens, {report.num_accepted:,} accepted"
    if report.is_clean:
        terminal.print(f"clean: {drafts}; the text is that of plain decoding", style="bold green")
    else:
        terminal.print(f"drift: {drafts}; the text differs from plain decoding", style="bold red")


def _checks(report: "Report") -> Table:
    table = Table("check", title="Audit", title_justify="left")
    table.add_column("checked", justify="right")
    table.add_column("wrong", justify="right")
    table.add_column("")
    for check in report.checks:
        wrong = Text(f"{check.num_wrong:,}", style="bold red" if check.num_wrong else "green")
        table.add_row(check.name, f"{check.num_checked:,} {check.unit}", wrong, check.detail)
    return table
