"""How a conversation looks in tokens: what stands before the user's words, between turns, and what ends one."""

from dataclasses import dataclass

from paceline.core.errors import UnsupportedModel
from paceline.models.tokenizer.chat_template import ChatTemplate
from paceline.models.tokenizer.tokenizer import Tokenizer

_USER, _ANSWER, _AGAIN = "first words", "answered words", "later words"


@dataclass(frozen=True, slots=True)
class Turns:
    opening: tuple[int, ...]
    """From the start of a row to the first user turn."""
    to_answer: tuple[int, ...]
    """From the user's last word to the assistant's first; begins with the token that ends a turn."""
    to_user: tuple[int, ...]
    """From the end of an answer to the next user turn, the end itself left out."""
    end_ids: tuple[int, ...]
    """Tokens that end a turn when the target writes them."""
    is_chat: bool
    """False: no turns, one text after another, all of it the target's own."""


def turns_of(tokenizer: Tokenizer) -> Turns:
    end_ids = tuple(sorted(tokenizer.eos_ids))
    if tokenizer.chat_template is None:
        start = tokenizer.bos_id if tokenizer.bos_id is not None else (end_ids or (None,))[0]
        if start is None:
            raise UnsupportedModel("the tokenizer names neither a first nor a last token: text cannot be started")
        return Turns((start,), (), (start,), end_ids, is_chat=False)
    template = ChatTemplate.of(tokenizer)
    asked = template.render([{"role": "user", "content": _USER}])
    conversation = [("user", _USER), ("assistant", _ANSWER), ("user", _AGAIN)]
    longer = template.render([{"role": role, "content": content} for role, content in conversation])
    opening, _, to_answer = asked.partition(_USER)
    between = longer.partition(_ANSWER)[2].partition(_AGAIN)[0]
    opening_ids, answer_ids, between_ids = (
        tuple(tokenizer.encode(text, add_special=False)) for text in (opening, to_answer, between)
    )
    if not answer_ids or answer_ids[0] not in tokenizer.special_ids or not between_ids:
        raise UnsupportedModel(
            "this chat template does not end a turn with a special token, so the target cannot write user turns itself"
        )
    to_user = between_ids[1:] if between_ids[0] in tokenizer.eos_ids else between_ids
    return Turns(opening_ids, answer_ids, to_user, tuple(sorted({*end_ids, answer_ids[0]})), is_chat=True)
