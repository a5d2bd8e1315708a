"""Commands of rank 0 to the other ranks of a tensor-parallel model, and their answers."""

from dataclasses import dataclass
from typing import Literal

import torch

from paceline.kernels.formats.layout import LongPrompt, PassSize
from paceline.kernels.formats.quantized import Quantization
from paceline.kernels.formats.weights import Activations
from paceline.models.families.spec import DecoderSpec
from paceline.models.runner import Span


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Model that all ranks of a group load."""

    model: str
    size: int
    device: torch.device
    """Device of rank 0; the other ranks use the GPUs after it."""
    dtype: torch.dtype
    quantization: Quantization | None = None
    activations: Activations = "int8"
    shares_device: bool = False
    """Whether all ranks use the GPU of rank 0, to test ranks on a machine with one GPU."""

    def device_of(self, rank: int) -> torch.device:
        if self.device.type != "cuda":
            return self.device
        return torch.device("cuda", (self.device.index or 0) + (0 if self.shares_device else rank))


@dataclass(frozen=True, slots=True)
class Start:
    spec: RankSpec
    rank: int
    port: int
    config: DecoderSpec | None = None
    """Configuration of the whole model if rank 0 sends the weights. None if the rank reads the checkpoint."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has loaded its weights."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Last message of a rank that failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Allocate:
    """Allocate a cache."""

    cache: int
    """Number of the cache."""
    num_blocks: int
    kv_dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class Release:
    """Release a cache."""

    cache: int


@dataclass(frozen=True, slots=True)
class Share:
    """Let rank 0 map a cache."""

    cache: int


@dataclass(frozen=True, slots=True)
class Forward:
    spans: tuple[Span, ...]
    num_layers: int
    """Layers to run: all, or the first ones of an early exit."""
    cache: int


@dataclass(frozen=True, slots=True)
class Move:
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    cache: int


@dataclass(frozen=True, slots=True)
class DevicePass:
    """A pass whose inputs only the device of rank 0 knows: it sends them to the other devices as the pass begins."""

    size: PassSize
    table_width: int
    long_prompts: tuple[LongPrompt, ...]
    num_layers: int
    cache: int


@dataclass(frozen=True, slots=True)
class DeviceMove:
    """Accepted paths of trees that become contiguous in the cache. Only the device of rank 0 knows them."""

    trees: int
    rows_each: int
    """Rows of a tree in the pass before."""
    path_rows: int
    """Rows of a path, the first one included."""
    table_width: int
    cache: int


LaunchKind = Literal["run", "capture", "replay"]


@dataclass(frozen=True, slots=True)
class Follow:
    """Do as rank 0 does: run device work, capture it as a CUDA graph, or replay that graph."""

    launch: LaunchKind
    work: DevicePass | DeviceMove


@dataclass(frozen=True, slots=True)
class Settle:
    """Answer with `Settled` when all commands before this one are done."""


@dataclass(frozen=True, slots=True)
class Settled:
    """All commands before `Settle` are done."""


Command = Allocate | Release | Share | Forward | Move | Follow | Settle
