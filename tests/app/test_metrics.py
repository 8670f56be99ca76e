import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from app.metrics import MeteredEngine, Metrics, engine_snapshot
from engine.api import EngineDead, EngineStats, GenerateRequest, Output


class Scripted:
    """An engine whose outputs are given; notes when its stream is closed."""

    def __init__(self, outputs: list[Output]) -> None:
        self.outputs = outputs
        self.closed = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Output]:
        try:
            for output in self.outputs:
                yield output
        finally:
            self.closed = True


def counts(metrics: Metrics) -> dict[str, float]:
    text = metrics.render(None, None, connections=0, outbox_bytes=0).decode()
    return {
        sample.name.removeprefix("pageturner:").removesuffix("_count"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith("_count")
    }


def test_latencies_are_counted_as_tokens_come() -> None:
    metrics = Metrics()
    engine = Scripted([Output("r", [1]), Output("r", [2, 3]), Output("r", [4], "stop")])

    async def scenario() -> None:
        metered = MeteredEngine(cast(Any, engine), metrics)
        assert [output async for output in metered.generate(GenerateRequest("r", [1]))] == engine.outputs

    asyncio.run(scenario())
    assert counts(metrics) == {
        "time_to_first_token_seconds": 1,
        "inter_token_latency_seconds": 3,
        "e2e_request_latency_seconds": 1,
    }


def test_an_early_end_reaches_the_engine_at_once_and_counts_no_request() -> None:
    metrics = Metrics()
    engine = Scripted([Output("r", [1]), Output("r", [2])])

    async def scenario() -> None:
        stream = cast(Any, MeteredEngine(cast(Any, engine), metrics).generate(GenerateRequest("r", [1])))
        await anext(stream)
        assert not engine.closed
        await stream.aclose()
        assert engine.closed

    asyncio.run(scenario())
    assert "e2e_request_latency_seconds" not in counts(metrics)


def test_a_dead_engine_has_no_numbers() -> None:
    class Dead:
        async def stats(self) -> EngineStats:
            raise EngineDead("gone")

    assert asyncio.run(engine_snapshot(cast(Any, Dead()))) == (None, None)


def test_a_scrape_without_an_engine_leaves_its_metrics_out() -> None:
    text = Metrics().render(None, None, connections=3, outbox_bytes=10).decode()
    assert "pageturner:ws_connections" in text
    assert "kv_blocks" not in text
