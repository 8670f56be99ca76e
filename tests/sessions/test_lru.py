"""Bounded maps: neither their number nor their age grows without end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sessions.lru import BoundedMap


def test_the_entry_used_least_goes_first() -> None:
    dropped: list[tuple[str, int]] = []
    entries: BoundedMap[str, int] = BoundedMap(2, on_drop=lambda key, value: dropped.append((key, value)))
    entries.put("a", 1)
    entries.put("b", 2)
    assert entries.get("a") == 1
    entries.put("c", 3)
    assert dropped == [("b", 2)]
    assert entries.get("b") is None
    assert sorted(entries.values()) == [1, 3]


def test_what_was_taken_out_is_not_dropped() -> None:
    dropped: list[str] = []
    entries: BoundedMap[str, int] = BoundedMap(1, on_drop=lambda key, value: dropped.append(key))
    entries.put("a", 1)
    assert entries.pop("a") == 1
    assert entries.pop("a") is None
    entries.put("b", 2)
    assert not dropped


def test_entries_live_as_long_as_they_are_used() -> None:
    now = 0.0
    entries: BoundedMap[str, int] = BoundedMap(9, ttl_s=10, clock=lambda: now)
    entries.put("a", 1)
    entries.put("b", 2)
    now = 9.0
    assert entries.get("a") == 1
    now = 12.0
    assert "a" in entries
    assert "b" not in entries
    assert len(entries) == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60), st.integers(1, 5))
def test_it_holds_the_last_ones_used(steps: list[tuple[int, bool]], limit: int) -> None:
    entries: BoundedMap[int, int] = BoundedMap(limit)
    used: list[int] = []
    for key, write in steps:
        if write:
            entries.put(key, key)
        elif entries.get(key) is None:
            continue
        used = [*(k for k in used if k != key), key][-limit:]
        assert len(entries) == len(used)
    assert all(entries.get(key) == key for key in used)
