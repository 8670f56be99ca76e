"""Wherever a reader begins and however often it looks, it gets every event once and every letter once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessions.api import Event
from sessions.eventlog import DELTA, DeltaRun, EventLog

SHAPE = {"type": DELTA, "item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}

# None is an event that is not text.
happenings = st.lists(st.one_of(st.none(), st.text(min_size=1, max_size=4)), max_size=30)


def filled(happened: list[str | None]) -> EventLog:
    log = EventLog()
    for what in happened:
        add(log, what)
    return log


def add(log: EventLog, what: str | None) -> None:
    if what is None:
        log.append({"type": "other"})
    else:
        log.append_delta(SHAPE, what)


def one_by_one(happened: list[str | None]) -> list[Event]:
    """The events as they were when each was written alone."""
    return [
        {"type": "other", "sequence_number": number}
        if what is None
        else {**SHAPE, "delta": what, "sequence_number": number}
        for number, what in enumerate(happened)
    ]


def merged(events: list[Event]) -> list[Event]:
    """The same with neighbouring deltas as one, whose number is that of the last."""
    result: list[Event] = []
    for event in events:
        if result and result[-1]["type"] == event["type"] == DELTA:
            result[-1] = {**event, "delta": result[-1]["delta"] + event["delta"]}
        else:
            result.append(event)
    return result


@given(happenings, st.integers(-1, 35))
def test_reading_from_anywhere_gives_exactly_what_came_after(happened: list[str | None], after: int) -> None:
    assert filled(happened).read(after) == merged(one_by_one(happened)[after + 1 :])


@given(happenings, st.data())
def test_a_reader_that_looks_now_and_then_misses_nothing(happened: list[str | None], data: Any) -> None:
    log = EventLog()
    start = data.draw(st.integers(-1, len(happened)))
    position = start
    read: list[Event] = []
    for what in happened:
        add(log, what)
        if data.draw(st.booleans()):
            for event in log.read(position):
                assert event["sequence_number"] > position
                position = event["sequence_number"]
                read.append(event)
    read += log.read(position)
    assert merged(read) == merged(one_by_one(happened)[start + 1 :])


@given(happenings, st.lists(st.integers(-1, 30), max_size=6), st.integers(-1, 35))
def test_a_log_that_was_stored_in_pieces_is_the_same_log(
    happened: list[str | None], cuts: list[int], after: int
) -> None:
    log = filled(happened)
    copy = EventLog()
    for cut in cuts:  # pieces that overlap or repeat, as after a write whose answer was lost
        part = [entry for entry in log.entries(min(cut, copy.last)) if entry.last <= cut + 5]
        copy.extend(part)
    copy.extend(log.entries(copy.last))
    assert copy.read(after) == log.read(after)
    assert copy.last == log.last == len(happened) - 1
    assert copy.text == log.text == "".join(what or "" for what in happened)


def test_a_stored_run_is_cut_to_what_is_new() -> None:
    log = filled(["a", "b", "c"])
    assert log.entries(0) == [DeltaRun(1, SHAPE, ["b", "c"])]
    assert log.entries(2) == []


def test_text_of_another_part_begins_a_run_of_its_own() -> None:
    log = filled(["a"])
    log.append_delta({**SHAPE, "content_index": 1}, "b")
    assert [event["content_index"] for event in log.read(-1)] == [0, 1]


def test_what_a_reader_got_does_not_change_afterwards() -> None:
    log = filled([None, "a"])
    before = log.read(-1)
    log.append_delta(SHAPE, "b")
    assert before[-1]["delta"] == "a"


@pytest.mark.anyio
async def test_waiting_ends_with_the_next_event_and_with_the_end() -> None:
    log = filled([None])
    await log.wait(-1)
    waiting = [asyncio.create_task(log.wait(0)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    log.append_delta(SHAPE, "a")
    await asyncio.gather(*waiting)
    last = asyncio.create_task(log.wait(1))
    await asyncio.sleep(0)
    log.close()
    await last
