"""KV waste: allocated slots that hold no token, over allocated slots, under conversations of mixed length.

    python -m bench.waste --url http://127.0.0.1:8000 --conversations 32

Reads the block counts and resident tokens from `/metrics` once a second, from the moment all conversations
are under way. A block that several conversations share counts once.
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import Annotated

import httpx
import typer

from bench.targets import WebsocketTarget
from bench.workload import words


async def hold_mixed(target: WebsocketTarget, number: int, turns: int, started: asyncio.Event) -> None:
    rng = random.Random(number)
    conversation = await target.open(words(random.Random(number), rng.randint(20, 400)))
    for turn in range(turns):
        await conversation.say(words(rng, rng.randint(5, 300)), rng.randint(4, 64))
        if turn == 0:
            started.set()
    await conversation.close()


async def waste_now(client: httpx.AsyncClient, url: str) -> float | None:
    """The share of allocated slots that hold nothing; None while nothing is allocated."""
    text = (await client.get(f"{url}/metrics")).text

    def value(pattern: str) -> float:
        found = re.search(rf"^pageturner:{pattern} (\S+)$", text, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"/metrics shows no pageturner:{pattern}")
        return float(found[1])

    block_size = re.search(r'cache_config_info\{[^}]*block_size="(\d+)"', text)
    if block_size is None:
        raise RuntimeError("/metrics shows no block_size")
    total, free = (value(rf'kv_blocks\{{[^}}]*state="{state}"\}}') for state in ("total", "free"))
    slots = (total - free) * int(block_size[1])
    return 1 - value(r"session_kv_resident_tokens\{[^}]*\}") / slots if slots else None


async def measure(url: str, model: str, conversations: int, turns: int) -> list[float]:
    target = WebsocketTarget("pageturner", url.replace("http", "ws", 1) + "/v1/responses", model)
    started = [asyncio.Event() for _ in range(conversations)]
    running = [asyncio.create_task(hold_mixed(target, i, turns, event)) for i, event in enumerate(started)]
    await asyncio.gather(*(event.wait() for event in started))
    samples: list[float] = []
    async with httpx.AsyncClient() as client:
        while not all(task.done() for task in running):
            if (waste := await waste_now(client, url)) is not None:
                samples.append(waste)
            await asyncio.sleep(1)
    await asyncio.gather(*running)
    return samples


def main(
    url: str = "http://127.0.0.1:8000",
    model: str = "smollm2-135m-instruct",
    conversations: Annotated[int, typer.Option(help="At once; 20 to 400 words of system prompt each")] = 32,
    turns: Annotated[int, typer.Option(help="Of 5 to 300 words in and 4 to 64 tokens out")] = 4,
) -> None:
    samples = sorted(asyncio.run(measure(url, model, conversations, turns)))
    if not samples:
        raise SystemExit("the run ended before a sample was taken: use more turns")
    middle = samples[len(samples) // 2]
    least, most = samples[0], samples[-1]
    print(f"KV waste: median {middle:.2%}, least {least:.2%}, most {most:.2%}, of {len(samples)} samples")


if __name__ == "__main__":
    typer.run(main)
