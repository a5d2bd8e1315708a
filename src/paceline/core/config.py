"""Configuration of an engine: frozen, nested, and strict about keys."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from paceline.core.errors import InvalidConfig, PacelineError
from paceline.core.request import DRAFT_METHODS, MAX_DEPTH, METHODS, Verification

DepthRule = Literal["goodput", "threshold", "additive", "fixed"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
WeightBits = Literal["none", "int8", "fp8"]
ActivationFormat = Literal["int8", "float32"]
CacheDtype = Literal["auto", "fp8"]

AUDIT_FRACTION = 0.01
DEFAULT_DEPTH = 8
"""Most tokens drafted per round if `speculation.max_depth` is None and the draft is not a tree on a GPU."""
PUBLISHED_DEPTHS: Mapping[DepthRule, int] = {"threshold": 10, "additive": 16}
"""The same under rules whose publication bounds the depth."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculation settings of a server; a request may lower them."""

    enabled: bool = True
    """Whether to speculate; a run-time flag can change it."""
    method: str | None = None
    """Speculation method. Always available: `ngram`, `suffix`, `lookahead`, `layer_skip` and `combined`, which chooses per
    sequence. With a `draft`: `draft_model`, `eagle`, `dflash` or `medusa`, depending on the draft. The default is the draft's
    method, or `ngram` without a draft; with a draft and a draft pool it is the faster one, see docs/depth.md."""
    exit_layer: int | None = None
    """Layers of the target that `layer_skip` drafts with. The default is half of them. `paceline advise` compares several."""
    depth: DepthRule = "goodput"
    """Rule that decides how many tokens to draft; see docs/depth.md."""
    max_depth: int | None = None
    """Most tokens drafted per round; rule `fixed` always drafts this many. The default is 8, or 31 for the trees of an
    EAGLE draft on a GPU with rule `goodput`, and the published 10 and 16 with the rules `threshold` and `additive`."""
    min_depth: int | None = None
    """Least depth of the rules `threshold` and `additive`. The default is the published values."""
    verification: Verification = "coupled"
    """`coupled`: the text depends on seed and target alone. `rejection`: the textbook rule, for comparison."""
    acceptance_threshold: float | None = None
    """Acceptance rate below which the circuit breaker and the rule `additive` count a loss. The default is theirs. It
    controls drafting and never decides whether a token is accepted."""
    breaker_rounds: int = 3
    """What opens the circuit breaker. With the rules `threshold` and `additive`: this many rounds in a row with accepted /
    drafted under the threshold. With the others: this many windows of 16 rounds in a row with a measured loss."""

    def __post_init__(self) -> None:
        _one_of("speculation.depth", self.depth, get_args(DepthRule))
        _one_of("speculation.verification", self.verification, get_args(Verification))
        if self.exit_layer is not None and self.exit_layer < 1:
            raise InvalidConfig(f"speculation.exit_layer must be at least 1, got {self.exit_layer}")
        if self.max_depth is not None and not 0 <= self.max_depth <= MAX_DEPTH:
            raise InvalidConfig(f"speculation.max_depth must be in [0, {MAX_DEPTH}], got {self.max_depth}")
        if self.min_depth is not None:
            if self.depth not in ("threshold", "additive"):
                raise InvalidConfig(
                    f"speculation.min_depth has no effect with speculation.depth {self.depth!r}: remove it, or choose "
                    "the rule threshold or additive"
                )
            most = PUBLISHED_DEPTHS[self.depth] if self.max_depth is None else self.max_depth
            if not 1 <= self.min_depth <= most:
                raise InvalidConfig(
                    f"speculation.min_depth must be between 1 and speculation.max_depth ({most}), got {self.min_depth}"
                )
        if self.acceptance_threshold is not None and not 0.0 < self.acceptance_threshold < 1.0:
            raise InvalidConfig(f"speculation.acceptance_threshold must be in (0, 1), got {self.acceptance_threshold}")
        if self.breaker_rounds < 1:
            raise InvalidConfig(f"speculation.breaker_rounds must be at least 1, got {self.breaker_rounds}")

    def check_method(self, draft: str | None, has_pool: bool) -> None:
        """Raises `InvalidConfig` if no server with this `draft`, and perhaps a draft pool, has the method. Only the Python API
        takes further methods."""
        if self.method is None:
            return
        if self.method not in METHODS:
            raise InvalidConfig(
                f"speculation.method {self.method!r} does not exist; choose from: {', '.join(sorted(METHODS))}"
            )
        if self.method in DRAFT_METHODS and draft in (None, "none"):
            raise InvalidConfig(f"speculation.method {self.method!r} needs {DRAFT_METHODS[self.method]}: set `draft`")
        if self.method == "pool" and not has_pool:
            raise InvalidConfig("speculation.method 'pool' needs a pool with role draft in a cluster file")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of an engine."""

    model: str = "smollm2"
    """A folder, a GGUF file, a Hugging Face id in the local cache, or `smollm2`, the embedded model. For benchmarks,
    `inflate:llama-8b?base=smollm2&noise=0.06` builds a large model around a small one."""
    draft: str | None = "auto"
    """Draft: one trained for `model` (docs/drafts.md), or a second model with the same vocabulary, named like `model`.
    `auto`: the best draft shipped for the model (only `smollm2` has one); on a CPU only if it measures faster than plain
    decoding at start. null or `none`: no draft."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, …; `auto`: a GPU if there is one, otherwise `cpu`."""
    dtype: Dtype = "auto"
    """`auto`: float32 on CPU, bfloat16 on a GPU."""
    quantization: WeightBits = "none"
    """Rounding of the layers' matrices to 8 bits during loading. Matrices that the checkpoint has quantised are kept."""
    activations: ActivationFormat = "int8"
    """Format to which a CPU rounds activations before a product with quantised weights. `int8`: in groups of 32, with one scale
    each; several times faster. `float32`: not rounded. Attention and other weights always use float32 there."""
    draft_quantization: WeightBits = "none"
    """Rounding of the draft's matrices, as `quantization`."""
    kv_dtype: CacheDtype = "auto"
    """Number format of the KV cache. `auto`: the model's. `fp8`: 8 bits; twice the tokens of bfloat16, less precise."""
    tensor_parallel_size: int = 1
    """GPUs that share the target, one process each; it must divide the number of heads. On a CPU: processes. The draft runs
    on the first."""
    max_model_len: int | None = None
    """Most prompt and output tokens of one sequence. The default is the model's context window, or a part of it
    if its cache would not fit the memory for caches."""
    max_num_seqs: int | None = None
    """Most sequences that run at once; further ones wait. The default is 64 on a CPU and up to 256 on a GPU."""
    max_batched_tokens: int | None = None
    """Most scheduled tokens of one step; longer prompts are computed in chunks. The default is 256 on a CPU and up to
    8192 on a GPU."""
    tpot_objective: float = 0.2
    """Seconds that a step may take in which sequences decode, and so the time between two tokens. The rows of prompts in it
    follow: what decoding leaves, and at least a quarter of the step."""
    ttft_objective: float = 1.0
    """Seconds to the first token. Prompts take up to half of every step, whatever `tpot_objective`, if one of them meets it
    then. Prompts that are too long for it do not count."""
    memory_fraction: float = 0.85
    """Share of the device's memory for weights, caches and activations of target and draft."""
    kv_tokens: int | None = None
    """Tokens that the target's KV cache holds. The default is enough for `max_num_seqs` sequences of full length, within
    `memory_fraction` on a GPU, and within an eighth of that or 1 GiB on a CPU, but always enough for one sequence."""
    prefix_caching: bool = True
    """Whether to keep the cache of finished sequences for prompts with the same prefix."""
    kv_host_bytes: int | None = None
    """Host memory for cached blocks that do not fit on the device. With `kv_disk` the default is the larger of 1 GiB and
    one sequence of full length, otherwise none. On a CPU raise `kv_tokens` instead. See docs/operations.md."""
    kv_disk: str | None = None
    """Folder for cached blocks, which then survive a restart. Only one server may use it. Without it there is no disk tier."""
    kv_disk_bytes: int = 16 * 2**30
    """Most bytes in `kv_disk`; the least recently used blocks are deleted."""
    worker_memory_bytes: int | None = None
    """Host memory of a worker's process, of which it gives freed memory back at 80%, takes no new requests at 90%, and passes
    its longest ones on at 95%. The default is the memory of the machine or the container."""
    kernel_cache: str | None = None
    """Folder of compiled GPU kernels, such as one that `paceline warm` has written. The default is
    TRITON_CACHE_DIR, or ~/.triton/cache."""
    audit_fraction: float = AUDIT_FRACTION
    """Share of finished texts that the engine computes again by plain decoding and compares, also under load; 0: none. See
    docs/audit.md."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, get_args(Dtype))
        _one_of("quantization", self.quantization, get_args(WeightBits))
        _one_of("activations", self.activations, get_args(ActivationFormat))
        _one_of("draft_quantization", self.draft_quantization, get_args(WeightBits))
        _one_of("kv_dtype", self.kv_dtype, get_args(CacheDtype))
        for name in (
            "tensor_parallel_size",
            "max_num_seqs",
            "max_batched_tokens",
            "max_model_len",
            "kv_tokens",
            "kv_disk_bytes",
            "worker_memory_bytes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {value}")
        for name, seconds in (("tpot_objective", self.tpot_objective), ("ttft_objective", self.ttft_objective)):
            if not seconds > 0.0:
                raise InvalidConfig(f"{name} must be more than 0 seconds, got {seconds}")
        if not 0.0 <= self.audit_fraction <= 1.0:
            raise InvalidConfig(f"audit_fraction must be in [0, 1], got {self.audit_fraction}")
        if self.kv_host_bytes is not None and self.kv_host_bytes < 0:
            raise InvalidConfig(f"kv_host_bytes must be 0 or more, got {self.kv_host_bytes}")
        if self.kv_disk is not None and self.kv_host_bytes == 0:
            raise InvalidConfig("kv_disk needs host memory as a buffer: raise kv_host_bytes, or remove it")
        if (self.kv_disk is not None or self.kv_host_bytes) and not self.prefix_caching:
            raise InvalidConfig(
                "kv_host_bytes and kv_disk extend the prefix cache: set prefix_caching to true, or remove them"
            )
        if not 0.0 < self.memory_fraction <= 1.0:
            raise InvalidConfig(f"memory_fraction must be in (0, 1], got {self.memory_fraction}")
        tokens, sequences = self.max_batched_tokens, self.max_num_seqs
        if tokens is not None and sequences is not None and tokens < sequences:
            raise InvalidConfig(
                f"max_batched_tokens ({tokens}) must be at least max_num_seqs ({sequences}): "
                "every running sequence is scheduled at least one token"
            )


T = TypeVar("T")


def from_mapping(
    kind: type[T], values: Mapping[str, Any], where: str = "", error: type[PacelineError] = InvalidConfig
) -> T:
    """An instance of the dataclass `kind`. Raises `error` for values of a wrong type and for unknown keys; the message
    suggests the most similar key."""
    assert is_dataclass(kind)
    reject_unknown_keys(kind, values, where, error)
    hints = get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        hint = hints[key]
        if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, Mapping):
            value = from_mapping(hint, value, f"{where}{key}.", error)
        elif not _fits(value, hint):
            raise error(f"{where}{key} must be {_expected(hint)}, got {value!r}")
        arguments[key] = value
    return kind(**arguments)


def reject_unknown_keys(
    kind: type, values: Mapping[str, Any], where: str = "", error: type[PacelineError] = InvalidConfig
) -> None:
    """Raises `error` for all keys that are no fields of the dataclass `kind`, or of one inside it. See `unknown_keys`."""
    if unknown := list(unknown_keys(kind, values, where)):
        raise error("\n".join(unknown))


def unknown_keys(kind: type, values: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """A message for each key that is no field of the dataclass `kind`, or of one inside it, with the most similar field."""
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key in hints:
            if is_dataclass(hint := hints[key]) and isinstance(hint, type) and isinstance(value, Mapping):
                yield from unknown_keys(hint, value, f"{where}{key}.")
            continue
        nearest = difflib.get_close_matches(str(key), hints, n=1)
        meant = f"did you mean {where + nearest[0]!r}?" if nearest else f"known keys: {', '.join(sorted(hints))}"
        yield f"unknown key {f'{where}{key}'!r}; {meant}"


def _fits(value: Any, hint: Any) -> bool:
    kinds = get_args(hint) or (hint,)
    if Literal in (get_origin(hint), *map(get_origin, kinds)):  # the dataclass itself checks the choices
        return True
    origin = get_origin(hint)
    if isinstance(origin, type) and origin is not UnionType:  # a collection; the caller checks its items
        return isinstance(value, origin)
    if isinstance(value, bool):  # bool is a subclass of int
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
