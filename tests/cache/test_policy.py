from __future__ import annotations

import random

import pytest

from cache.branches import Branch, BranchKey
from cache.errors import OutOfBlocks
from cache.policy import IdleLeaves, LeastRecentlyUsed
from cache.tree import Node, PrefixTree


def leaves_used_at(*times: int) -> list[Node]:
    tree = PrefixTree(4)
    nodes = [tree.add(tree.root("space"), [time], block) for block, time in enumerate(times)]
    for node, time in zip(nodes, times, strict=True):
        node.last_used = time
    return nodes


def test_the_leaf_used_longest_ago_goes_first() -> None:
    nodes = leaves_used_at(3, 1, 2)
    idle = IdleLeaves(LeastRecentlyUsed())
    for node in nodes:
        idle.offer(node)
    assert [idle.pop().last_used for _ in range(3)] == [1, 2, 3]


def test_what_has_a_name_goes_last() -> None:
    old, new = leaves_used_at(1, 2)
    old.branches.add(Branch(BranchKey("ann", "chat"), old, 1))
    idle = IdleLeaves(LeastRecentlyUsed())
    idle.offer(old)
    idle.offer(new)
    assert idle.pop() is new
    assert idle.pop() is old


def test_offering_again_changes_the_rank() -> None:
    one, two = leaves_used_at(1, 2)
    idle = IdleLeaves(LeastRecentlyUsed())
    idle.offer(one)
    idle.offer(two)
    one.last_used = 3
    assert not idle.up_to_date(one)
    idle.offer(one)
    assert idle.up_to_date(one)
    assert len(idle) == 2
    assert [idle.pop(), idle.pop()] == [two, one]


def test_what_was_withdrawn_does_not_go() -> None:
    one, two = leaves_used_at(1, 2)
    idle = IdleLeaves(LeastRecentlyUsed())
    idle.offer(one)
    idle.offer(two)
    idle.withdraw(one)
    idle.withdraw(one)
    assert one not in idle
    assert idle.pop() is two
    with pytest.raises(OutOfBlocks):
        idle.pop()


def test_leaves_of_equal_rank_go_in_the_order_in_which_they_were_offered() -> None:
    one, two, three = leaves_used_at(5, 5, 5)
    idle = IdleLeaves(LeastRecentlyUsed())
    for leaf in (one, two, three):
        idle.offer(leaf)
    idle.withdraw(one)
    idle.offer(one)
    assert [idle.pop() for _ in range(3)] == [two, three, one]


def test_leaves_that_come_and_go_leave_nothing_behind() -> None:
    nodes = leaves_used_at(*range(10))
    idle = IdleLeaves(LeastRecentlyUsed())
    chance = random.Random(0)
    for time in range(5_000):
        node = chance.choice(nodes)
        node.last_used = 10 + time
        idle.withdraw(node)
        idle.offer(node)
        assert len(idle._heap) <= 2 * len(idle) + 64 + 1
    while idle:
        idle.pop()
    assert not idle._offers
