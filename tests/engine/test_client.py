"""The client's parts that need no process."""

import pytest

from engine.api import EngineDead, Output, PromptUsage
from engine.client import ProcessEngineClient, _Stream
from engine.config import EngineConfig
from engine.restarts import RestartBudget

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_restarts_wait_longer_each_time_and_end() -> None:
    budget = RestartBudget(limit=3, window_s=100.0, first_delay_s=0.5)
    assert [budget.next_delay(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.5, 1.0, 2.0, None]


def test_a_restart_long_ago_no_longer_counts() -> None:
    budget = RestartBudget(limit=2, window_s=100.0, first_delay_s=0.5)
    assert [budget.next_delay(now) for now in (0.0, 50.0, 99.0)] == [0.5, 1.0, None]
    assert budget.next_delay(100.0) == 1.0  # the first is forgotten, the second is not
    assert budget.next_delay(199.0) == 1.0  # only the one at 100 is left


async def test_a_slow_readers_outputs_merge_into_one() -> None:
    stream = _Stream("mine")
    usage = PromptUsage(3, 1, 2)
    stream.put(Output("0", [1], prompt=usage))
    stream.put(Output("0", [2, 3]))
    stream.put(Output("0", [4], "stop", usage))
    assert await stream.take() == Output("mine", [1, 2, 3, 4], "stop", usage)


async def test_what_arrived_before_a_failure_comes_before_it() -> None:
    stream = _Stream("mine")
    stream.put(Output("0", [1]))
    stream.fail(EngineDead("gone"))
    assert (await stream.take()).token_ids == [1]
    for _ in range(2):
        with pytest.raises(EngineDead, match="gone"):
            await stream.take()


async def test_a_client_that_was_never_started_can_be_closed() -> None:
    client = ProcessEngineClient(EngineConfig())
    assert not client.ready
    await client.release("a", "b")
    await client.abort("x")
    with pytest.raises(EngineDead):
        await client.stats()
    await client.close()
