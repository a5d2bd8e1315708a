"""`paceline advise`: which method, how deep, or not at all."""

from dataclasses import replace
from pathlib import Path

from paceline.bench.calibrate import Trial
from paceline.bench.presets import DEFAULT_PROMPTS
from paceline.bench.prompts import load_prompts, select
from paceline.cli.advise import options
from paceline.cli.advise.case import AdviceInput, DraftPlacement, GivenFigures, measured_case
from paceline.cli.advise.files import AdviceFiles
from paceline.cli.options import ENGINE, with_settings
from paceline.cli.output_files import JsonFile
from paceline.cli.render import console
from paceline.cli.render.advice import print_advice
from paceline.cluster.cost.advice import advise
from paceline.core.errors import InvalidRequest
from paceline.core.sampling import SamplingParams
from paceline.server.config.config import ServerConfig


@with_settings(ENGINE)
def advise_command(
    config: ServerConfig,
    prompts: options.Prompts = None,
    max_depth: options.MaxDepth = 10,
    batch: options.Batch = 1,
    tokens: options.Tokens = 32,
    temperature: options.Temperature = 0.0,
    methods: options.Methods = None,
    limit: options.Limit = 7,
    price: options.Price = None,
    draft_price: options.DraftPrice = 0.0,
    network_ms: options.NetworkMs = 0.0,
    pool_draft_ms: options.PoolDraftMs = None,
    pool_ready: options.PoolReady = 0.0,
    alpha: options.Alpha = None,
    draft_ms: options.DraftMs = None,
    verify_ms: options.VerifyMs = None,
    plain_ms: options.PlainMs = None,
    method: options.MethodName = "draft_model",
    target_gb: options.TargetGb = 0.0,
    draft_gb: options.DraftGb = 0.0,
    device_gb: options.DeviceGb = None,
    plot_file: options.PlotFile = None,
    html_file: options.HtmlFile = None,
    json_file: JsonFile = None,
) -> None:
    """Recommend a method and a depth, or plain decoding, with reasons.

    Based on a short run of the model on this machine or, with --alpha, --draft-ms and --verify-ms, on given figures.
    """
    files = AdviceFiles(plot_file, html_file, json_file)
    files.check()  # before measuring
    pool_seconds = None if pool_draft_ms is None else pool_draft_ms / 1e3
    draft = DraftPlacement(network_ms / 1e3, draft_price, pool_seconds, pool_ready)
    given = GivenFigures(method, alpha, draft_ms, verify_ms, plain_ms, target_gb, draft_gb, device_gb)
    if given:
        case = _given_case(given, prompts, batch, draft)
    else:
        chosen = select(load_prompts(prompts) if prompts else DEFAULT_PROMPTS, limit=limit)
        sampling = SamplingParams(temperature=temperature, max_tokens=tokens, seed=0)
        names = tuple(methods.split(",")) if methods else ()
        case = measured_case(config.engine, Trial(chosen, sampling, max_depth, batch, names), draft)
    case = replace(case, target=replace(case.target, price_per_hour=price))
    advice = advise(case.target, case.methods, max_depth)
    print_advice(advice, case.title, console.out)
    files.write(advice, case)


def _given_case(given: GivenFigures, prompts: Path | None, batch: int, draft: DraftPlacement) -> AdviceInput:
    if prompts is not None:
        raise InvalidRequest(f"given figures need no prompts: leave out {prompts}, or the figures", field="prompts")
    return given.case(batch, draft)
