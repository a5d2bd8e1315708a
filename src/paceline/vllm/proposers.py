"""The classes that vLLM constructs for `--speculative-config '{"method": "custom_class", "model": "paceline.vllm.…"}'`."""

import atexit
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidConfig
from paceline.policy.depth.goodput import GoodputDepth
from paceline.policy.depth.observation import DepthPolicy
from paceline.policy.depth.rules import FixedDepth
from paceline.speculation import Proposer, SequenceProgress
from paceline.speculation.proposers import CombinedProposer, NgramProposer, SuffixProposer
from paceline.vllm.decisions import LookupTime
from paceline.vllm.drafting import DraftLoop
from paceline.vllm.plugin import register
from paceline.vllm.replacements import replace_graphs
from paceline.vllm.sequences import Batch, RowSampling
from paceline.vllm.settings import DepthRule, Method, Settings, check_version

METHOD = "plugin"
"""The name under which the depth policy knows these drafts."""


class Lookups(NamedTuple):
    """Drafts from the text and recent outputs. They are chains, because vLLM verifies no trees."""

    parts: dict[str, Proposer]
    keep: Callable[[SequenceProgress], None] | None
    """Keeps the output of a sequence that ends without a draft. None if outputs do not become drafts of other sequences."""

    @classmethod
    def of(cls, method: Method) -> "Lookups":
        suffix = SuffixProposer(is_chain=True)
        parts: dict[str, Proposer] = {"ngram": NgramProposer(), "suffix": suffix}
        if method == "combined":
            return cls(parts, suffix.keep)
        return cls({method: parts[method]}, suffix.keep if method == "suffix" else None)

    def proposer(self, models: Mapping[str, Proposer], clock: Clock) -> Proposer:
        """The best of all parts and models."""
        if len(self.parts) == 1 and not models:
            return next(iter(self.parts.values()))
        return CombinedProposer(self.parts, models, clock)


def depth_policy(rule: DepthRule, max_depth: int, lookups: LookupTime) -> DepthPolicy:
    """The policy starts from the time of lookups, and learns that of a pool."""
    if rule == "fixed":
        return FixedDepth(max_depth)
    policy = GoodputDepth(max_depth)
    policy.calibrate_drafts(METHOD, lookups.lines, lookups.per_token)
    return policy


class VllmProposer:
    """vLLM's interface to a `DraftLoop`. Subclasses choose the proposer."""

    wants_sampling = False
    """Whether drafts depend on temperature and seed. Coupled sampling then reports them in `set_sampling`."""

    def __init__(self, vllm_config: Any) -> None:
        check_version()
        register()  # where the package is not installed, vLLM has not called it
        replace_graphs(VllmProposer)
        settings = Settings.read(vllm_config.additional_config)
        clock = WallClock()
        max_depth = vllm_config.speculative_config.num_speculative_tokens
        parallel = vllm_config.parallel_config
        self._is_used = parallel.rank == parallel.world_size - parallel.tensor_parallel_size
        """The scheduler takes the drafts of one rank, the first of the last pipeline stage."""
        self._sampling: list[RowSampling] = []
        lookups = Lookups.of(settings.method)
        lookup_time = LookupTime.measure(Lookups.of(settings.method).proposer({}, clock), clock, max_depth)
        self.loop = DraftLoop(
            METHOD,
            self.make_proposer(settings, lookups, vllm_config, clock),
            depth_policy(settings.depth, max_depth, lookup_time),
            max_depth,
            vllm_config.model_config.get_vocab_size(),
            clock,
            lookup_time,
            lookups.keep,
        )

    def make_proposer(self, settings: Settings, lookups: Lookups, vllm_config: Any, clock: Clock) -> Proposer:
        raise NotImplementedError

    def load_model(self, target_model: Any) -> None:
        """vLLM calls it once for every proposer. There is nothing to load."""

    def set_sampling(self, rows: list[RowSampling]) -> None:
        """Parameters of the rows of the next call of `propose`."""
        self._sampling = rows

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for every row of the batch, empty where none pays. vLLM calls it after each step."""
        if not self._is_used:
            return [[] for _ in sampled_token_ids]
        sampling, self._sampling = self._sampling, []
        return self.loop.propose(Batch(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, sampling))


class LocalProposer(VllmProposer):
    """`suffix`, `ngram` or `combined` inside vLLM's process. It needs no draft model and no pool."""

    def make_proposer(self, settings: Settings, lookups: Lookups, vllm_config: Any, clock: Clock) -> Proposer:
        if settings.workers:
            raise InvalidConfig("paceline.workers belongs to paceline.vllm.PoolProposer: remove it, or use that class")
        return lookups.proposer({}, clock)


class PoolProposer(VllmProposer):
    """Drafts come from draft workers, which prepare the next round while vLLM verifies the current round.

    A lookup drafts where it is better, and where the pool has no draft. Loss of the pool costs speed only.
    """

    wants_sampling = True

    def make_proposer(self, settings: Settings, lookups: Lookups, vllm_config: Any, clock: Clock) -> Proposer:
        from paceline.drafting import DraftAddress
        from paceline.drafting import PoolProposer as Pool
        from paceline.model_files.tokenizer import fingerprint, load_tokenizer
        from paceline.wire.keys import KeyFolder, Security

        if not settings.workers:
            raise InvalidConfig(
                "paceline.vllm.PoolProposer needs draft workers: "
                '--additional-config \'{"paceline": {"workers": ["tcp://HOST:PORT"]}}\''
            )
        security = None
        if settings.keys:
            keys = KeyFolder(Path(settings.keys))
            security = Security(keys.key_pair("target"), keys.public_key("draft"))
        tokenizer = load_tokenizer(settings.tokenizer or vllm_config.model_config.model)
        self.pool: Pool = Pool(
            [DraftAddress(address, address, security) for address in settings.workers],
            fingerprint(tokenizer),
            vllm_config.model_config.get_vocab_size(),
            name=f"vllm-{vllm_config.parallel_config.rank}",
            clock=clock,
        )
        atexit.register(self.pool.shut_down)
        return lookups.proposer({"pool": self.pool}, clock)
