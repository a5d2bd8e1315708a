from datetime import datetime

import pytest

from paceline.core.errors import InvalidRequest, UnsupportedModel
from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.model_files.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from tests.model_files.tokenizer.test_tokenizer import SENTENCEPIECE

LLAMA2 = (
    "{% for m in messages %}\n"
    "    {% if m['role'] == 'user' %}\n"
    "{{ bos_token }}[INST] {{ m['content'] | trim }} [/INST]\n"
    "    {% elif m['role'] == 'assistant' %}\n"
    "{{ m['content'] + eos_token }}\n"
    "    {% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}\n"
    "{% endfor %}"
)


def test_the_embedded_models_template(smollm2: Tokenizer) -> None:
    """Expected: the output of `apply_chat_template` of transformers."""
    template = ChatTemplate.of(smollm2)
    assert template.render([{"role": "user", "content": "Hi <b>&"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <b>&<|im_end|>\n<|im_start|>assistant\n"
    )
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    turns.append({"role": "assistant", "content": "2"})
    assert template.render(turns, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n"
    )


def test_blocks_leave_no_whitespace_behind() -> None:
    messages = [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b"}]
    rendered = ChatTemplate(LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages)
    assert rendered == "<s>[INST] a [/INST]\nb</s>\n"


def test_a_template_error_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="Only user and assistant roles") as caught:
        ChatTemplate(LLAMA2, {"bos_token": "", "eos_token": ""}).render([{"role": "tool", "content": "x"}])
    assert caught.value.field == "messages"


def test_tools_as_json_without_html_escapes() -> None:
    tools = [{"name": "größer", "about": "a < b & 'c'"}]
    source = "{{ tools | tojson }}|{{ tools[0] | tojson(indent=2) }}"
    assert ChatTemplate(source, {}).render([], tools=tools) == (
        '[{"name": "größer", "about": "a < b & \'c\'"}]|{\n  "name": "größer",\n  "about": "a < b & \'c\'"\n}'
    )


def test_functions_that_templates_use() -> None:
    source = "{{ strftime_now('%Y') }}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %} {{ i }}{% endfor %}"
    assert ChatTemplate(source, {}).render([]) == f"{datetime.now().year} 0 1"


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ messages.clear() }}"]
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(messages)
    assert len(messages) == 1


def test_a_template_that_does_not_parse_is_rejected() -> None:
    with pytest.raises(UnsupportedModel, match="does not parse"):
        ChatTemplate("{% for %}", {})


def test_a_model_without_a_template_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate.of(tokenizer_from_gguf(SENTENCEPIECE))
