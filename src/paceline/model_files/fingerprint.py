"""What the text of a request depends on, apart from the request and its seed: the `system_fingerprint` of responses.

Workers with equal fingerprints generate equal texts. A gateway refuses a worker whose fingerprint differs from that of its
pool, and a stream that has tokens continues only on a worker with the fingerprint that generated them.
"""

import hashlib
from dataclasses import astuple, dataclass, fields, replace

ORDER_OF_SUMS = 4
"""Version of the order in which kernels add numbers. Raise it with every change after which the same weights and tokens give
logits with other bits, on any device that docs/exactness.md promises equal bits for: another order of sums, another rounding,
another formula. A faster kernel with the same bits does not change it."""

PREFIX = "fp_"
CHECKSUM_DIGITS = 32
"""Hexadecimal digits of a checksum, as workers compare theirs."""
DIGITS = 16
"""Hexadecimal digits of a digest."""


@dataclass(frozen=True, slots=True)
class SystemFingerprint:
    """All that a worker's texts depend on."""

    weights: str
    """Checksum of the checkpoint: `quick_checksum`."""
    tokenizer: str
    """Checksum of vocabulary, special tokens, stop tokens and chat template."""
    dtype: str
    quantization: str
    activations: str
    kv_dtype: str
    device: str
    """Kind of device, such as `NVIDIA H200`. `cpu` stands for the native kernels, which have the same bits on every CPU."""
    ranks: int = 1
    """Size of the tensor-parallel group."""
    order: int = ORDER_OF_SUMS

    @property
    def weights_id(self) -> str:
        """Identifies the weights where cache blocks are exchanged. Empty if they are not known."""
        return f"{self.weights}/{self.quantization}/{self.activations}" if self.weights else ""

    def with_weights(self, checksum: str) -> "SystemFingerprint":
        """The same system with the weights of this `quick_checksum`."""
        return replace(self, weights=checksum[:CHECKSUM_DIGITS])

    @property
    def digest(self) -> str:
        """Short form of all fields, as responses show it. Empty if the weights are not known."""
        if not self.weights:
            return ""
        return PREFIX + hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:DIGITS]

    def difference(self, other: "SystemFingerprint") -> str:
        """The first field that differs from `other`, with both values. Empty if there is none. Unknown weights differ from
        none."""
        for field in fields(self):
            own, theirs = getattr(self, field.name), getattr(other, field.name)
            is_unknown = field.name == "weights" and not (own and theirs)
            if own != theirs and not is_unknown:
                return f"{_LABELS.get(field.name, field.name)} {own}, not {theirs}"
        return ""

    def __str__(self) -> str:
        values = ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))
        return f"{self.digest or 'unknown'} ({values})"


_LABELS = {"ranks": "tensor_parallel_size", "order": "order of sums"}
"""Names of fields in messages, where they differ from those of the fields."""
