"""The engine in its own process, for real: a tiny model, a socket, signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from engine.api import EngineDead, GenerateRequest, Output, RequestError, SamplingParams
from engine.client import ProcessEngineClient
from engine.config import EngineConfig
from engine.ipc import FrameDecoder, Message, encode_frame
from engine.restarts import RestartBudget
from engine.server import EXIT_BAD_FRAMES
from tests.engine.model.tiny import SIZE

pytestmark = pytest.mark.anyio

VOCAB, LIMIT = SIZE["vocab_size"], SIZE["max_position_embeddings"]
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def config(tiny_model_path: Callable[[str], Path]) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_model_path("llama")),
        dtype="float32",
        device="cpu",
        num_blocks=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        threads=1,
        check_integrity=True,
    )


@contextlib.asynccontextmanager
async def running(config: EngineConfig, **arguments: RestartBudget) -> AsyncIterator[ProcessEngineClient]:
    client = ProcessEngineClient(config, **arguments)  # type: ignore[arg-type]  # mypy takes ** for on_progress
    await client.start()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(scope="module")
async def client(config: EngineConfig) -> AsyncIterator[ProcessEngineClient]:
    """One engine for all tests that leave it as they found it: starting one takes seconds."""
    async with running(config) as client:
        yield client


async def ended(client: ProcessEngineClient, reason: str) -> int:
    return (await client.stats()).finished.get(reason, 0)


def ask(request_id: str, prompt: list[int] = PROMPT, max_tokens: int | None = 5) -> GenerateRequest:
    return GenerateRequest(
        request_id, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    )


async def collect(client: ProcessEngineClient, request: GenerateRequest) -> list[Output]:
    return [output async for output in client.generate(request)]


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def test_a_conversation_over_the_process_border(config: EngineConfig) -> None:
    stages: list[tuple[str, float]] = []
    client = ProcessEngineClient(config, lambda stage, share: stages.append((stage, share)))
    assert not client.ready
    with pytest.raises(EngineDead):
        client.info
    await client.start()
    try:
        assert client.ready
        assert (client.info.vocab_size, client.info.num_blocks) == (VOCAB, 64)
        assert len({stage for stage, _ in stages}) >= 2
        assert all(0.0 <= share <= 1.0 for _, share in stages)
        first = await collect(client, ask("a"))
        assert len(tokens(first)) == 5
        assert first[-1].finish_reason == "length"
        assert first[-1].request_id == "a"
        again = await collect(client, ask("a", PROMPT + tokens(first) + [1]))
        assert again[-1].prompt is not None
        assert again[-1].prompt.reused == len(PROMPT) + 4
        many = await asyncio.gather(*(collect(client, ask(str(i), [i, *PROMPT])) for i in range(20)))
        assert [len(tokens(outputs)) for outputs in many] == [5] * 20
        alone = await collect(client, ask("b", [7, *PROMPT]))
        assert tokens(alone) == tokens(many[7])
        stats = await client.stats()
        assert stats.finished == {"length": 23}
        assert stats.generation_tokens == 23 * 5
    finally:
        await client.close()
    assert not client.ready
    assert client.pid is None


async def test_an_abort_ends_the_stream_and_frees_the_blocks(client: ProcessEngineClient) -> None:
    outputs = []
    async for output in client.generate(ask("a", max_tokens=None)):
        if not outputs:
            await client.abort("a")
        outputs.append(output)
    assert outputs[-1].finish_reason == "abort"
    assert len(tokens(outputs)) < LIMIT - len(PROMPT)
    await client.abort("nobody")
    stats = await client.stats()
    assert stats.running == stats.blocks_pinned == stats.blocks_reserved == 0


async def test_closing_a_stream_early_aborts_and_its_id_is_free_at_once(client: ProcessEngineClient) -> None:
    aborted = await ended(client, "abort")
    for _ in range(3):
        stream = client.generate(ask("same", max_tokens=None))
        await anext(stream)
        await stream.aclose()
    outputs = await collect(client, ask("same"))
    assert len(tokens(outputs)) == 5
    assert outputs[-1].finish_reason == "length"
    assert await ended(client, "abort") == aborted + 3


async def test_a_cancelled_reader_aborts(client: ProcessEngineClient) -> None:
    began = asyncio.Event()
    aborted = await ended(client, "abort")

    async def read() -> None:
        async for _ in client.generate(ask("a", max_tokens=None)):
            began.set()

    reader = asyncio.create_task(read())
    await began.wait()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    while (await client.stats()).running:
        pass
    assert await ended(client, "abort") == aborted + 1


async def test_a_slow_reader_gets_everything_merged(client: ProcessEngineClient) -> None:
    expected = tokens(await collect(client, ask("a", max_tokens=40)))
    finished = await ended(client, "length")
    stream = client.generate(ask("slow", max_tokens=40))
    outputs = [await anext(stream)]
    while await ended(client, "length") == finished:
        pass
    outputs += [output async for output in stream]
    assert tokens(outputs) == expected
    assert len(outputs) <= 3
    assert outputs[-1].prompt is not None


@pytest.mark.parametrize(
    ("request_", "param", "code"),
    [
        (ask("x", []), "prompt_ids", "invalid_request"),
        (ask("x", [VOCAB]), "prompt_ids", "invalid_request"),
        (ask("x", [1] * LIMIT), "prompt_ids", "context_length_exceeded"),
        (ask("x", ["a"]), None, "invalid_request"),  # type: ignore[list-item]  # that is the point
    ],
)
async def test_a_bad_request_is_refused_and_the_next_one_served(
    client: ProcessEngineClient, request_: GenerateRequest, param: str | None, code: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await collect(client, request_)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert len(tokens(await collect(client, ask("x")))) == 5


async def test_an_id_in_use_is_refused(client: ProcessEngineClient) -> None:
    stream = client.generate(ask("a", max_tokens=None))
    await anext(stream)
    with pytest.raises(RequestError, match="already in use"):
        await collect(client, ask("a"))
    await stream.aclose()


async def test_a_released_branch_frees_its_blocks(client: ProcessEngineClient) -> None:
    request = GenerateRequest("a", PROMPT * 10, SamplingParams(max_tokens=2), branch="chat")
    await collect(client, request)
    before = await client.stats()
    assert before.branches == 1
    await client.release("default", "chat")
    after = await client.stats()
    assert after.branches == 0
    assert after.blocks_free > before.blocks_free


async def test_a_killed_engine_fails_its_streams_and_comes_back(config: EngineConfig) -> None:
    async with running(config, restarts=RestartBudget(first_delay_s=0.01)) as client:
        expected = tokens(await collect(client, ask("before")))
        boot_id, pid = client.info.boot_id, client.pid
        assert pid is not None
        stream = client.generate(ask("a", max_tokens=None))
        await anext(stream)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
        assert not client.ready
        with pytest.raises(EngineDead):
            await collect(client, ask("b"))
        with pytest.raises(EngineDead):
            await client.stats()
        await client.release("default", "x")  # there is nothing to release, and nobody minds
        await client.wait_ready()
        assert client.info.boot_id != boot_id
        assert tokens(await collect(client, ask("after"))) == expected


async def test_an_engine_that_keeps_dying_is_given_up(config: EngineConfig) -> None:
    async with running(config, restarts=RestartBudget(limit=1, first_delay_s=0.01)) as client:
        for _ in range(2):
            await client.wait_ready()
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            while client.ready:  # noqa: ASYNC110  # a death is no event that a client waits for
                await asyncio.sleep(0.01)
        with pytest.raises(EngineDead, match="too often: it was killed by SIGKILL"):
            await client.wait_ready()
        assert client.failure is not None
        assert await client.wait_lost() == client.failure


async def test_an_engine_that_is_closed_is_not_lost_and_says_nothing(
    config: EngineConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(config) as client:
        lost = asyncio.create_task(client.wait_lost())
    await asyncio.sleep(0)
    assert not lost.done()
    lost.cancel()
    assert capfd.readouterr().err == ""


async def test_an_engine_that_cannot_start_says_why(config: EngineConfig) -> None:
    client = ProcessEngineClient(EngineConfig(model="/no/such/folder.gguf"))
    with pytest.raises(RuntimeError, match="there is no such file or folder"):
        await client.start()
    await client.close()


async def test_closing_ends_running_streams_and_the_process(config: EngineConfig) -> None:
    async with running(config) as client:
        pid = client.pid
        assert pid is not None
        stream = client.generate(ask("a", max_tokens=None))
        await anext(stream)
        await client.close()
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class BareEngine:
    """An engine process and the raw socket to it."""

    def __init__(self, config: EngineConfig) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(60)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.server", "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
            )
        self._decoder = FrameDecoder()
        self._received: list[Message] = []
        self.send({"type": "start", "config": config.to_dict()})

    def send(self, message: Message) -> None:
        self.socket.sendall(encode_frame(message))

    def receive(self, kind: str) -> Message:
        """The next message of a kind; progress on the way is skipped."""
        while True:
            while self._received:
                message = self._received.pop(0)
                if message["type"] == kind:
                    return message
            data = self.socket.recv(1 << 16)
            assert data, f"the engine is gone before it sent {kind}"
            self._received += self._decoder.feed(data)

    def ending(self) -> tuple[int, str]:
        """Exit status and what was written to stderr."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors.decode()


@contextlib.contextmanager
def bare_engine(config: EngineConfig) -> Iterator[BareEngine]:
    engine = BareEngine(config)
    try:
        engine.receive("ready")
        yield engine
    finally:
        engine.socket.close()
        engine.process.kill()
        engine.process.communicate()


@pytest.fixture
def bare(config: EngineConfig) -> Iterator[BareEngine]:
    with bare_engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def lasting(config: EngineConfig) -> Iterator[BareEngine]:
    """A bare engine for tests that it survives."""
    with bare_engine(config) as engine:
        yield engine


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02\xc1\xc1"])
def test_garbage_on_the_socket_ends_the_process_with_a_word_about_it(
    bare: BareEngine, garbage: bytes
) -> None:
    bare.socket.sendall(garbage)
    status, errors = bare.ending()
    assert status == EXIT_BAD_FRAMES
    assert "garbage" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "message",
    [
        {"type": "nonsense"},
        {"type": "submit"},
        {"type": "submit", "request": 5},
        {"type": "submit", "request": {"prompt_ids": [1]}},
        {"type": "abort"},
        {"type": "release", "tenant": "a"},
    ],
)
def test_a_message_that_makes_no_sense_is_answered_and_the_engine_goes_on(
    lasting: BareEngine, message: Message
) -> None:
    lasting.send(message)
    assert lasting.receive("fault")["message"].startswith(message["type"])
    lasting.send({"type": "stats"})
    assert lasting.receive("stats")["stats"]["running"] == 0


def test_a_submit_with_wrong_fields_is_refused_by_its_id(lasting: BareEngine) -> None:
    lasting.send(
        {"type": "submit", "request": {"request_id": "a", "prompt_ids": [1], "sampling": {"warmth": 1}}}
    )
    assert lasting.receive("refused")["request_id"] == "a"
    lasting.send({"type": "submit", "request": {"request_id": "b", "sampling": {}}})
    assert lasting.receive("refused")["request_id"] == "b"


def test_the_process_ends_when_the_socket_does(bare: BareEngine) -> None:
    bare.socket.close()
    status, errors = bare.ending()
    assert status == 0
    assert "Traceback" not in errors


def test_prompts_are_never_logged(bare: BareEngine) -> None:
    prompt = [250, 251, 252, 253]
    bare.send(
        {"type": "submit", "request": {"request_id": "a", "prompt_ids": prompt, "sampling": {"top_p": 9}}}
    )
    bare.receive("refused")
    bare.send(
        {
            "type": "submit",
            "request": {"request_id": "b", "prompt_ids": prompt, "sampling": {"max_tokens": 1}},
        }
    )
    bare.receive("outputs")
    bare.socket.close()
    assert "250, 251" not in bare.ending()[1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_the_engine_dies_with_its_parent(config: EngineConfig) -> None:
    """The parent is killed while the engine still loads and reads no socket."""
    code = (
        "import asyncio, sys\n"
        "from engine.config import EngineConfig\n"
        "from engine.process import EngineProcess\n"
        "async def main():\n"
        "    process = await EngineProcess.spawn(EngineConfig(model=sys.argv[1]))\n"
        "    async for message in process.messages():\n"
        "        print(process.pid, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(config.model)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = 200
    while Path(f"/proc/{pid}").exists() and _state(pid) != "Z":
        deadline -= 1
        assert deadline, "the engine outlives its parent"
        subprocess.run(["sleep", "0.1"], check=True)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
