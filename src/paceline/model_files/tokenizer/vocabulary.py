"""Ids and texts of a vocabulary, and whether a draft with one vocabulary can propose tokens of another.

A draft reads and proposes the target's ids, so only ids with the same bytes in both vocabularies are right. `read_vocabulary`
reads the header of a GGUF file, or tokenizer.json, which takes a fraction of the time that making a tokenizer takes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import IncompatibleDraft
from paceline.model_files import GGUFReader, Metadata
from paceline.model_files.hub import PREFIX, find_checkpoint, find_model, pick_draft
from paceline.model_files.tokenizer.tokenizer import BYTE_OF, MAX_TOKENIZER_BYTES, Tokenizer

MAX_WRONG = 0.01
"""Share of the ids in both vocabularies that may have other bytes in the draft: models of one family rename reserved tokens."""
_SMALL_MODELS = {
    (151643, "<|endoftext|>"): "Qwen2.5-0.5B or Qwen3-0.6B",
    (128000, "<|begin_of_text|>"): "Llama-3.2-1B",
    (29871, "▁"): "TinyLlama-1.1B",
    (105, "<start_of_turn>"): "Gemma-3-270M or Gemma-3-1B",
    (2, "<|im_end|>"): "SmolLM2-135M",
}
"""Small models, by an id and a token of their vocabulary."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: Mapping[int, str]
    is_byte_level: bool
    """Whether tokens are spelled in GPT-2's alphabet of bytes."""

    @staticmethod
    def of(tokenizer: Tokenizer) -> "Vocabulary":
        return Vocabulary({i: token for token, i in tokenizer.vocab.items()}, tokenizer.is_byte_level)

    def bytes_of(self, token_id: int) -> bytes:
        token = self.tokens[token_id]
        if self.is_byte_level:
            return bytes(map(BYTE_OF.__getitem__, token)) if BYTE_OF.keys() >= set(token) else token.encode()
        is_byte = len(token) == 6 and token.startswith("<0x")
        return bytes([int(token[3:5], 16)]) if is_byte else token.replace("▁", " ").encode()


def check_pair(model: str, draft: str | None) -> None:
    """Raise `UnsupportedModel` if a file is missing, and `IncompatibleDraft` if the draft has another vocabulary. Reads no
    weights. A draft that was trained for its target has no vocabulary of its own, and is checked when it is loaded."""
    if model.startswith(PREFIX):
        return
    checkpoint, name = find_checkpoint(model), pick_draft(draft, model)
    if name is None or name.startswith(PREFIX):
        return
    path = find_model(name, "draft")
    if path.is_dir() and not (path / "tokenizer.json").is_file() and not any(path.glob("*.gguf")):
        return
    target, second = read_vocabulary(checkpoint), read_vocabulary(find_checkpoint(path))
    if target is not None and second is not None:
        check_vocabularies(target, second)


def read_vocabulary(path: Path) -> Vocabulary | None:
    """The vocabulary in a GGUF file, or in a folder with tokenizer.json. None if it is in neither form:
    the loader reports that."""
    if path.is_file():
        fields = Metadata(str(path), GGUFReader(path).metadata)
        if "tokenizer.ggml.tokens" not in fields:
            return None
        tokens: list[str] = fields.array("tokenizer.ggml.tokens", str)
        kinds = fields.array("tokenizer.ggml.token_type", int) if "tokenizer.ggml.token_type" in fields else ()
        unused = {i for i, kind in enumerate(kinds) if kind == 5}
        return Vocabulary(
            {i: token for i, token in enumerate(tokens) if i not in unused},
            fields.text("tokenizer.ggml.model", "none") == "gpt2",
        )
    file = path / "tokenizer.json"
    if not file.is_file() or file.stat().st_size > MAX_TOKENIZER_BYTES:
        return None
    try:
        document = json.loads(file.read_bytes())
        ids = {i: token for token, i in document["model"]["vocab"].items()}
        ids |= {entry["id"]: entry["content"] for entry in document.get("added_tokens") or ()}
        return Vocabulary(ids, (document.get("decoder") or {}).get("type") == "ByteLevel")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def check_vocabularies(target: Vocabulary, draft: Vocabulary) -> int:
    """Target ids that the draft cannot propose, because it lacks them or has another token there. Raises `IncompatibleDraft` if
    that is so because the draft has another tokenizer."""
    both = target.tokens.keys() & draft.tokens.keys()
    if target.is_byte_level == draft.is_byte_level:
        wrong = [i for i in both if target.tokens[i] != draft.tokens[i]]
    else:
        wrong = [i for i in both if target.bytes_of(i) != draft.bytes_of(i)]
    if not both or len(wrong) > MAX_WRONG * len(both):
        raise IncompatibleDraft(_refusal(target, draft, min(wrong, default=0), len(wrong), len(both)))
    return len(target.tokens) - len(both) + len(wrong)


def _refusal(target: Vocabulary, draft: Vocabulary, first: int, num_wrong: int, num_both: int) -> str:
    known = set(draft.tokens.values())
    num_common = sum(token in known for token in target.tokens.values())
    kind = "the same tokens under other ids" if num_common > 0.9 * len(target.tokens) else "another tokenizer"
    example = (
        f"token {first} is {target.tokens.get(first)!r} in the target and {draft.tokens.get(first)!r} in the draft"
    )
    return (
        f"the draft has {kind} ({example}; {num_wrong} of {num_both} ids differ), so that its drafts would be wrong: "
        f"choose {_advice(target)}, or train a draft with `paceline train`"
    )


def _advice(target: Vocabulary) -> str:
    names = [name for (i, token), name in _SMALL_MODELS.items() if target.tokens.get(i) == token]
    return "a small model with the target's tokenizer" + (f", such as {names[0]}" if names else "")
