"""Encodes and decodes text with the `tokenizers` library, and holds a model's special tokens and chat template.

`TextStream` decodes a growing sequence: it returns text as soon as later tokens cannot change it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import tokenizers

from paceline.core.errors import PacelineError, UnsupportedModel
from paceline.model_files import MAX_TOKEN_ID, Metadata, read_json, read_text
from paceline.model_files.tokenizer.tokenizer_check import PROBE, check_tokenizer

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")
"""Special tokens that end a turn or a text in any vocabulary: checkpoints often declare only one of them."""

LONG_CHARS = 4096
"""Text length from which the library encodes without the interpreter's lock. Its `encode` keeps it: 1.6 s for a megabyte."""
REPLACEMENT = "\ufffd"
"""Decoded text of an incomplete character."""

MAX_TOKENIZER_BYTES = 128 << 20
"""Largest tokenizer.json; those of 262,144 tokens have 34 MB."""


class Tokenizer:
    """Read-only. `chat_template` is Jinja source; `special_tokens` are its variables `bos_token` and so on."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        self._backend = backend
        if not self.vocab or self.vocab_size > MAX_TOKEN_ID:
            raise UnsupportedModel(f"the tokenizer has no tokens, or ids over {MAX_TOKEN_ID}: download it again")
        self.decode(self.encode(PROBE))  # a wrong file may fail for some characters only
        self.bos_id = bos_id
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        known = (backend.token_to_id(token) for token in END_TOKENS)
        self.eos_ids = frozenset(eos_ids) | (self.special_ids & {i for i in known if i is not None})
        """Ids that end a generation."""
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self._context_free: tuple[dict[int, str | None], dict[int, str | None]] = (
            {},
            {},
        )  # with special tokens, without

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special` adds tokens that the model expects around plain text, such as BOS; a rendered chat
        contains them."""
        if len(text) > LONG_CHARS:
            return self._backend.encode_batch([text], add_special_tokens=add_special)[0].ids
        return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def context_free_text(self, token_id: int, skip_special: bool = True) -> str | None:
        """The token's text if it does not depend on neighbouring tokens; otherwise None. In a byte-level vocabulary only parts
        of characters depend on them."""
        known = self._context_free[skip_special]
        if token_id not in known:
            text = self.decode([token_id], skip_special)
            known[token_id] = text if self.is_byte_level and REPLACEMENT not in text else None
        return known[token_id]

    def token(self, token_id: int) -> str | None:
        """Spelling in the vocabulary (`Ġthe`); None for an unknown id."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of the token's text, possibly a part of a character; empty for an unknown id."""
        token = self.token(token_id)
        if token is None:
            return b""
        if token_id in self.special_ids:
            return token.encode()
        if self.is_byte_level:
            if all(char in BYTE_OF for char in token):
                return bytes(BYTE_OF[char] for char in token)
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    @cached_property
    def vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id. The embedding may have more rows."""
        return max(self.vocab.values()) + 1

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.vocab))

    def to_json(self) -> str:
        """The whole tokenizer as tokenizer.json."""
        return self._backend.to_str()

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens are spelled in GPT-2's alphabet of bytes."""
        decoder = self._backend.decoder
        return decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes as printable characters, inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
"""Bytes by the characters that spell them in byte-level vocabularies."""


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer in tokenizer.json and the optional files in the same folder."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(
            f"{folder} has no tokenizer.json: create it with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
        )
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise UnsupportedModel(f"{path} has {path.stat().st_size} bytes; a tokenizer has at most {MAX_TOKENIZER_BYTES}")
    check_tokenizer(path)
    config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    fields = Metadata("tokenizer_config.json", config)
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        is_object = isinstance(config.get(name), dict)
        token = fields.section(name).optional_text("content") if is_object else fields.optional_text(name)
        if token is not None:
            special[name] = token
    eos_ids = [
        token_id
        for file in ("generation_config.json", "config.json")
        for token_id in Metadata(file, read_json(folder / file)).token_ids("eos_token_id")
    ]
    with readable_tokenizer(str(path)):
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_truncation()
        backend.no_padding()
        bos, eos = (backend.token_to_id(special[key]) if key in special else None for key in ("bos_token", "eos_token"))
        return Tokenizer(
            backend,
            bos_id=bos,
            eos_ids={*eos_ids, *(() if eos is None else (eos,))},
            special_tokens=special,
            chat_template=_folder_template(folder, fields),
        )


@contextmanager
def readable_tokenizer(source: str) -> Iterator[None]:
    """Errors of the tokenizers library about a file's contents become `UnsupportedModel`.

    The library raises plain `Exception`, and a panic in it derives from `BaseException` only.
    """
    try:
        yield
    except (PacelineError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UnsupportedModel(f"{source} is not a readable tokenizer ({error!s:.200}): download it again") from None


def _folder_template(folder: Path, config: Metadata) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    other = Metadata("chat_template.json", read_json(folder / "chat_template.json"))
    source = other if "chat_template" in other else config
    if not isinstance(source.raw("chat_template"), list):
        return source.optional_text("chat_template")
    templates = [Metadata("a chat template", entry) for entry in source.array("chat_template", dict)]
    return {template.text("name"): template.text("template") for template in templates}.get("default")


class TextStream:
    """The joined results of `push` and `flush` equal `decode` of all ids. No result ends inside a character.

    A token whose text depends on its neighbours is decoded together with the tokens of the last result, because some decoders
    treat the first token of a text differently. Only the difference is returned.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, before: int | None = None) -> None:
        """`before` is the token in front of the ids, if their text continues another one: a SentencePiece decoder then keeps
        the space of the first id."""
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._window: list[int] = []
        self._num_returned = 0
        """Leading ids of the window whose text, `_returned`, was already returned."""
        self._returned = ""
        if before is not None and not tokenizer.is_byte_level and before not in tokenizer.special_ids:
            text = self._decode([before])
            if not text.endswith(REPLACEMENT):
                self._window, self._num_returned, self._returned = [before], 1, text

    def push(self, ids: int | Iterable[int]) -> str:
        """Add token ids. Returns the new text, possibly empty."""
        ids = (ids,) if isinstance(ids, int) else tuple(ids)
        if len(self._window) == self._num_returned:  # no text is pending
            texts = [self._tokenizer.context_free_text(token, self._skip_special) for token in ids]
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type]  # checked above
        self._window.extend(ids)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """The pending text; an unfinished character becomes U+FFFD."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._returned) :]
        if new:
            self._window = self._window[self._num_returned :]
            self._num_returned = len(self._window)
            self._returned = self._decode(self._window)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)
