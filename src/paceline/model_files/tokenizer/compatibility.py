"""Whether a draft fits a target: equal ids of its vocabulary are needed, other differences can lower the acceptance."""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.model_files.tokenizer.vocabulary import Vocabulary, check_vocabularies

SHA256_LENGTH = 64
"""Characters of a checksum; a peer may send more."""
LOWER = "drafts are valid, and fewer of them may be accepted"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """sha256 of each part of a tokenizer. A draft needs the vocabulary of its target."""

    vocabulary: str
    merges: str
    special_tokens: str
    stop_tokens: str
    chat_template: str | None
    """None for a base model."""

    def difference(self, draft: "Fingerprint") -> str | None:
        """What differs without making drafts wrong, as one sentence; None if nothing does."""
        parts = [
            name for name in ("merges", "special_tokens", "stop_tokens") if getattr(self, name) != getattr(draft, name)
        ]
        if self.chat_template != draft.chat_template and None not in (self.chat_template, draft.chat_template):
            parts.append("chat_template")
        words = ", ".join(part.replace("_", " ") for part in parts)
        return f"target and draft differ in their {words}: {LOWER}" if parts else None


@lru_cache(maxsize=4)
def vocabulary_checksum(tokenizer: Tokenizer) -> str:
    """`Fingerprint.vocabulary`, without the time for the other parts."""
    return _sha256(_by_id(tokenizer))


@lru_cache(maxsize=4)
def fingerprint(tokenizer: Tokenizer) -> Fingerprint:
    """Computed once for each tokenizer: it reads the whole vocabulary."""
    return Fingerprint(
        vocabulary=vocabulary_checksum(tokenizer),
        merges=_sha256(_merges(tokenizer)),
        special_tokens=_sha256(_special(tokenizer)),
        stop_tokens=_sha256(sorted(tokenizer.eos_ids)),
        chat_template=None if tokenizer.chat_template is None else _sha256(tokenizer.chat_template.strip()),
    )


def check_compatible(target: Tokenizer, draft: Tokenizer) -> str | None:
    """What differs without making drafts wrong, as one sentence; None if nothing does. Raises `IncompatibleDraft` if ids have
    another meaning in the draft.

    Embeddings may differ in size: see `proposable_ids` of the vocabulary of drafts.
    """
    unknown = check_vocabularies(Vocabulary.of(target), Vocabulary.of(draft))
    parts = [f"the draft does not know {unknown} of the target's tokens"] if unknown else []
    if target.eos_ids != draft.eos_ids:
        parts.append(f"the target stops at {sorted(target.eos_ids)} and the draft at {sorted(draft.eos_ids)}")
    templates = [tokenizer.chat_template for tokenizer in (target, draft)]
    if None not in templates and templates[0].strip() != templates[1].strip():  # type: ignore[union-attr]
        parts.append("their chat templates differ, and the target's is used")
    return f"{'; '.join(parts)}: {LOWER}" if parts else None


def describe_mismatch(target: Fingerprint, draft: Fingerprint) -> str | None:
    """Why drafts of the draft would be wrong, with the checksums of target and draft, for peers that know only each other's
    checksums. None if the draft's ids have the target's meaning."""
    if target.vocabulary == draft.vocabulary:
        return None
    expected, found = (str(fingerprint.vocabulary)[:SHA256_LENGTH] for fingerprint in (target, draft))
    return f"target and draft differ in their vocabulary: sha256 of the target's {expected}, of the draft's {found}"


def _by_id(tokenizer: Tokenizer) -> list[tuple[int, str]]:
    return sorted((i, token) for token, i in tokenizer.vocab.items())


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    merges = json.loads(tokenizer.to_json())["model"].get("merges", [])
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]


def _special(tokenizer: Tokenizer) -> list[tuple[int, str]]:
    return [(i, tokenizer.token(i) or "") for i in sorted(tokenizer.special_ids)]


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()
