"""Checks whether a draft fits a target, with the same vocabulary, special tokens, stop tokens and chat template."""

import hashlib
import json
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from paceline.core.errors import IncompatibleDraft
from paceline.model_files.tokenizer.tokenizer import Tokenizer

SHA256_LENGTH = 64
"""Characters of a checksum; a peer may send more."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """sha256 of each part of a tokenizer that target and draft must share."""

    vocabulary: str
    merges: str
    special_tokens: str
    stop_tokens: str
    chat_template: str | None
    """None for a base model, which fits any chat template."""

    def differing_part(self, other: "Fingerprint") -> str | None:
        """Name of the first field that differs; None if the tokenizers fit together."""
        for field in fields(Fingerprint):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs and not (field.name == "chat_template" and None in (mine, theirs)):
                return field.name
        return None


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


def check_compatible(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise `IncompatibleDraft`, with the two checksums and the first difference, unless all parts are equal.

    Embeddings may differ in size: see `proposable_ids` of the vocabulary of drafts.
    """
    target_parts, draft_parts = fingerprint(target), fingerprint(draft)
    part = target_parts.differing_part(draft_parts)
    if part is None:
        return
    expected, found = getattr(target_parts, part), getattr(draft_parts, part)
    raise IncompatibleDraft(
        f"target and draft differ in their {_words(part)}: {_difference(part, target, draft)} (sha256 of the target's "
        f"{expected}, of the draft's {found}); choose a draft of the target's model family"
    )


def describe_mismatch(target: Fingerprint, draft: Fingerprint) -> str | None:
    """The first part that differs, with the checksums of target and draft, for peers that know only each other's checksums.
    None if target and draft fit together."""
    part = target.differing_part(draft)
    if part is None:
        return None
    expected, found = (str(getattr(model_fingerprint, part))[:SHA256_LENGTH] for model_fingerprint in (target, draft))
    return f"target and draft differ in their {_words(part)}: sha256 of the target's {expected}, of the draft's {found}"


def _difference(part: str, target: Tokenizer, draft: Tokenizer) -> str:
    if part == "vocabulary":
        ours, theirs = dict(_by_id(target)), dict(_by_id(draft))
        i = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
        return f"token {i} is {_quoted(ours.get(i))} in the target and {_quoted(theirs.get(i))} in the draft"
    if part == "merges":
        first, second = _merges(target), _merges(draft)
        shorter = min(len(first), len(second))
        i = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), shorter)
        a, b = (" + ".join(m[i]) if i < len(m) else None for m in (first, second))
        return f"merge {i} is {_quoted(a)} in the target and {_quoted(b)} in the draft"
    if part == "special_tokens":
        i, token = min(set(_special(target)) ^ set(_special(draft)))
        return f"token {i} ({token!r}) is special only in the {'target' if i in target.special_ids else 'draft'}"
    if part == "stop_tokens":
        return f"the target stops at {sorted(target.eos_ids)}, the draft at {sorted(draft.eos_ids)}"
    a, b = (tokenizer.chat_template or "" for tokenizer in (target, draft))
    i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"from character {i} on the target has {a[i : i + 30]!r} and the draft {b[i : i + 30]!r}"


def _by_id(tokenizer: Tokenizer) -> list[tuple[int, str]]:
    return sorted((i, token) for token, i in tokenizer.vocab.items())


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    merges = json.loads(tokenizer.to_json())["model"].get("merges", [])
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]


def _special(tokenizer: Tokenizer) -> list[tuple[int, str]]:
    return [(i, tokenizer.token(i) or "") for i in sorted(tokenizer.special_ids)]


def _words(part: str) -> str:
    return part.replace("_", " ")


def _quoted(token: str | None) -> str:
    return "absent" if token is None else repr(token)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()
