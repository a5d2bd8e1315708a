"""`paceline generate`: one prompt, one or more completions."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import ENGINE, MaxTokens, Seed, Temperature, TopK, TopP, sampling_params, with_settings
from paceline.cli.render import console
from paceline.cli.render.console import loaded
from paceline.core.clock import WallClock
from paceline.core.errors import InvalidRequest
from paceline.server.config.config import ServerConfig

MAX_TOKENS = 128


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
        MAX_TOKENS,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        n=n,
        stop=tuple(stop or ()),
    )
    prompt_or_messages: Any = [{"role": "user", "content": text}] if chat else text
    with loaded(config.engine) as llm:
        if n == 1 and not json_output:
            for output in llm.stream(prompt_or_messages, sampling):
                sys.stdout.write(output.text)
                sys.stdout.flush()
            sys.stdout.write("\n")
            return
        clock = WallClock()
        started = clock.now()
        generation = llm.chat(prompt_or_messages, sampling) if chat else llm.generate(text, sampling)[0]
        seconds = clock.now() - started
    if not json_output:
        for completion in generation.completions:
            console.err.rule(f"{completion.index + 1} of {n}", align="left")
            sys.stdout.write(completion.text + "\n")
        return
    document = {
        "model": config.engine.model,
        "prompt": text,
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
    sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")


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
