"""The front that gives a real llama-server the shared route: that it is real where it counts."""

from __future__ import annotations

import contextlib
import http.client
import json
import mmap
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from onebitd.adapters.share_listener import Shared, ShareListener, decoder_or_descendant
from onebitd.core import gguf_header, share_layout, state_file
from onebitd.core.errors import HandoffError
from onebitd.core.state_layout import KvSection, Rows
from tests.e2e.rig import DAYS, RHYME
from tests.harness import STANDINS, descendants, is_alive, wait_until
from tests.llama_builds import (
    BUILDS,
    MODELS,
    LlamaBuild,
    LlamaClient,
    LlamaFailed,
    LlamaModel,
    Reply,
    UnixConnection,
    running_program,
    short_temporary_directory,
)
from tests.standins import tiny_state
from tests.standins.share_export import layer_numbers
from tests.standins.share_front import launcher

STANDIN = LlamaBuild("standin", STANDINS / "llama_server.py", 2, ())
SMOLLM2, GEMMA3 = MODELS
LONG_S = 60.0


@dataclass
class Front:
    """A running front, and the files that steer and tell."""

    client: LlamaClient
    home: Path
    knobs: Path

    @property
    def path(self) -> Path:
        """Where the handshake takes place."""
        return self.home / "share.sock"

    def record(self) -> list[dict[str, Any]]:
        """Return the requests so far."""
        return [json.loads(line) for line in (self.home / "record").read_text().splitlines()]

    def ask_share(self) -> Reply:
        """Ask it to export."""
        return self.client.request("POST", "/slots/0?action=share", {"socket": str(self.path)})

    @contextlib.asynccontextmanager
    async def sharing(self, timeout_s: float = LONG_S) -> AsyncIterator[tuple[Shared, Reply]]:
        """Carry out a handshake as onebitd does; yield what came, and the reply."""
        replies: list[Reply] = []

        async def ask() -> None:
            replies.append(await trio.to_thread.run_sync(self.ask_share))

        with ShareListener(self.path) as listener:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                check = decoder_or_descendant(self.client.process.pid)
                try:
                    shared = await listener.receive(check, timeout_s)
                except HandoffError as error:
                    failed = error
                    shared = None
        if shared is None:
            raise failed
        with shared:
            yield shared, replies[0]

    def adopt(self, tokens: Sequence[int], share_id: int) -> Reply:
        """Have it take the memory for the slot's."""
        body = {"tokens": list(tokens), "share_id": share_id, "leave_one_token": True}
        return self.client.request("POST", "/slots/0?action=adopt", body)

    def set(self, *words: str) -> None:
        """Set the knobs."""
        self.knobs.write_text(" ".join(words))

    def state_of(self, tokens: Sequence[int]) -> bytes:
        """Have the real server evaluate ids; return the state that it saves, and erase."""
        self.client.complete(list(tokens), 0, cache_prompt=False)
        assert self.client.slot_action("save", "s.bin").status == 200
        assert self.client.slot_action("erase", "").status == 200
        return (self.client.slots_dir / "s.bin").read_bytes()


@contextlib.contextmanager
def running_front(build: LlamaBuild, model: LlamaModel, *extra: str, **env: str) -> Iterator[Front]:
    """Run the front on a build; as `running_llama` does without one."""
    args = ["-m", os.fspath(model.path), "-c", "2048", "-np", "1", "-t", "1", "--cache-ram", "0"]
    args += ["--swa-full"] if model.swa else []
    variables = {"ONEBIT_KV_SHARE": "1"} | env
    with short_temporary_directory() as home:
        knobs = home / "knobs"
        program = launcher(home, build.program, knobs=knobs, record=home / "record", **variables)
        with running_program(program, (*args, *build.extra_args, *extra)) as client:
            yield Front(client, home, knobs)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """The stand-in's model."""
    path = tmp_path_factory.mktemp("front") / "tiny.gguf"
    path.write_bytes(tiny_state.gguf())
    return LlamaModel("tiny", path, swa=False)


@pytest.fixture(scope="module")
def one_front(tiny: LlamaModel) -> Iterator[Front]:
    """A front before the stand-in, which takes no time."""
    with running_front(STANDIN, tiny) as made:
        yield made


@pytest.fixture
def front(one_front: Front) -> Iterator[Front]:
    """The same front for all tests that leave it alive; its knobs are as at its start."""
    yield one_front
    for path in one_front.home.glob("knobs*"):
        path.unlink()
    for path in one_front.client.slots_dir.iterdir():
        path.unlink()


def write_rows(shared: Shared, state: bytes, layers: Sequence[Sequence[int]]) -> None:
    """Write a state's rows where the header says that they belong, as a provider does."""
    layout = share_layout.parse(shared.header)
    assert layout is not None
    places = {tensor.name: tensor for tensor in layout.tensors}
    for section, numbers in zip(state_file.parse(state).sections, layers, strict=True):
        first = int(section.cells.pos[0])
        n_layer = len(numbers)
        for index, block in enumerate(section.blocks):
            kind = "k" if index < n_layer else "v"
            place = places.pop(f"cache_{kind}_l{numbers[index % n_layer]}")
            assert place.row_size == block.tensor.data_bytes(1)
            with mmap.mmap(shared.fds[place.region], layout.regions[place.region]) as memory:
                at = place.offset + first * place.row_size
                data = state[block.offset : block.offset + block.n_bytes]
                memory[at : at + len(data)] = data
    assert not places


def layers_of(state: bytes, model: LlamaModel) -> list[list[int]]:
    """Return which layers each section of a state holds."""
    sections = [part.shape for part in state_file.parse(state).sections]
    if model is not GEMMA3:
        shape = sections[0]
        assert isinstance(shape, KvSection)
        return [list(range(len(shape.k)))]
    full = [5, 11, 17]
    return [full, [layer for layer in range(18) if layer not in full]]


def test_layer_numbers_of_an_unknown_pattern_are_not_guessed() -> None:
    """An honest 501 is better than rows in wrong layers."""

    def header(architecture: str, layers: int | None) -> gguf_header.GgufHeader:
        return gguf_header.GgufHeader(
            3, architecture, None, layers, None, 512, False, False, None, 0
        )

    def section(layers: int) -> KvSection:
        return KvSection(0, False, None, None, (Rows(1, 8),) * layers, (Rows(1, 8),) * layers)

    assert layer_numbers(header("llama", 3), [section(3)]) == [[0, 1, 2]]
    assert layer_numbers(header("llama", None), [section(2)]) == [[0, 1]]
    assert layer_numbers(header("llama", 4), [section(3)]) is None
    assert layer_numbers(header("gemma3", 7), [section(1), section(6)]) == [
        [5],
        [0, 1, 2, 3, 4, 6],
    ]
    assert layer_numbers(header("gemma3", 7), [section(2), section(5)]) is None
    assert layer_numbers(header("gpt-oss", 7), [section(1), section(6)]) is None


@pytest.mark.real
@pytest.mark.parametrize(
    ("build", "model"), [(BUILDS[0], GEMMA3), (BUILDS[1], SMOLLM2)], ids=lambda part: part.name
)
async def test_front_rows_adopted_are_the_prompt_and_the_reply_is_the_plain_one(
    build: LlamaBuild, model: LlamaModel
) -> None:
    """What somebody wrote into the memory is what the model goes on from, all but one token."""
    build.require()
    model.require()
    regions = "2" if build.name == "X" else "1"
    with running_front(build, model, SHARE_FRONT_REGIONS=regions) as front:
        client = front.client
        ids = client.tokenize(DAYS)
        plain = client.complete(ids, 12, cache_prompt=False)
        other = front.state_of(client.tokenize(RHYME)[: len(ids) - 1])
        state = front.state_of(ids[:-1])
        layers = layers_of(state, model)
        texts = {}
        for name, rows in (("right", state), ("wrong", other)):
            async with front.sharing() as (shared, reply):
                assert reply.json == {"id_slot": 0, "share_id": shared.share_id}
                assert len(shared.fds) == int(regions)
                write_rows(shared, rows, layers)
            adopted = front.adopt(ids[:-1], shared.share_id)
            assert adopted.json == {"id_slot": 0, "n_adopted": len(ids) - 1}, adopted
            warm = client.complete(ids, 12)
            texts[name] = warm["content"]
            timings = warm["timings"]
            assert (timings["cache_n"], timings["prompt_n"]) == (len(ids) - 1, 1)
        assert texts["right"] == plain["content"]
        assert texts["wrong"] != plain["content"]
        assert [path.name for path in client.slots_dir.iterdir()] == ["s.bin"]


async def test_front_header_is_llama_cpps_layout(front: Front) -> None:
    """K and V of each layer in turn, each on its own page, a row for each position."""
    async with front.sharing() as (shared, _):
        header = json.loads(shared.header)
        layout = share_layout.parse(shared.header)
        assert layout is not None
        assert [os.fstat(fd).st_size for fd in shared.fds] == list(layout.regions)
    assert header["n_cells"] == layout.n_cells == 2048
    assert [tensor.name for tensor in layout.tensors] == [
        "cache_k_l0", "cache_v_l0", "cache_k_l1", "cache_v_l1",
    ]  # fmt: skip
    assert [tensor.offset for tensor in layout.tensors] == [0, 16384, 32768, 49152]
    assert {(tensor.type, tensor.row_size) for tensor in layout.tensors} == {("f16", 8)}


async def test_front_memory_stays_and_its_size_cannot_be_changed(front: Front) -> None:
    """A cache is the same at the next share; nobody takes it away from under a reader."""
    async with front.sharing() as (shared, _):
        os.pwrite(shared.fds[0], b"rows", 100)
        with pytest.raises(PermissionError):
            os.ftruncate(shared.fds[0], 0)
        first = shared.share_id
    async with front.sharing() as (shared, _):
        assert os.pread(shared.fds[0], 4, 100) == b"rows"
        assert shared.share_id == first + 1


async def test_front_adopts_a_share_once_and_only_the_last(front: Front) -> None:
    """Each other adopt is a 400 in llama-server's shape, and nothing is restored."""
    ids = list(range(5, 25))
    assert front.adopt(ids, 1).status == 400
    async with front.sharing() as (old, _):
        pass
    async with front.sharing() as (shared, _):
        write_rows(shared, tiny_state.build(ids), [[0, 1]])
    for tokens, share_id in [
        (ids, old.share_id),
        (ids, shared.share_id + 1),
        ([], shared.share_id),
        ([5] * 2049, shared.share_id),
    ]:
        reply = front.adopt(tokens, share_id)
        assert reply.status == 400
        assert reply.json["error"].keys() == {"code", "message", "type"}
    assert front.adopt(ids, shared.share_id).json == {"id_slot": 0, "n_adopted": 20}
    assert front.adopt(ids, shared.share_id).status == 400
    timings = front.client.complete([*ids, 30], 1)["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (20, 1)


def test_front_file_route_goes_through(front: Front) -> None:
    """Files are in the directory that the client knows, and refusals are the real server's."""
    client, ids = front.client, list(range(5, 25))
    state = front.state_of(ids)
    assert state == tiny_state.build(ids)
    (client.slots_dir / "again.bin").write_bytes(state)
    restored = client.slot_action("restore", "again.bin").json
    assert (restored["n_restored"], restored["n_read"]) == (20, len(state))
    for name in ("missing.bin", "../s.bin", "", "a" * 300):
        assert client.slot_action("restore", name).status == 400
    (client.slots_dir / "s.bin").unlink()
    assert client.slot_action("restore", "s.bin").status == 400
    assert client.slot_action("fly", "s.bin").json["error"]["message"] == "Invalid action"


def test_front_passes_requests_on_byte_for_byte_and_replies_as_they_stream(
    tiny: LlamaModel,
) -> None:
    """Two requests on one connection, the second a stream whose events come one by one."""
    with running_front(STANDIN, tiny, "--token-delay", "0.02") as front:
        connection = UnixConnection(front.client.socket, LONG_S)
        with contextlib.closing(connection):
            headers = {"X-Odd": "  caf\xe9 ".strip()}
            connection.request("GET", "/props?x=%20", headers=headers)
            assert json.loads(connection.getresponse().read())["total_slots"] == 1
            body = {"prompt": "abc", "max_tokens": 20, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            before = time.monotonic()
            assert response.readline().startswith(b"data:")
            assert time.monotonic() - before < 0.02 * 20
            assert response.read().endswith(b"data: [DONE]\n\n")
        asked = front.record()[-2:]
        assert [one["target"] for one in asked] == ["/props?x=%20", "/v1/completions"]
        assert asked[0]["headers"]["x-odd"] == "caf\xe9"
        assert json.loads(asked[1]["body"]) == body
        wait_until(lambda: len(_ends(front)) == len(front.record()), "each end is recorded")


def _ends(front: Front) -> list[str]:
    return (front.home / "record.end").read_text().splitlines()


def test_front_client_that_leaves_is_gone_for_the_real_server(tiny: LlamaModel) -> None:
    """Otherwise the slot would be busy for the rest of the reply."""
    with running_front(STANDIN, tiny, "--token-delay", "0.05") as front:
        connection = UnixConnection(front.client.socket, LONG_S)
        body = {"prompt": "abc", "max_tokens": 2000, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        response.readline()
        busy = front.client.get("/slots").json[0]["is_processing"]
        response.close()
        connection.close()
        assert busy
        wait_until(
            lambda: not front.client.get("/slots").json[0]["is_processing"], "the slot is free", 20
        )


REFUSALS = {
    "invalid": (400, "Invalid action"),
    "missing": (404, "File Not Found"),
    "unsupported": (501, "ONEBIT_KV_SHARE was not set"),
    "mismatch": (500, "params mismatch"),
}


def test_front_refuses_a_share_as_told(front: Front) -> None:
    """The words and statuses of decoders that do not share."""
    for what, (status, words) in REFUSALS.items():
        front.set("--share-refuse", f"{what}:1")
        (front.knobs.parent / "knobs.share-refuse").unlink(missing_ok=True)
        reply = front.ask_share()
        assert reply.status == status
        assert words in reply.json["error"]["message"]
    assert front.ask_share().json["error"]["message"].endswith("No such file or directory")


@pytest.mark.parametrize(
    ("model", "extra", "env", "words"),
    [
        (SMOLLM2, ("-fa", "off"), {}, "flash attention is off"),
        (GEMMA3, ("--no-swa-full",), {}, "--swa-full"),
        (SMOLLM2, (), {"ONEBIT_KV_SHARE": ""}, "ONEBIT_KV_SHARE was not set"),
    ],
    ids=["transposed", "window", "not asked for"],
)
@pytest.mark.real
def test_front_cache_that_it_cannot_share_is_a_501(
    model: LlamaModel, extra: tuple[str, ...], env: dict[str, str], words: str
) -> None:
    """Honest about what it does not do."""
    build = BUILDS[0]
    build.require()
    model.require()
    if extra == ("--no-swa-full",):
        extra, model = (), LlamaModel(model.name, model.path, swa=False)
    with running_front(build, model, *extra, **env) as front:
        reply = front.ask_share()
        assert reply.status == 501
        assert reply.json["error"]["type"] == "not_supported_error"
        assert words in reply.json["error"]["message"]


HANDSHAKES = {
    "garbage": "its length is",
    "close": "closed after 0 bytes",
    "close-after-length": "closed after 4 bytes",
    "no-fds": "no descriptor came",
    "no-id": "no share_id",
    "no-json": "no JSON",
    "many-fds": "it sent 150 descriptors",
    "late-fds": "descriptors came later",
    "trailing": "bytes came behind",
    "silent": "the decoder did not connect within",
    "stall": "connected and sent 0 bytes",
    "stall-half": "bytes, no whole message, within",
    "stranger": "was refused",
}


@pytest.mark.parametrize("mode", HANDSHAKES)
async def test_front_bad_handshake_is_refused_for_its_reason(front: Front, mode: str) -> None:
    """Each fault that the front can play is one that the listener tells."""
    front.set("--share-mode", mode)
    slow = mode in ("silent", "stall", "stall-half", "stranger")
    with pytest.raises(HandoffError, match=HANDSHAKES[mode]):
        async with front.sharing(1.0 if slow else LONG_S):
            pass
    front.set()
    async with front.sharing() as (_, reply):
        assert reply.status == 200


@pytest.mark.parametrize("mode", ["child", "stranger-first"])
async def test_front_good_handshake_in_another_way_is_taken(front: Front, mode: str) -> None:
    """A child of the decoder may bring the message; a stranger does not keep it out."""
    front.set("--share-mode", mode)
    async with front.sharing() as (shared, reply):
        assert reply.json["share_id"] == shared.share_id


@pytest.mark.parametrize("what", ["overlap", "version", "rows"])
async def test_front_spoilt_layout_is_refused_or_seen(front: Front, what: str) -> None:
    """What a provider must look at before it writes."""
    front.set("--share-layout", what)
    async with front.sharing() as (shared, _):
        if what == "rows":
            layout = share_layout.parse(shared.header)
            assert layout is not None
            assert layout.tensors[0].row_size == 6
        else:
            with pytest.raises(share_layout.ShareLayoutError):
                share_layout.parse(shared.header)


async def test_front_adopt_knobs_refuse_and_fall_short(front: Front) -> None:
    """A refusal leaves the share open; a short count is the front's lie."""
    ids = list(range(5, 25))
    async with front.sharing() as (shared, _):
        write_rows(shared, tiny_state.build(ids), [[0, 1]])
    front.set("--adopt-refuse", "500:1")
    assert front.adopt(ids, shared.share_id).status == 500
    front.set("--adopt-short")
    assert front.adopt(ids, shared.share_id).json["n_adopted"] == 19


@pytest.mark.parametrize("moment", ["after-share", "adopt", "after-restore"])
async def test_front_dies_when_told_and_takes_the_real_server_along(
    tiny: LlamaModel, moment: str
) -> None:
    """Killed, as nothing can be prepared for: nobody goes on with the model."""
    with running_front(STANDIN, tiny) as front:
        behind = descendants(front.client.process.pid)
        assert len(behind) == 1
        front.set("--die-on", moment)
        ids = list(range(5, 25))
        with contextlib.suppress(OSError, http.client.HTTPException):
            async with front.sharing() as (shared, reply):
                assert reply.status == 200
                write_rows(shared, tiny_state.build(ids), [[0, 1]])
            front.adopt(ids, shared.share_id)
        assert front.client.process.wait(10) == -signal.SIGKILL
        wait_until(lambda: not any(map(is_alive, behind)), "the real server is gone", 10)


def test_front_ends_as_the_real_server_ends(tiny: LlamaModel, tmp_path: Path) -> None:
    """Status 0 for SIGTERM, once; the signal of a crash; 1 for a model that cannot be loaded."""
    with running_front(STANDIN, tiny) as front:
        front.client.process.send_signal(signal.SIGTERM)
        assert front.client.process.wait(10) == 0
    crash = tmp_path / "crash"
    with running_front(STANDIN, tiny, "--knobs", str(crash)) as front:
        crash.write_text("--crash-on completion")
        with contextlib.suppress(OSError, http.client.HTTPException):
            front.client.complete([1, 2], 1)
        assert front.client.process.wait(10) == -signal.SIGABRT
        assert "GGML_ASSERT(told_to_crash)" in front.client.tail()
    absent = LlamaModel("absent", tmp_path / "absent.gguf", swa=False)
    with pytest.raises(LlamaFailed, match="ended with status 1"), running_front(STANDIN, absent):
        pass
    left = list(Path("/tmp").glob(f"share-front-{front.client.process.pid}-*"))
    assert left == []


def test_front_lists_the_real_servers_devices(tiny: LlamaModel, tmp_path: Path) -> None:
    """onebitd asks before it starts a decoder."""
    program = launcher(tmp_path, STANDIN.program, FAKE_LLAMA_DEVICES="HRX0")
    done = subprocess.run([program, "--list-devices"], stdout=subprocess.PIPE, check=True)
    assert b"HRX0: Stand-in device" in done.stdout
