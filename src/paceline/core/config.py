"""Configuration: frozen, composed, and strict about keys."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from paceline.core.errors import InvalidConfig, PacelineError
from paceline.core.speculation import MAX_DEPTH, Verification

DepthRule = Literal["goodput", "threshold", "additive", "fixed"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
WeightBits = Literal["none", "int8", "fp8"]
CacheDtype = Literal["auto", "fp8"]

AUDIT_FRACTION = 0.01


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """What the server offers; a request may ask for less."""

    enabled: bool = True
    """Whether to speculate; a run-time flag may say otherwise later."""
    method: str | None = None
    """Always there: `ngram`, `suffix`, `lookahead`, `layer_skip` and `combined`, which picks for every sequence. With a
    `draft`: `draft_model`, `eagle` or `medusa`, whichever it is. None: that one when there is a draft, otherwise `ngram`."""
    depth: DepthRule = "goodput"
    """The rule that decides how many tokens to draft; see docs/depth.md."""
    max_depth: int = 8
    """Drafted tokens a round at the most; rule `fixed` drafts exactly that many."""
    min_depth: int | None = None
    """The least that the rules `threshold` and `additive` go down to; None: what was published for them."""
    verification: Verification = "coupled"
    """`coupled`: the text is a function of seed and target alone. `rejection`: the textbook rule, for comparison."""
    acceptance_threshold: float | None = None
    """Acceptance below which the breaker and the rule `additive` count a loss; None: their own defaults. It controls
    drafting and never decides whether a token is accepted."""
    breaker_rounds: int = 3
    """Low windows in a row that open the breaker."""

    def __post_init__(self) -> None:
        _one_of("speculation.depth", self.depth, get_args(DepthRule))
        _one_of("speculation.verification", self.verification, get_args(Verification))
        if not 0 <= self.max_depth <= MAX_DEPTH:
            raise InvalidConfig(f"speculation.max_depth must be in [0, {MAX_DEPTH}], got {self.max_depth}")
        if self.min_depth is not None:
            if self.depth not in ("threshold", "additive"):
                raise InvalidConfig(
                    f"speculation.min_depth has no meaning with speculation.depth {self.depth!r}: leave it out, or choose "
                    "the rule threshold or additive"
                )
            if not 1 <= self.min_depth <= self.max_depth:
                raise InvalidConfig(
                    f"speculation.min_depth must be between 1 and speculation.max_depth ({self.max_depth}), "
                    f"got {self.min_depth}"
                )
        if self.acceptance_threshold is not None and not 0.0 < self.acceptance_threshold < 1.0:
            raise InvalidConfig(f"speculation.acceptance_threshold must be in (0, 1), got {self.acceptance_threshold}")
        if self.breaker_rounds < 1:
            raise InvalidConfig(f"speculation.breaker_rounds must be at least 1, got {self.breaker_rounds}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: str = "smollm2"
    """A folder, a GGUF file, a Hugging Face id in the local cache, or `smollm2`, the embedded model. For benchmarks,
    `inflate:llama-8b?base=smollm2&noise=0.06` makes a large model around a small one."""
    draft: str | None = "auto"
    """What rides in front: a draft trained for `model` (docs/drafts.md), or a second model of the same vocabulary, named like
    `model`. `auto`: on a GPU the best that ships for it, which `smollm2` has and other models have not; on a CPU, where it
    was measured to pay for greedy requests alone, none. null or `none`: nothing."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, …; `auto`: a GPU if there is one."""
    dtype: Dtype = "auto"
    """`auto`: float32 on CPU, bfloat16 on a GPU."""
    quantization: WeightBits = "none"
    """Round the matrices of the layers to 8 bits as they are loaded; what a checkpoint has quantised stays as it is."""
    draft_quantization: WeightBits = "none"
    """The same for `draft`."""
    kv_dtype: CacheDtype = "auto"
    """`auto`: the cache in the model's dtype. `fp8`: 8 bits, twice the tokens of bfloat16 at some loss of quality."""
    tensor_parallel_size: int = 1
    """GPUs that share the target, one process each; it must divide the model's heads. On a CPU, processes. The draft stays
    on the first."""
    max_model_len: int | None = None
    """Prompt and output tokens of one sequence at the most; None: what the model was made for, up to 8192."""
    max_num_seqs: int = 64
    """Sequences that run at once; further ones wait."""
    max_batched_tokens: int = 512
    """Rows of one forward pass; long prompts are computed in chunks of this many."""
    memory_fraction: float = 0.85
    """Share of the device's memory for weights, caches and activations of both models."""
    kv_tokens: int | None = None
    """Tokens the target's cache holds; None: as many as `max_num_seqs` sequences of full length want, within `memory_fraction`
    on a GPU and within 1 GiB on a CPU, but one sequence always."""
    prefix_caching: bool = True
    """Keep the cache of finished sequences for prompts that start alike."""
    kv_host_bytes: int | None = None
    """Memory of the host for cached blocks that the device has no room for; None: with `kv_disk` 1 GiB or one sequence of full
    length, without it none, since memory that nobody offered is not taken. On a CPU `kv_tokens` does the same for less. See
    docs/operations.md."""
    kv_disk: str | None = None
    """Folder for cached blocks, which survive a restart there; it must be this server's alone. None: no disk is used."""
    kv_disk_bytes: int = 16 * 2**30
    """How much of the disk `kv_disk` may take; what was not used for longest is deleted."""
    audit_fraction: float = AUDIT_FRACTION
    """Share of finished texts that the engine computes again by plain decoding in idle moments, to see that they are the
    same; 0: none. See docs/audit.md."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, get_args(Dtype))
        _one_of("quantization", self.quantization, get_args(WeightBits))
        _one_of("draft_quantization", self.draft_quantization, get_args(WeightBits))
        _one_of("kv_dtype", self.kv_dtype, get_args(CacheDtype))
        for name in (
            "tensor_parallel_size",
            "max_num_seqs",
            "max_batched_tokens",
            "max_model_len",
            "kv_tokens",
            "kv_disk_bytes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {value}")
        if not 0.0 <= self.audit_fraction <= 1.0:
            raise InvalidConfig(f"audit_fraction must be in [0, 1], got {self.audit_fraction}")
        if self.kv_host_bytes is not None and self.kv_host_bytes < 0:
            raise InvalidConfig(f"kv_host_bytes must be 0 or more, got {self.kv_host_bytes}")
        if self.kv_disk is not None and self.kv_host_bytes == 0:
            raise InvalidConfig("kv_disk needs memory that blocks pass through: raise kv_host_bytes, or leave it out")
        if (self.kv_disk is not None or self.kv_host_bytes) and not self.prefix_caching:
            raise InvalidConfig("kv_host_bytes and kv_disk keep the prefix cache: they need prefix_caching")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise InvalidConfig(f"memory_fraction must be in (0, 1], got {self.memory_fraction}")
        if self.max_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every running sequence needs a row"
            )


T = TypeVar("T")


def from_mapping(
    kind: type[T], values: Mapping[str, Any], where: str = "", error: type[PacelineError] = InvalidConfig
) -> T:
    """Build the dataclass `kind`. Wrong types and unknown keys are refused; of the latter the message names the
    one that was probably meant."""
    assert is_dataclass(kind)
    known = {f.name for f in fields(kind)}
    hints = get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            meant = (
                f"; did you mean {where + nearest[0]!r}?" if nearest else f"; known keys: {', '.join(sorted(known))}"
            )
            raise error(f"unknown key {where + key!r}{meant}")
        hint = hints[key]
        if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, Mapping):
            value = from_mapping(hint, value, f"{where}{key}.", error)
        elif not _fits(value, hint):
            raise error(f"{where}{key} must be {_expected(hint)}, got {value!r}")
        arguments[key] = value
    return kind(**arguments)


def _fits(value: Any, hint: Any) -> bool:
    kinds = get_args(hint) or (hint,)
    if Literal in (get_origin(hint), *map(get_origin, kinds)):  # its dataclass checks the choices
        return True
    origin = get_origin(hint)
    if isinstance(origin, type) and origin is not UnionType:  # a collection, whose parts are somebody else's to check
        return isinstance(value, origin)
    if isinstance(value, bool):  # an int to Python, not to us
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def _expected(hint: Any) -> str:
    kinds = get_args(hint) or (hint,)
    return " or ".join(
        "null" if kind is NoneType else "a mapping" if is_dataclass(kind) else kind.__name__ for kind in kinds
    )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidConfig(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
