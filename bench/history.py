"""Does the first token of a later turn grow with the history? A short and a long one in turn, as a ratio.

    python -m bench.history --ws ws://127.0.0.1:8000/v1/responses --short 400 --long 4000

Each conversation is brought to its length by its first turn; then both take the same small turns alternately,
so that a change of the machine's speed meets both alike.
"""

from __future__ import annotations

import asyncio
import random
from typing import Annotated

import typer

from bench.load import ms
from bench.targets import TurnRecord, WebsocketTarget
from bench.workload import words


async def measure(target: WebsocketTarget, lengths: list[int], turns: int) -> list[list[TurnRecord]]:
    rng = random.Random()  # other words each time: a second run must not find the first one's in the cache
    conversations = [await target.open("You answer briefly.") for _ in lengths]
    for conversation, length in zip(conversations, lengths, strict=True):
        await conversation.say(words(rng, length), 4)
    records: list[list[TurnRecord]] = [[] for _ in lengths]
    for _ in range(turns):
        for conversation, kept in zip(conversations, records, strict=True):
            kept.append(await conversation.say(words(rng, 16), 4))
    for conversation in conversations:
        await conversation.close()
    return records


def main(
    ws: Annotated[str, typer.Option(help="Our websocket")] = "ws://127.0.0.1:8000/v1/responses",
    model: str = "smollm2-135m-instruct",
    short: Annotated[int, typer.Option(help="Words of history, about one token each")] = 400,
    long: int = 4000,
    turns: int = 15,
    api_key: str | None = None,
) -> None:
    target = WebsocketTarget("pageturner", ws, model, api_key)
    few, many = asyncio.run(measure(target, [short, long], turns))
    for name, records in (("short", few), ("long", many)):
        first = [r.first_token for r in records]
        print(
            f"{name:<6} from {records[0].prompt_tokens:5d} tokens of context: first token {ms(first):6.1f} ms"
        )
    ratios = sorted(b.first_token / a.first_token for a, b in zip(few, many, strict=True))
    middle = ratios[len(ratios) // 2]
    print(f"ratio long/short, pair by pair: median {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    typer.run(main)
