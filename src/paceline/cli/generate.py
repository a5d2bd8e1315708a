"""`paceline generate`: one prompt with one or more completions."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console
from paceline.cli.console import loaded
from paceline.cli.options import ENGINE, MaxTokens, Seed, Temperature, TopK, TopP, sampling_params, with_settings
from paceline.core.clock import WallClock
from paceline.core.errors import InvalidRequest
from paceline.core.output import Generation
from paceline.core.request import SamplingParams
from paceline.gateway.config import ServerConfig

if TYPE_CHECKING:
    from paceline.engine.start import LLM

GENERATE_MAX_TOKENS = 128


@with_settings(ENGINE)
def generate(
    config: ServerConfig,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to complete; `-` or none reads standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.", metavar="FILE")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user message, through the chat template.")] = False,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Number of completions.")] = 1,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with text, tokens and statistics.")
    ] = False,
) -> None:
    """Complete a text from an argument, a file or standard input.

    Standard output receives only the completion.
    """
    text = read_prompt(prompt, file)
    sampling = sampling_params(
        config,
        GENERATE_MAX_TOKENS,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        n=n,
        stop=tuple(stop or ()),
    )
    with loaded(config.engine) as llm:
        if n == 1 and not json_output:
            _stream(llm, _messages(text) if chat else text, sampling)
            return
        clock = WallClock()
        started = clock.now()
        generation = llm.chat(_messages(text), sampling) if chat else llm.generate(text, sampling)[0]
        seconds = clock.now() - started
    if json_output:
        document = _to_json(config.engine.model, text, generation, seconds)
        sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")
    else:
        _write_texts(generation)


def _messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _stream(llm: "LLM", prompt: Any, sampling: SamplingParams) -> None:
    """Writes the text while it is generated."""
    for output in llm.stream(prompt, sampling):
        sys.stdout.write(output.text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _write_texts(generation: Generation) -> None:
    for completion in generation.completions:
        console.err.rule(f"{completion.index + 1} of {len(generation.completions)}", align="left")
        sys.stdout.write(completion.text + "\n")


def _to_json(model: str, prompt: str, generation: Generation, seconds: float) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "prompt_tokens": len(generation.prompt_token_ids),
        "seconds": seconds,
        "completions": [
            {
                "index": completion.index,
                "text": completion.text,
                "finish_reason": completion.finish_reason.value,
                "token_ids": completion.token_ids,
                "origins": [origin.value for origin in completion.origins],
                "speculative_decoding": asdict(completion.speculation),
            }
            for completion in generation.completions
        ],
    }


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file, or standard input."""
    if file is not None:
        if prompt is not None:
            raise InvalidRequest("give the prompt as an argument or in a file, not both", field="prompt")
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"cannot read the prompt in {file}: {error}", field="prompt") from error
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise InvalidRequest(
            "there is no prompt: give it as an argument, with --file, or on standard input", field="prompt"
        )
    return sys.stdin.read()
