"""`paceline planner` sizes the pools of a running cluster, and `paceline plan` says how many workers of each role, and why.

The planner's sizes are advised or carried out.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console
from paceline.cli import planning_options as options
from paceline.cli.options import JsonFile, check_folders, check_plots, print_written, write_json
from paceline.cli.simulate import print_plan
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.pool_config import Role
from paceline.gateway import ServerClient
from paceline.planning import ROLES
from paceline.planning.planner import (
    HOLD_SECONDS,
    ClusterLimits,
    ClusterPlan,
    Decision,
    MetricsReader,
    Planner,
    PlannerConfig,
    plan,
    with_wanted,
)
from paceline.planning.traces import TrafficPattern
from paceline.policy.scaling.changes import resized

if TYPE_CHECKING:
    from paceline.deploy.processes import LivePools

TIMEOUT = 5.0
"""Seconds that a gateway has to answer."""


def planner_command(
    url: Annotated[str, typer.Option(help="Address of the gateway.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="PACELINE_API_KEY", help="Key with the scope `admin`, if the gateway has keys.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="CLUSTER.yaml", help="The cluster to act on, with --act.")
    ] = None,
    act: Annotated[bool, typer.Option("--act", help="Change the pools. Default: advise only.")] = False,
    profile: options.Profile = "h200-8b",
    alpha: options.Alpha = None,
    alpha_spread: options.AlphaSpread = 0.0,
    max_depth: options.MaxDepth = 8,
    ttft_ms: options.TtftMs = 1000.0,
    tpot_ms: options.TpotMs = 50.0,
    share: options.Share = 0.95,
    max_workers: Annotated[int, typer.Option(min=1, help="Most workers of all roles.")] = 8,
    max_dollars: Annotated[float | None, typer.Option(min=0.0, help="Most dollars per hour.")] = None,
    price: options.Price = None,
    draft_price: options.DraftPrice = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two observations.")] = 10.0,
    season: Annotated[float | None, typer.Option(min=0.0, help="Seconds of a season, such as 86400.")] = None,
    hold: Annotated[
        float, typer.Option(min=0.0, help="Seconds of past load that a pool must be able to carry.")
    ] = HOLD_SECONDS,
    count: Annotated[int | None, typer.Option(min=1, help="Observations after which to stop. Default: never.")] = None,
) -> None:
    """Plan the pools of a running cluster: read the gateway's metrics, forecast, decide, and say why.

    Every change is printed with its reason, and a decision to keep the sizes when its cause is new. The
    gateway shows the decisions at /admin/plan and in its metrics.
    """
    if act and config is None:
        raise InvalidRequest(
            "--act needs --config CLUSTER.yaml, the file that the cluster was started with", field="act"
        )
    settings = PlannerConfig(
        options.read_profile(profile, price, draft_price),
        options.read_objective(ttft_ms, tpot_ms, share),
        ClusterLimits(max_workers, math.inf if max_dollars is None else max_dollars),
        options.read_speculation(alpha, max_depth, alpha_spread),
        interval,
        period=season,
        hold=hold,
    )
    gateway = ServerClient(url, api_key, TIMEOUT)
    pools = _Pools.open(config) if config is not None else None
    observer = _Observer(Planner(settings), MetricsReader(settings.objective), gateway, pools, act)
    doing = "changes the pools" if act else "advises; --act changes the pools"
    console.err.print(
        f"reads the metrics every {interval:g} s and {doing}. Ctrl-C ends it", markup=False, soft_wrap=True
    )
    try:
        for number in range(count if count is not None else 2**63):
            if number:
                time.sleep(interval)
            observer.observe()
    except KeyboardInterrupt:
        pass


class _Problems:
    """Prints an error when it is new, and one line when its action works again."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}

    @contextmanager
    def of(self, action: str, *ignored: type[PacelineError]) -> Iterator[None]:
        """Runs `action`, such as `read the metrics`. A `PacelineError` ends it. An error of `ignored` is not printed."""
        try:
            yield
        except ignored:
            return
        except PacelineError as error:
            if self._shown.get(action) != str(error):
                self._shown[action] = str(error)
                console.fail(f"cannot {action}: {error}")
            return
        if self._shown.pop(action, None) is not None:
            console.err.print(f"can {action} again", markup=False)


class _Observer:
    """Decides at every observation, and prints a decision if it changes a size or if its cause is not the one last shown."""

    def __init__(
        self, planner: Planner, reader: MetricsReader, gateway: ServerClient, pools: "_Pools | None", act: bool
    ) -> None:
        self._planner, self._reader, self._gateway, self._pools, self._act = planner, reader, gateway, pools, act
        self._problems = _Problems()
        self._shown: tuple[object, ...] = ()

    def observe(self) -> None:
        page = None
        with self._problems.of("read the metrics"):
            page = self._gateway.text("/metrics")
        seen = None if page is None else self._reader.read(page, time.time())
        if seen is None:
            return
        self._planner.decide(seen if self._pools is None else with_wanted(seen, self._pools.sizes()))
        decision = self._planner.decisions[-1]
        with self._problems.of("show the plan at the gateway", InvalidRequest):  # it may have no admin routes
            self._gateway.send("PUT", "/admin/plan", {**asdict(decision), "is_acting": self._act})
        cause = (decision.cause, decision.capacity > 0.0)
        if decision.changes or cause != self._shown:
            console.out.print(_line(decision, self._act), markup=False, soft_wrap=True)
        self._shown = cause
        if self._act and decision.changes and self._pools is not None:
            with self._problems.of("change the pools"):
                self._pools.resize(decision.sizes)


def _line(decision: Decision, act: bool) -> str:
    moves = [
        f"{role} {decision.before.get(role, 0)} -> {size}"
        for role, size in decision.sizes.items()
        if decision.before.get(role, 0) != size
    ]
    moment = time.strftime("%H:%M:%S", time.localtime(decision.time))
    verb = "set" if act else "advise"
    if not moves:
        verb, moves = "keep", [f"{role} {size}" for role, size in decision.sizes.items()]
    return f"{moment} {verb} {', '.join(moves)}: {decision.cause}. {decision.reason} ${decision.dollars_per_hour:.2f} an hour."


class _Pools:
    """The pools of a running cluster, by role: the first pool of each."""

    def __init__(self, config: ClusterConfig, live: "LivePools") -> None:
        self._live = live
        self._names: dict[Role, str] = {}
        for pool in config.pools:
            if pool.role in ROLES:
                self._names.setdefault(pool.role, pool.name)

    @classmethod
    def open(cls, file: Path) -> "_Pools":
        from paceline.deploy import live_pools
        from paceline.deploy.processes import load_cluster

        config = load_cluster(file)
        return cls(config, live_pools(config))

    def sizes(self) -> dict[Role, int]:
        """Workers that the pools should have."""
        state = self._live.desired()
        return {role: len(state.of_pool(name)) for role, name in self._names.items()}

    def resize(self, sizes: Mapping[Role, int]) -> None:
        for role, name in self._names.items():
            if role in sizes:
                self._live.edit(lambda state, name=name, size=sizes[role]: resized(state, name, size))  # type: ignore[misc]


def plan_command(
    trace: options.TraceFile = None,
    profile: options.Profile = "h200-8b",
    alpha: options.Alpha = None,
    alpha_spread: options.AlphaSpread = 0.0,
    max_depth: options.MaxDepth = 8,
    rate: options.Rate = 1.0,
    prompt_tokens: options.PromptTokens = 1000,
    output_tokens: options.OutputTokens = 200,
    spread: options.Spread = 0.5,
    prefix_tokens: options.PrefixTokens = 0,
    prefix_groups: options.PrefixGroups = 1,
    burst: options.Burst = 1.0,
    seconds: options.Seconds = None,
    scale: options.Scale = 1.0,
    seed: options.Seed = 0,
    ttft_ms: options.TtftMs = 1000.0,
    tpot_ms: options.TpotMs = 50.0,
    share: options.Share = 0.99,
    max_workers: Annotated[int, typer.Option(min=1, help="Most target and draft workers.")] = 64,
    max_dollars: Annotated[float | None, typer.Option(min=0.0, help="Most dollars per hour.")] = None,
    price: options.Price = None,
    draft_price: options.DraftPrice = None,
    explain: Annotated[bool, typer.Option("--explain", help="List every cluster that was simulated.")] = False,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Plot cost against time per token.")
    ] = None,
) -> None:
    """Find the cheapest cluster that meets an objective, by simulation, with the reason.

    Exit status 1: no cluster within the limits meets it.
    """
    check_folders(json_file, plot_file)
    check_plots(plot_file)
    traffic = TrafficPattern(rate, prompt_tokens, output_tokens, spread, prefix_tokens, prefix_groups, burst)
    objective = options.read_objective(ttft_ms, tpot_ms, share)
    limits = ClusterLimits(max_workers, math.inf if max_dollars is None else max_dollars)
    worker = options.read_profile(profile, price, draft_price)
    speculation = options.read_speculation(alpha, max_depth, alpha_spread)
    requests = options.read_trace(trace, traffic, seconds, scale, seed)
    with console.err.status("simulating") as status:
        found = plan(
            worker, requests, objective, limits, speculation, seed, lambda text: status.update(f"simulating {text}")
        )
    print_plan(found, objective, explain, console.out)
    if speculation is None:
        console.out.print(options.NO_ALPHA, style="dim")
    if json_file is not None:
        write_json(json_file, _to_json(found))
    if plot_file is not None:
        from paceline.tools.plots import plot_plan

        plot_plan(found, requests.name, plot_file)
    print_written(json_file, plot_file)
    if not found.is_met:
        raise typer.Exit(1)


def _to_json(found: ClusterPlan) -> dict[str, Any]:
    return {
        "is_met": found.is_met,
        "reasons": found.reasons,
        "saving_per_month": found.saving_per_month,
        "choice": asdict(found.choice),
        "plain": None if found.plain is None else asdict(found.plain),
        "evaluations": [asdict(evaluation) for evaluation in found.evaluations],
    }
