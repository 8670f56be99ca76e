import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.outbox import Close, Outbox, OutboxFull
from app.wire import Codec


def outbox(limit: int = 10_000) -> Outbox:
    return Outbox(limit, Codec(binary=False).encode)


def delta(number: int, text: str, item: str = "msg_1") -> dict[str, Any]:
    return {
        "type": "response.output_text.delta",
        "item_id": item,
        "output_index": 0,
        "content_index": 0,
        "delta": text,
        "logprobs": [],
        "sequence_number": number,
    }


async def drain(box: Outbox) -> list[dict[str, Any]]:
    frames = []
    while len(box):
        frame = await box.take()
        assert isinstance(frame, bytes)
        frames.append(json.loads(frame))
    return frames


def test_waiting_deltas_become_one_with_the_last_number() -> None:
    async def scenario() -> list[dict[str, Any]]:
        box = outbox()
        for number, text in enumerate("abc"):
            await box.put(delta(number, text), "turn")
        return await drain(box)

    assert asyncio.run(scenario()) == [delta(2, "abc")]


def test_an_event_between_keeps_deltas_apart() -> None:
    async def scenario() -> list[dict[str, Any]]:
        box = outbox()
        await box.put(delta(0, "a"), "turn")
        await box.put({"type": "response.output_text.done", "sequence_number": 1}, "turn")
        await box.put(delta(2, "b", "msg_2"), "turn")
        return await drain(box)

    assert [frame["sequence_number"] for frame in asyncio.run(scenario())] == [0, 1, 2]


def test_deltas_of_other_items_and_other_sources_are_never_mixed() -> None:
    async def scenario() -> list[dict[str, Any]]:
        box = outbox()
        await box.put(delta(0, "a"), "one")
        await box.put(delta(0, "x"), "two")
        await box.put(delta(1, "b"), "one")
        await box.put(delta(2, "c", "msg_9"), "one")
        return await drain(box)

    assert asyncio.run(scenario()) == [delta(1, "ab"), delta(0, "x"), delta(2, "c", "msg_9")]


def test_a_frame_that_was_taken_grows_no_more() -> None:
    async def scenario() -> list[dict[str, Any]]:
        box = outbox()
        await box.put(delta(0, "a"), "turn")
        first = await box.take()
        await box.put(delta(1, "b"), "turn")
        assert isinstance(first, bytes)
        return [json.loads(first), *await drain(box)]

    assert asyncio.run(scenario()) == [delta(0, "a"), delta(1, "b")]


def test_a_full_outbox_holds_its_producer_until_there_is_room() -> None:
    async def scenario() -> None:
        box = outbox(limit=100)
        await box.put({"type": "big", "text": "x" * 200}, "turn")
        waiting = asyncio.create_task(box.put({"type": "next"}, "turn"))
        await asyncio.sleep(0)
        assert not waiting.done()
        await box.take()
        await waiting
        assert len(box) == 1

    asyncio.run(scenario())


def test_control_answers_never_wait_but_have_an_end() -> None:
    async def scenario() -> None:
        box = outbox(limit=100)
        while box.size < 200:
            box.put_now({"type": "pong"})
        with pytest.raises(OutboxFull):
            box.put_now({"type": "pong"})
        assert box.size < 300

    asyncio.run(scenario())


def test_a_closed_outbox_sends_what_waits_then_the_close_and_nothing_after() -> None:
    async def scenario() -> None:
        box = outbox()
        box.put_now({"type": "pong"})
        box.close(1012, "restart")
        box.close(1000, "again")
        box.put_now({"type": "pong"})
        await box.put({"type": "late"}, "turn")
        assert isinstance(await box.take(), bytes)
        assert await box.take() == Close(1012, "restart")
        assert len(box) == 0

    asyncio.run(scenario())


def test_closing_lets_waiting_producers_go() -> None:
    async def scenario() -> None:
        box = outbox(limit=10)
        await box.put({"type": "fills it"}, "turn")
        waiting = asyncio.create_task(box.put({"type": "late"}, "turn"))
        await asyncio.sleep(0)
        box.close(1012, "restart")
        await asyncio.wait_for(waiting, 5)
        assert len(box) == 2

    asyncio.run(scenario())


steps = st.lists(
    st.one_of(
        st.tuples(st.just("delta"), st.sampled_from("AB"), st.text(min_size=1, max_size=4)),
        st.tuples(st.just("other"), st.sampled_from("AB"), st.just("")),
        st.tuples(st.just("take"), st.just(""), st.just("")),
    ),
    max_size=60,
)


@given(steps)
def test_whatever_the_reader_does_text_and_order_of_each_source_survive(
    steps: list[tuple[str, str, str]],
) -> None:
    async def scenario() -> None:
        box = outbox()
        numbers = dict.fromkeys("AB", 0)
        sent: dict[str, list[tuple[int, str]]] = {"A": [], "B": []}
        seen: dict[str, list[tuple[int, str]]] = {"A": [], "B": []}

        async def take() -> None:
            frame = await box.take()
            assert isinstance(frame, bytes)
            event = json.loads(frame)
            seen[event["item_id"]].append((event["sequence_number"], event.get("delta", "|")))

        for action, source, text in steps:
            if action == "take":
                if len(box):
                    await take()
                continue
            event = delta(numbers[source], text, source)
            if action == "other":
                event = {"type": "other", "item_id": source, "sequence_number": numbers[source]}
            await box.put(event, source)
            sent[source].append((numbers[source], text or "|"))
            numbers[source] += 1
        while len(box):
            await take()
        assert box.size == 0
        for source in "AB":
            assert "".join(text for _, text in seen[source]) == "".join(text for _, text in sent[source])
            order = [number for number, _ in seen[source]]
            assert order == sorted(set(order))
            assert order[-1:] == [number for number, _ in sent[source]][-1:]

    asyncio.run(scenario())
