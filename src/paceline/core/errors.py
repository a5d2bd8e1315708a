"""Typed errors. Each message says what was wrong and what to do about it."""


class PacelineError(Exception):
    """Base of everything Paceline raises on purpose."""


class InvalidRequest(PacelineError):
    """The request cannot be served as asked. `field` names the offending parameter."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(InvalidRequest):
    """It leaves no room in the model's window for an answer."""

    def __init__(self, num_tokens: int, window: int, field: str = "prompt") -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens and the model's window {window}: shorten it, or raise max_model_len",
            field,
        )


class InvalidConfig(PacelineError):
    """A configuration key or value is wrong."""


class UnsupportedModel(PacelineError):
    """The checkpoint is of a kind, format or shape we cannot load."""


class IncompatibleDraft(PacelineError):
    """A draft and a target do not share vocabulary, special tokens or chat template."""


class OutOfMemory(PacelineError):
    """The models and their caches do not fit; the message says what would."""


class MissingDependency(PacelineError):
    """An optional package is needed for what was asked."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(f"{purpose} needs the package `{package}`: pip install 'paceline[{extra}]'")
        self.package = package


class EngineClosed(PacelineError):
    """The engine was shut down while the request was still running, or before it was submitted."""


class RankLost(PacelineError):
    """A process that holds a part of the model is gone: the engine cannot go on and has to be made anew."""
