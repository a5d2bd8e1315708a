"""Typed errors. Each message states what is wrong and what to do."""

from collections.abc import Sequence


class PacelineError(Exception):
    """Base of all errors that Paceline raises deliberately."""


class InvalidRequest(PacelineError):
    """The request cannot be served. `field` names the invalid parameter."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(InvalidRequest):
    """The prompt fills the context window, so no token can be generated."""

    def __init__(self, num_tokens: int, window: int, field: str = "prompt") -> None:
        self.num_tokens, self.window = num_tokens, window
        super().__init__(
            f"the prompt has {num_tokens} tokens and the context window {window}: shorten it, or raise max_model_len",
            field,
        )


class TextTooLong(PromptTooLong):
    """The text is longer than a context window of the longest tokens, so it is not encoded at all."""

    def __init__(self, num_chars: int, max_chars: int, field: str = "prompt") -> None:
        InvalidRequest.__init__(
            self,
            f"the prompt has {num_chars} characters and the context window holds at most {max_chars}: shorten it",
            field,
        )


class InvalidConfig(PacelineError):
    """A configuration key or value is wrong."""


class UnknownKeys(InvalidConfig):
    """Names in a configuration that do not exist, with a message for each."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages


class UnsupportedModel(PacelineError):
    """The kind, format or shape of the checkpoint is not supported."""


class IncompatibleDraft(PacelineError):
    """A draft and a target differ in vocabulary, special tokens or chat template."""


class UnsupportedVersion(PacelineError):
    """Another package is installed in a version that was not tested."""


class OutOfMemory(PacelineError):
    """The models and their caches do not fit; the message states what fits."""


class MissingDependency(PacelineError):
    """The requested feature needs an optional package."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(f"{purpose} needs the package `{package}`: pip install 'paceline[{extra}]'")
        self.package = package


class EngineClosed(PacelineError):
    """The engine was closed before the request finished, or before it was submitted."""


class GenerationFailed(PacelineError):
    """The engine failed while it generated this request, which has ended. Other requests continue. A retry fails as well."""


class WeightsChanged(GenerationFailed):
    """The model's weights were changed before the text was finished."""

    def __init__(
        self,
        message: str = "the weights of the model were changed before the text was finished: send the request again",
    ) -> None:
        super().__init__(message)


class RankLost(PacelineError):
    """A process of a tensor-parallel model has exited. The engine cannot continue; create a new one."""
