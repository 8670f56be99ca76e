"""Multi-turn chat load: C conversations at once, T turns each, one row printed for each server and load.

    python -m bench.load --ws ws://127.0.0.1:8000/v1/responses --model smollm2-135m-instruct \\
        --chat vllm=http://127.0.0.1:8100 --chat-model smol -c 1 -c 8 -c 32

Servers are loaded one after another, never at the same time. All figures are as the reader of the stream
sees them: first token (median of the first turn, median and 95th percentile of later turns), the gap between
pieces of text (median), milliseconds a token (from first to last piece, so that merged pieces count rightly),
and the total rate.
`cached` is what the servers themselves report as reused.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Annotated

import typer

from bench.targets import ChatTarget, Target, TurnRecord, WebsocketTarget
from bench.workload import Workload

DEFAULT_WS = "ws://127.0.0.1:8000/v1/responses"


async def hold(target: Target, workload: Workload, number: int) -> list[TurnRecord]:
    conversation = await target.open(workload.system_prompt())
    try:
        return [await conversation.say(text, workload.tokens_out) for text in workload.user_texts(number)]
    finally:
        await conversation.close()


async def load(target: Target, workload: Workload, concurrency: int) -> str:
    """Run one load and return its row."""
    started = time.perf_counter()
    # Other words for each load, or it would find the texts of an earlier one in the server's cache.
    first = random.randrange(2**40)
    numbers = [first + i for i in range(concurrency)]
    held = await asyncio.gather(*(hold(target, workload, number) for number in numbers))
    wall = time.perf_counter() - started
    return row(target.name, concurrency, [record for records in held for record in records], wall)


def row(name: str, concurrency: int, records: list[TurnRecord], wall: float) -> str:
    first = [r.first_token for r in records if r.turn == 0]
    later = [r.first_token for r in records if r.turn > 0]
    gaps = [gap for r in records for gap in r.gaps]
    a_token = [
        (r.arrivals[-1] - r.arrivals[0]) / (r.output_tokens - 1)
        for r in records
        if r.output_tokens > 1 and len(r.arrivals) > 1
    ]
    return " ".join(
        [
            f"{name:<12} C={concurrency:<3}",
            f"first token: turn 1 {ms(first):7.1f}  later {ms(later):7.1f}  p95 {ms(later, 0.95):7.1f} ms |",
            f"gap {ms(gaps):6.1f} ms | a token {ms(a_token):6.1f} ms |",
            f"{sum(r.output_tokens for r in records) / wall:7.1f} tok/s |",
            f"prompt {sum(r.prompt_tokens for r in records)} cached {sum(r.cached_tokens for r in records)}",
        ]
    )


def ms(seconds: list[float], quantile: float = 0.5) -> float:
    """A quantile in milliseconds; nan of nothing."""
    return sorted(seconds)[int(len(seconds) * quantile)] * 1e3 if seconds else float("nan")


def main(
    ws: Annotated[
        list[str] | None,
        typer.Option(help=f"Our websocket: URL or NAME=URL; without --ws and --chat {DEFAULT_WS}"),
    ] = None,
    chat: Annotated[list[str] | None, typer.Option(help="An OpenAI server: URL or NAME=URL")] = None,
    model: Annotated[str, typer.Option(help="Model name for --ws")] = "smollm2-135m-instruct",
    chat_model: Annotated[str | None, typer.Option(help="Model name for --chat (default: --model)")] = None,
    concurrency: Annotated[list[int] | None, typer.Option("-c", "--concurrency")] = None,
    turns: int = 4,
    words_in: int = 40,
    tokens_out: int = 64,
    system_words: int = 200,
    rounds: Annotated[int, typer.Option(help="Repeat the whole comparison")] = 1,
    api_key: str | None = None,
) -> None:
    workload = Workload(turns, words_in, tokens_out, system_words)
    targets: list[Target] = [
        *(WebsocketTarget(*named(url, "pageturner"), model, api_key) for url in ws or []),
        *(ChatTarget(*named(url, "chat"), chat_model or model, api_key) for url in chat or []),
    ]
    if not targets:
        targets = [WebsocketTarget("pageturner", DEFAULT_WS, model, api_key)]
    asyncio.run(compare(targets, workload, concurrency or [1, 8, 32], rounds))


async def compare(targets: list[Target], workload: Workload, loads: list[int], rounds: int) -> None:
    for target in targets:
        # One short conversation first: compiled kernels, allocator and connections are warm for everyone.
        await hold(target, Workload(turns=2, words_in=8, tokens_out=8, system_words=20), 0)
    for _ in range(rounds):
        for concurrency in loads:
            for target in targets:
                print(await load(target, workload, concurrency), flush=True)


def named(argument: str, default: str) -> tuple[str, str]:
    """`NAME=URL` or `URL`."""
    name, separator, url = argument.partition("=")
    return (name, url) if separator and "://" not in name else (default, argument)


if __name__ == "__main__":
    typer.run(main)
