"""A server of our own: starts, persists, ends with us in any case, shares its folder with nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as NoConnection

import sessions.private_valkey
from sessions import PrivateValkey, RedisStore, Sessions
from sessions.store import StoreUnavailable
from tests.sessions.support import ScriptedEngine, finished, spec, toy_tokenizer

pytestmark = pytest.mark.anyio


async def count(url: str) -> int:
    async with Redis.from_url(url) as redis:
        return int(await redis.incr("n"))


async def reachable(url: str) -> bool:
    async with Redis.from_url(url) as redis:
        try:
            return bool(await redis.ping())
        except (NoConnection, OSError):
            return False


async def process_id(url: str) -> int | None:
    async with Redis.from_url(url) as redis:
        try:
            return int((await redis.info("server"))["process_id"])
        except (NoConnection, OSError):
            return None


async def test_what_was_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    valkey = PrivateValkey(tmp_path / "store")
    for expected in (1, 2):
        await valkey.start()
        assert await count(valkey.url) == expected
        await valkey.stop()
        assert not await reachable(valkey.url)


async def test_nobody_else_can_open_its_socket(tmp_path: Path) -> None:
    valkey = PrivateValkey(tmp_path / "store")
    await valkey.start()
    socket = valkey.url.removeprefix("unix://")
    assert [os.stat(path).st_mode & 0o077 for path in (socket, tmp_path / "store")] == [0, 0]  # noqa: PTH116
    await valkey.stop()


async def test_a_folder_with_a_long_name_works_too(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    valkey = PrivateValkey(folder)
    await valkey.start()
    assert await count(valkey.url) == 1
    assert (folder / "appendonlydir").is_dir()
    await valkey.stop()


async def test_a_folder_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions.private_valkey, "STOP_TIMEOUT_S", 0.2)
    first, second = PrivateValkey(tmp_path), PrivateValkey(tmp_path)
    await first.start()
    with pytest.raises(RuntimeError, match="another server uses the data folder"):
        await second.start()
    assert await count(first.url) == 1
    await first.stop()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    valkey = PrivateValkey(tmp_path)
    with pytest.raises(RuntimeError, match="did not start"):
        await valkey.start()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").unlink()
    await valkey.start()  # what failed has let go of the folder
    await valkey.stop()


async def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = """
        import asyncio, sys
        from pathlib import Path
        from sessions import PrivateValkey

        async def main():
            valkey = PrivateValkey(Path(sys.argv[1]))
            await valkey.start()
            print(valkey.url, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), str(tmp_path), stdout=subprocess.PIPE, cwd=Path.cwd()
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    assert await count(url) == 1
    process.kill()
    await process.wait()
    valkey = PrivateValkey(tmp_path)
    await valkey.start()  # waits until the other one has let go
    assert await count(valkey.url) == 2
    await valkey.stop()


async def test_a_server_that_ends_by_itself_is_started_again(tmp_path: Path) -> None:
    valkey = PrivateValkey(tmp_path)
    await valkey.start()
    for expected in (1, 2, 3):
        assert await count(valkey.url) == expected
        pid = await process_id(valkey.url)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while await process_id(valkey.url) in (None, pid):  # noqa: ASYNC110  # nobody tells when it is back
            await asyncio.sleep(0.01)
    await valkey.stop()
    assert not await reachable(valkey.url)


async def test_a_server_left_behind_by_a_killed_guard_is_ended_first(tmp_path: Path) -> None:
    lost = PrivateValkey(tmp_path)
    await lost.start()
    assert await count(lost.url) == 1
    assert lost._guard is not None
    os.kill(lost._guard.pid, signal.SIGKILL)
    await lost._guard.wait()
    assert await reachable(lost.url)
    await lost.stop()
    assert await reachable(lost.url), "nobody was there to end it"
    valkey = PrivateValkey(tmp_path)
    await valkey.start()
    assert await count(valkey.url) == 2
    await valkey.stop()


async def test_sessions_run_on_it(tmp_path: Path) -> None:
    valkey = PrivateValkey(tmp_path)
    names: list[str] = []
    for _ in range(2):
        await valkey.start()
        sessions_ = Sessions(ScriptedEngine(), toy_tokenizer(), RedisStore(valkey.url, exclusive=True))
        await sessions_.start()
        parent = names[-1] if names else None
        names.append((await finished(sessions_, spec(previous_response_id=parent)))["id"])
        await sessions_.close()
        await valkey.stop()


async def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    store = RedisStore(f"unix://{tmp_path / 'nothing'}")
    with pytest.raises(RuntimeError, match="cannot be reached"):
        await store.start()
    with pytest.raises(StoreUnavailable) as error:
        await store.turn("resp_1")
    assert error.value.status == 503
    assert str(tmp_path) not in error.value.message
    await store.close()


async def test_a_store_that_comes_back_is_used_again(tmp_path: Path) -> None:
    valkey = PrivateValkey(tmp_path)
    await valkey.start()
    store = RedisStore(valkey.url)
    await store.start()
    conversation = await store.create_conversation("ann", {"title": "x"})
    await valkey.stop()
    with pytest.raises(StoreUnavailable):
        await store.conversation(conversation.id)
    await valkey.start()
    assert await store.conversation(conversation.id) == conversation
    await store.close()
    await valkey.stop()
