"""What `/metrics` shows: the engine's gauges and totals at scrape time, and latencies as they happen.

Names end as vLLM's do, so that a dashboard made for it needs only another prefix.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from app.tasks import closing
from engine.api import EngineClient, EngineDead, EngineInfo, EngineStats, GenerateRequest, Output

PREFIX = "pageturner:"
LABELS = ("model_name", "engine")

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80)
TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

BLOCK_STATES = ("total", "free", "idle", "pinned", "reserved", "shared")


class Metrics:
    """One registry. `model_name` labels everything; it is empty until the model is loaded."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.model_name = ""
        self._registry = CollectorRegistry()
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one answer.", TOKEN_BUCKETS
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token.", REQUEST_BUCKETS
        )
        self.slow_closes = Counter(
            PREFIX + "ws_slow_closes",
            "Websockets closed because the client did not read.",
            registry=self._registry,
        )

    @property
    def _labels(self) -> tuple[str, str]:
        return self.model_name, "0"

    def observe(self, histogram: Histogram, seconds: float) -> None:
        histogram.labels(*self._labels).observe(seconds)

    def render(
        self, stats: EngineStats | None, info: EngineInfo | None, *, connections: int, outbox_bytes: int
    ) -> bytes:
        """The exposition text. Without an engine (`None`) its metrics are left out, not shown as zero."""
        families: list[Metric] = [
            self._gauge("ws_connections", "Open websockets.", connections),
            self._gauge("ws_outbox_bytes", "Bytes that wait for clients to read.", outbox_bytes),
        ]
        if stats is not None:
            families += self._engine_families(stats)
        if info is not None:
            families.append(self._cache_config(info))
        once = CollectorRegistry()
        once.register(_Snapshot(families))
        return generate_latest(self._registry) + generate_latest(once)

    def _engine_families(self, stats: EngineStats) -> list[Metric]:
        usable = max(stats.blocks_total, 1)
        used = 1.0 - (stats.blocks_free + stats.blocks_idle) / usable
        blocks = GaugeMetricFamily(
            PREFIX + "kv_blocks",
            "KV blocks by state; total = free + idle + pinned + reserved; shared have several users.",
            labels=(*LABELS, "state"),
        )
        for state in BLOCK_STATES:
            blocks.add_metric((*self._labels, state), getattr(stats, f"blocks_{state}"))
        finished = CounterMetricFamily(
            PREFIX + "request_success", "Requests that ended.", labels=(*LABELS, "finished_reason")
        )
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric((*self._labels, reason), count)
        return [
            self._gauge("num_requests_running", "Requests in the batch.", stats.running),
            self._gauge("num_requests_waiting", "Requests that wait for room in the batch.", stats.waiting),
            self._gauge(
                "kv_cache_usage_perc", "Share of KV blocks that running requests hold, 0 to 1.", used
            ),
            self._gauge("kv_branches", "Conversation tips that keep KV between turns.", stats.branches),
            self._gauge("session_kv_resident_tokens", "Tokens whose KV is resident.", stats.tokens_resident),
            self._total("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries_tokens),
            self._total("prefix_cache_hits", "Prompt tokens found resident.", stats.prefix_hits_tokens),
            self._total("prompt_tokens", "Prompt tokens of all requests.", stats.prompt_tokens),
            self._total("generation_tokens", "Tokens generated.", stats.generation_tokens),
            self._total("num_preemptions", "Requests pushed out to make room.", stats.preemptions),
            self._total("kv_blocks_evicted", "Idle KV blocks reclaimed.", stats.evicted_blocks),
            self._total("kv_blocks_copied", "KV blocks copied on write.", stats.copied_blocks),
            self._total("engine_steps", "Forward steps.", stats.steps),
            blocks,
            finished,
        ]

    def _cache_config(self, info: EngineInfo) -> Metric:
        values = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "block_bytes": str(info.block_bytes),
            "cache_dtype": info.dtype,
            "device": info.device,
            "attention_backend": info.attention_backend,
        }
        family = GaugeMetricFamily(
            PREFIX + "cache_config_info", "The KV cache's set-up; always 1.", labels=(*LABELS, *values)
        )
        family.add_metric((*self._labels, *values.values()), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _total(self, name: str, text: str, value: int) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, LABELS, buckets=buckets, registry=self._registry)


class _Snapshot:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class MeteredEngine:
    """An engine client that times what passes through it; sessions cannot tell the difference."""

    def __init__(self, engine: EngineClient, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def ready(self) -> bool:
        return self._engine.ready

    async def start(self) -> None:
        await self._engine.start()

    async def close(self) -> None:
        await self._engine.close()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Output]:
        metrics = self._metrics
        started = time.perf_counter()
        last: float | None = None
        # An early end must reach the engine now, not when the garbage collector comes by.
        async with closing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                now = time.perf_counter()
                count = len(output.token_ids)
                if count and last is None:
                    metrics.observe(metrics.first_token, now - started)
                elif count and last is not None:
                    for _ in range(count):
                        metrics.observe(metrics.inter_token, (now - last) / count)
                if count:
                    last = now
                if output.finish_reason is not None and output.finish_reason != "abort":
                    metrics.observe(metrics.request_latency, now - started)
                yield output

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def release(self, tenant: str, branch: str) -> None:
        await self._engine.release(tenant, branch)

    async def stats(self) -> EngineStats:
        return await self._engine.stats()


async def engine_snapshot(engine: EngineClient) -> tuple[EngineStats | None, EngineInfo | None]:
    """The engine's numbers, or nothing while none is up."""
    try:
        return await engine.stats(), engine.info
    except EngineDead:
        return None, None
