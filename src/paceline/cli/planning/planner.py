"""`paceline planner`: sizes of the pools of a running cluster, advised or carried out."""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.planning import options
from paceline.cli.render import console
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidRequest, PacelineError
from paceline.planning.autoscaling.decision import HOLD_SECONDS, Decision, PlannerConfig
from paceline.planning.autoscaling.gateway_metrics import MetricsReader, with_wanted
from paceline.planning.autoscaling.observation import ROLES, Role
from paceline.planning.autoscaling.planner import Planner
from paceline.planning.sizing.candidate import Limits
from paceline.server.client import ServerClient, ServerUnavailable

if TYPE_CHECKING:
    from paceline.runtime.deploy.rollout import LivePools

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
        Limits(max_workers, math.inf if max_dollars is None else max_dollars),
        options.read_speculation(alpha, max_depth, alpha_spread),
        interval,
        period=season,
        hold=hold,
    )
    gateway = ServerClient(url, api_key, TIMEOUT)
    pools = _Pools.open(config) if config is not None else None
    planner, reader = Planner(settings), MetricsReader(settings.objective)
    doing = "changes the pools" if act else "advises; --act changes the pools"
    console.err.print(f"reads the metrics every {interval:g} s and {doing}. Ctrl-C ends it", markup=False)
    shown: tuple[object, ...] = ()
    try:
        for number in range(count if count is not None else 2**63):
            if number:
                time.sleep(interval)
            shown = _observe(planner, reader, gateway, pools, act, shown)
    except KeyboardInterrupt:
        pass


def _observe(
    planner: Planner,
    reader: MetricsReader,
    gateway: ServerClient,
    pools: "_Pools | None",
    act: bool,
    shown: tuple[object, ...],
) -> tuple[object, ...]:
    """Decide once, and print the decision if it changes a size or if its cause is not the one last shown. Returns the cause
    that is shown."""
    try:
        page = gateway.text("/metrics")
    except PacelineError as error:
        console.fail(f"cannot read the metrics: {error}")
        return shown
    seen = reader.read(page, time.time())
    if seen is None:
        return shown
    planner.decide(seen if pools is None else with_wanted(seen, pools.sizes()))
    decision = planner.decisions[-1]
    _publish(gateway, decision, act)
    cause = (decision.cause, decision.capacity > 0.0)
    if decision.changes or cause != shown:
        console.out.print(_line(decision, act), markup=False, soft_wrap=True)
    if act and decision.changes and pools is not None:
        try:
            pools.resize(decision.sizes)
        except PacelineError as error:
            console.fail(f"could not change the pools: {error}")
    return cause


def _publish(gateway: ServerClient, decision: Decision, act: bool) -> None:
    """Show the decision on the gateway's page. Best effort: a gateway without admin routes does not show it."""
    with suppress(InvalidRequest):
        try:
            gateway.send("PUT", "/admin/plan", {**asdict(decision), "is_acting": act})
        except ServerUnavailable as error:
            console.fail(str(error))


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
        from paceline.runtime.deploy.cluster_file import load_cluster
        from paceline.runtime.deploy.deployment import live_pools

        config = load_cluster(file)
        return cls(config, live_pools(config))

    def sizes(self) -> dict[Role, int]:
        """Workers that the pools should have."""
        state = self._live.desired()
        return {role: len(state.of_pool(name)) for role, name in self._names.items()}

    def resize(self, sizes: Mapping[Role, int]) -> None:
        for role, name in self._names.items():
            if role in sizes:
                self._live.edit(lambda state, name=name, size=sizes[role]: state.scaled(name, size))  # type: ignore[misc]
