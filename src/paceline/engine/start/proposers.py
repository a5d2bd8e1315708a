"""The proposers of an engine by method, and the methods of requests that name none."""

from collections.abc import Mapping

import torch

from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.errors import InvalidConfig
from paceline.core.request import DRAFT_METHODS
from paceline.engine.sizing import ResolvedLimits, num_lanes
from paceline.kv import BlockTables
from paceline.models import make_runner
from paceline.models.drafts import LoadedHead
from paceline.models.heads import proposable_ids
from paceline.models.heads.block import BlockModel, BlockRunner
from paceline.models.heads.eagle import EagleModel, EagleRunner
from paceline.models.loading import LoadedModel
from paceline.models.runner import ModelRunner
from paceline.speculation import Proposer
from paceline.speculation.proposers import (
    BlockProposer,
    CombinedProposer,
    LookaheadProposer,
    MedusaProposer,
    NgramProposer,
    SuffixProposer,
)
from paceline.speculation.proposers.eagle import EagleProposer
from paceline.speculation.proposers.model import BRANCHES, DraftModelProposer, LayerSkipProposer

EXIT_SHARE = 0.5
"""Share of the target's layers that `layer_skip` drafts with by default. It pays only for a target trained for early exits."""
PREFILL_ROWS = 512
"""Rows of a small pass of a draft prefill, which takes about as long as a pass of one row."""
LOOKUPS = ("ngram", "suffix")
MODELS = (*DRAFT_METHODS, "layer_skip")
"""Methods that `combined` chooses from, if the engine has them."""


def make_proposers(
    config: EngineConfig,
    limits: ResolvedLimits,
    target: LoadedModel,
    draft: LoadedModel | LoadedHead | None,
    runner: ModelRunner,
    tables: BlockTables,
    kv_dtype: torch.dtype | None,
) -> dict[str, Proposer]:
    """Proposers by method. `runner` and `tables` are the target's."""
    exit_layer = config.speculation.exit_layer or max(1, round(EXIT_SHARE * target.config.num_layers))
    proposers: dict[str, Proposer] = {
        "ngram": NgramProposer(),
        "suffix": SuffixProposer(),
        "lookahead": LookaheadProposer(),
        "layer_skip": LayerSkipProposer(runner, tables, exit_layer),
    }
    if isinstance(draft, LoadedHead):
        name, proposer = head_proposer(draft, runner.num_blocks, limits, config.prefix_caching)
        proposers[name] = proposer
    elif draft is not None:
        proposers["draft_model"] = DraftModelProposer(
            make_runner(draft.model, runner.num_blocks, kv_dtype),
            limits.max_batched_tokens,
            len(proposable_ids(target.config, draft.config)),
            target.config.vocab_size,
            config.prefix_caching,
            prefill_tokens(limits.max_batched_tokens, target.model.weight_bytes, draft.model.weight_bytes),
            branches=BRANCHES if draft.model.device.type == "cpu" else 1,  # CUDA graphs have chains
        )
    lookups, models = ({name: proposers[name] for name in kind if name in proposers} for kind in (LOOKUPS, MODELS))
    proposers["combined"] = CombinedProposer(lookups, models, WallClock())
    return proposers


def prefill_tokens(max_batched_tokens: int, target_bytes: int, draft_bytes: int) -> int:
    """Tokens of draft prefill within one step: one pass, or as many small ones as take about the time of one target pass. A
    draft that is n times smaller is taken to be n / 4 times faster."""
    passes = target_bytes // draft_bytes // 4
    return max(max_batched_tokens, min(max_batched_tokens, PREFILL_ROWS) * passes)


def head_proposer(
    head: LoadedHead, num_blocks: int, limits: ResolvedLimits, prefix_caching: bool
) -> tuple[str, Proposer]:
    """The method of a head and its proposer."""
    if isinstance(head.model, EagleModel):
        runner = EagleRunner(head.model, num_blocks, num_lanes(limits.max_num_seqs))
        return "eagle", EagleProposer(runner, limits.max_batched_tokens, prefix_caching)
    if isinstance(head.model, BlockModel):
        return "dflash", BlockProposer(BlockRunner(head.model, num_blocks), limits.max_batched_tokens, prefix_caching)
    return "medusa", MedusaProposer(head.model)


def default_methods(config: SpeculationConfig, proposers: Mapping[str, Proposer]) -> tuple[str, ...]:
    """The pool and the in-engine draft, if the engine has a pool and a draft and the configuration names no method."""
    drafts = [name for name in DRAFT_METHODS if name in proposers]
    if config.method is not None or "pool" not in proposers or not drafts:
        return ()
    return "pool", drafts[0]


def pick_method(config: SpeculationConfig, proposers: dict[str, Proposer]) -> str:
    """The method of a request that names none. Raises `InvalidConfig` if the configured one is not available."""
    if config.method is None:
        return next((name for name in ("pool", *DRAFT_METHODS) if name in proposers), "ngram")
    if config.method not in proposers:
        draft = DRAFT_METHODS.get(config.method)
        needs = f" (it needs {draft}: set `draft`)" if draft else ""
        raise InvalidConfig(
            f"speculation.method {config.method!r} is not available{needs}; choose from: {', '.join(sorted(proposers))}"
        )
    return config.method
