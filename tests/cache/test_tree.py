from __future__ import annotations

import itertools
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.tree import Match, Node, PrefixTree

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


class Counted(int):
    """A token that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: Any) -> bool:
        Counted.compared += 1
        return int(self) == int(other)

    def __lt__(self, other: Any) -> bool:
        Counted.compared += 1
        return int(self) < int(other)

    __hash__ = int.__hash__


def tree_of(*siblings: list[int], block_size: int = 4) -> tuple[PrefixTree, list[Node]]:
    tree = PrefixTree(block_size)
    root = tree.root("space")
    return tree, [tree.add(root, tokens, block) for block, tokens in enumerate(siblings)]


def test_the_sibling_with_the_longest_common_prefix_is_found() -> None:
    tree, nodes = tree_of([1, 2, 3, 4], [1, 2, 9], [1], [5, 5, 5, 5])
    root = tree.root("space")
    assert tree.match(root, [1, 2, 3, 4]) == Match(nodes[0], 4)
    assert tree.match(root, [1, 2, 3, 7]) == Match(nodes[0], 3)
    assert tree.match(root, [1, 2, 9, 9]) == Match(nodes[1], 3)
    match = tree.match(root, [1, 3])
    assert match is not None
    assert match.length == 1
    assert tree.match(root, [5]) == Match(nodes[3], 1)
    assert tree.match(root, [0, 1]) is None
    assert tree.match(tree.root("other"), [1]) is None


@settings(deadline=None)
@given(st.lists(TOKENS, max_size=12), TOKENS)
def test_matching_is_as_good_as_looking_at_every_sibling(
    siblings: list[list[int]], wanted: list[int]
) -> None:
    def common(one: list[int], other: list[int]) -> int:
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))

    tree, _ = tree_of(*siblings)
    match = tree.match(tree.root("space"), wanted)
    best = max((common(tokens, wanted) for tokens in siblings), default=0)
    assert (match.length if match else 0) == best
    assert match is None or common(match.node.tokens, wanted) == match.length


@settings(deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=12), st.data())
def test_siblings_stay_in_order_whatever_happens_to_them(
    siblings: list[list[int]], data: st.DataObject
) -> None:
    tree, nodes = tree_of(*siblings, block_size=8)
    root = nodes[0].parent
    assert root is not None
    for node in data.draw(st.permutations(nodes)):
        change = data.draw(st.sampled_from(["extend", "shorten", "remove"]))
        if change == "extend":
            tree.extend(node, data.draw(TOKENS))
        elif change == "shorten":
            tree.shorten(node, data.draw(st.integers(1, len(node.tokens))))
        else:
            tree.remove(node)
        assert [child.tokens for child in root.children] == sorted(child.tokens for child in root.children)
        assert tree.tokens == sum(len(child.tokens) for child in root.children)
        assert tree.size == len(root.children) == len(list(tree))


@settings(deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=12))
def test_prefixes_and_extensions_are_each_others_opposite(siblings: list[list[int]]) -> None:
    tree, nodes = tree_of(*siblings)
    for one, other in itertools.permutations(nodes, 2):
        begins = other.tokens[: len(one.tokens)] == one.tokens
        assert (other in list(tree.extensions(one))) == begins
        assert (one in tree.prefixes(other)) == (begins and one.tokens != other.tokens)


def test_ten_thousand_siblings_cost_a_bisection() -> None:
    tree = PrefixTree(16)
    root = tree.root("space")
    chance = random.Random(0)
    first = [7] * 8  # conversations that begin alike and diverge in the middle of a block
    for block in range(10_000):
        tree.add(root, [Counted(t) for t in [*first, *(chance.randrange(50_000) for _ in range(8))]], block)
    wanted = [Counted(t) for t in [*first, *(chance.randrange(50_000) for _ in range(8))]]

    Counted.compared = 0
    match = tree.match(root, wanted)
    assert match is not None
    assert match.length >= 8
    assert Counted.compared < 20 * 20  # some 14 siblings, up to 16 tokens each

    Counted.compared = 0
    node = tree.add(root, wanted[:9], 10_000)
    for token in wanted[9:]:
        tree.extend(node, [token])
    list(tree.extensions(node))
    tree.remove(node)
    assert Counted.compared < 20 * 20 * 20


def test_a_space_is_remembered_only_while_it_holds_something() -> None:
    tree = PrefixTree(4)
    assert tree.roots() == []
    node = tree.add(tree.root("ann"), [1], 0)
    assert [root.space for root in tree.roots()] == ["ann"]
    assert tree.root("ann").children == [node]
    tree.remove(node)
    assert tree.roots() == []
    assert not node.attached


def test_a_node_knows_where_it_starts_and_what_comes_before() -> None:
    tree, (first,) = tree_of([1, 2, 3, 4])
    second = tree.add(first, [5, 6], 1)
    assert (first.start, second.start) == (0, 4)
    assert list(second.path()) == [second, first]
    assert list(tree) == [first, second]
