"""Builds an upstream worker from its specification: finds or starts the server and checks its model."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.clock import WallClock
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.core.sequence import BLOCK_SIZE
from paceline.model_files.tokenizer import Tokenizer, fingerprint, load_tokenizer
from paceline.wire.gateway_messages import TO_TARGET_WORKER
from paceline.wire.keys import KEY_ROLE_OF, KeyFolder, Security
from paceline.wire.transport import Listener
from paceline.wire.worker_spec import UpstreamSpec
from paceline.worker.server import WorkerOverload, WorkerServer
from paceline.worker.upstream.backend import KvRelay, UpstreamBackend, UpstreamModel
from paceline.worker.upstream.connection import ServerModel, UpstreamConnection
from paceline.worker.upstream.process import ServerProcess

if TYPE_CHECKING:
    from paceline.wire.worker_spec import WorkerSpec

logger = logging.getLogger(__name__)

START_SECONDS = 1800.0
"""Longest start of a server: it loads a large model."""
POLL_SECONDS = 0.5
MAX_NUM_SEQS = 256
"""Streams at once, unless `limits.max_num_seqs` is set: vLLM's own default."""
SAMPLES = ("The quick brown fox.", "def f(x):\n    return x ** 2\n", "naïve café 你好 🙂")
SPECULATION_ARGUMENT = "--speculative"
"""Start of the arguments of vLLM that turn speculation on."""


def make_upstream_worker(spec: "WorkerSpec") -> WorkerServer:
    """Blocks until the server answers. Raises `InvalidConfig` if its tokens are not those of the pool's model."""
    upstream = spec.upstream
    assert upstream is not None
    tokenizer = load_tokenizer(spec.engine.model)
    process = None
    if upstream.url is None:
        process = ServerProcess(upstream.executable, spec.engine.model, upstream.arguments, spec.publishes)
    key = None if upstream.api_key_env is None else os.environ.get(upstream.api_key_env)
    connection: UpstreamConnection | None = None
    try:
        url = upstream.url if process is None else process.url
        assert url is not None
        connection = UpstreamConnection(url, key, lambda: listener.wake())
        served = _wait_for(connection, process, spec.engine.model)
        _check_tokens(connection, served, tokenizer, spec.engine.model)
        model = _model(upstream, served, tokenizer, connection.cache_tokens())
        security = _security(spec)
        listener = Listener(spec.address, TO_TARGET_WORKER, security)
        relay, (events, replay) = None, (upstream.kv_events, upstream.kv_replay)
        if process is not None and process.kv_events is not None:
            events, replay = process.kv_events
        if spec.publishes and events is not None:
            host = listener.address.rpartition(":")[0]
            relay = KvRelay(spec.name, host, events, replay, security, WallClock())
        backend = UpstreamBackend(spec.name, model, connection, process, relay)
        return WorkerServer(spec.name, listener, backend, overload=WorkerOverload(spec.engine.worker_memory_bytes))
    except BaseException:
        if connection is not None:
            connection.close()
        if process is not None:
            process.close()
        raise


def _security(spec: "WorkerSpec") -> Security | None:
    return None if spec.keys is None else KeyFolder(Path(spec.keys)).server_security(KEY_ROLE_OF[spec.role])


def _wait_for(connection: UpstreamConnection, process: ServerProcess | None, model: str) -> ServerModel:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return connection.model(model)
        except PacelineError as error:
            if process is not None and process.exit_code is not None:
                raise InvalidConfig(
                    f"vLLM exited with status {process.exit_code}: read its output above, and check upstream.arguments"
                ) from None
            if time.monotonic() > deadline:
                raise InvalidConfig(f"{error}; start the server, or correct `endpoints`") from None
        time.sleep(POLL_SECONDS)


def _check_tokens(connection: UpstreamConnection, served: ServerModel, tokenizer: Tokenizer, model: str) -> None:
    """The gateway encodes prompts and the server reads them, so they need the same tokens."""
    for text in SAMPLES:
        ours, theirs = list(tokenizer.encode(text, False)), connection.tokens(served.name, text)
        if theirs is None:
            logger.warning("%s has no /tokenize: its vocabulary is not compared with that of %s", connection.url, model)
            return
        if ours != theirs:
            raise InvalidConfig(
                f"the tokens of {text!r} are {ours} in {model} and {theirs} at {connection.url}: set the pool's `model` to "
                "the model that the server has"
            )


def _model(
    upstream: UpstreamSpec, served: ServerModel, tokenizer: Tokenizer, cache_tokens: int | None
) -> UpstreamModel:
    """`cache_tokens` is the size of the KV cache as the server reports it. If it is None, every stream may fill its context
    window."""
    windows = [size for size in (served.max_model_len, upstream.max_model_len) if size]
    if not windows:
        raise InvalidConfig("the server does not report its context window: set limits.max_model_len of the pool")
    seqs = upstream.max_num_seqs or MAX_NUM_SEQS
    is_ours = served.owner == "paceline"
    return UpstreamModel(
        name=served.name,
        vocabulary=fingerprint(tokenizer).vocabulary,
        vocab_size=tokenizer.vocab_size,
        max_model_len=min(windows),
        max_num_seqs=seqs,
        kv_blocks=max(1, (cache_tokens or seqs * min(windows)) // BLOCK_SIZE),
        can_disable_speculation=is_ours or (upstream.url is None and not _speculates(upstream.arguments)),
        passes_speculation=is_ours,
    )


def _speculates(arguments: Sequence[str]) -> bool:
    return any(argument.startswith(SPECULATION_ARGUMENT) for argument in arguments)
