"""The real back end: store, tokenizer, engine and sessions, put together in the order that fails soonest."""

from __future__ import annotations

import asyncio
import contextlib

from app.backend import OnStage, Parts
from app.config import Settings
from app.metrics import MeteredEngine, Metrics
from engine.client import ProcessEngineClient
from engine.model.source import resolve_model
from engine.tokenizer import load_tokenizer
from sessions import ChatTokenizer, PrivateValkey, RedisStore, Sessions

STORE_FOLDER = "store"


async def assemble(settings: Settings, metrics: Metrics, on_stage: OnStage) -> Parts:
    """Raises `RuntimeError` or `ValueError` in words for a person; nothing is left running then."""
    async with contextlib.AsyncExitStack() as stack:
        source = resolve_model(settings.model)
        name = settings.served_model_name or source.served_name
        metrics.model_name = name

        on_stage("store", None)
        store = await _open_store(settings, stack)

        engine = ProcessEngineClient(settings.engine, on_progress=on_stage)
        stack.push_async_callback(engine.close)
        on_stage("tokenizer", None)
        # The engine process reads its weights meanwhile.
        starting = asyncio.create_task(engine.start())
        stack.callback(starting.cancel)
        tokenizer = await asyncio.to_thread(lambda: ChatTokenizer(load_tokenizer(source)))
        on_stage("model", None)
        await starting

        on_stage("sessions", None)
        sessions = Sessions(MeteredEngine(engine, metrics), tokenizer, store)
        await sessions.start()
        stack.push_async_callback(sessions.close)
        return Parts(sessions, engine, name, stack.pop_all().aclose, lost=engine.wait_lost)


async def _open_store(settings: Settings, stack: contextlib.AsyncExitStack) -> RedisStore:
    """The store named by `redis_url`, or a private server in the data folder that ends with us."""
    if settings.redis_url is not None:
        return RedisStore(settings.redis_url.get_secret_value())
    valkey = PrivateValkey(settings.data_dir / STORE_FOLDER)
    await valkey.start()
    stack.push_async_callback(valkey.stop)
    return RedisStore(valkey.url, exclusive=True)
