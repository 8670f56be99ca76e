"""Every invariant of the cache, recomputed from scratch and compared with the running books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from cache.branches import BranchKey
from cache.copies import CopyQueue
from cache.errors import require
from cache.residency import Residency
from cache.table import Table
from cache.tree import Node


def check(
    resident: Residency, tables: Sequence[Table], copies: CopyQueue, running: Mapping[BranchKey, int]
) -> None:
    """Raise `IntegrityError` with what is wrong. O(everything)."""
    resident.pool.check_integrity()
    nodes = list(resident.tree)
    _check_tree(resident, nodes)
    _check_tables(resident, tables, running)
    _check_copies(copies)
    _check_branches(resident, nodes, running)
    _check_references(resident, nodes, tables, copies)
    _check_users(resident, nodes, tables)
    _check_leaves(resident, nodes)


def _check_tree(resident: Residency, nodes: list[Node]) -> None:
    size = resident.tree.block_size
    for root in resident.tree.roots():
        require(bool(root.children), f"the root of {root.space!r} is remembered without children")
        require(not root.branches, f"a branch points at the root of {root.space!r}")
    for node in nodes:
        parent = node.parent
        where = f"node of block {node.block}"
        require(parent is not None, f"{where} is in the tree and has no parent")
        assert parent is not None
        require(1 <= len(node.tokens) <= size, f"{where} holds {len(node.tokens)} tokens of {size}")
        require(
            node.start == (0 if parent.is_root else parent.start + size), f"{where} starts at {node.start}"
        )
        require(
            parent.is_root or len(parent.tokens) == size,
            f"{where} hangs on a partly filled block {parent.block}",
        )
        require(
            all(child.parent is node for child in node.children), f"{where} has a child of another parent"
        )
    for parent in [*resident.tree.roots(), *nodes]:
        for left, right in pairwise(parent.children):
            require(
                left.tokens <= right.tokens, f"blocks {left.block} and {right.block} stand in the wrong order"
            )
            full_twins = left.tokens == right.tokens and len(left.tokens) == size
            require(not full_twins, f"blocks {left.block} and {right.block} are full of the same tokens")
    require(resident.tree.size == len(nodes), f"{len(nodes)} nodes, counted {resident.tree.size}")
    tokens = sum(len(node.tokens) for node in nodes)
    require(resident.tree.tokens == tokens, f"{tokens} tokens resident, counted {resident.tree.tokens}")


def _check_tables(resident: Residency, tables: Sequence[Table], running: Mapping[BranchKey, int]) -> None:
    size = resident.tree.block_size
    for table in tables:
        where = repr(table)
        require(not table.closed, f"{where} is among the running ones")
        require(
            [node.block for node in table.path] == table.block_ids[: len(table.path)],
            f"{where} left its path",
        )
        held = sum(len(node.tokens) for node in table.path)
        require(held == table.kv_len, f"{where} runs through {held} tokens")
        parent: Node = resident.tree.root(table.space)
        for node in table.path:
            require(
                node.parent is parent, f"{where}: block {node.block} does not follow block {parent.block}"
            )
            require(
                (node.owner is table) == (len(node.tokens) < size),
                f"{where}: block {node.block} has a wrong owner",
            )
            parent = node
    names = Counter(table.key for table in tables if table.key)
    require(names == running, f"running names are {dict(names)}, counted {dict(running)}")


def _check_copies(copies: CopyQueue) -> None:
    targets = {copy.target for copy in copies}
    for copy in copies:
        order = copy.order
        owner = copy.target.owner
        require(
            owner is not None and owner.tail is copy.target, f"{order} goes to a block that is nobody's tail"
        )
        require(copy.source not in targets, f"{order} reads what another copy writes")
        require(copy.source.tokens[: order.tokens] == copy.target.tokens, f"{order} brings other tokens")
        require(
            not copy.target.branches and not copy.target.anonymous,
            f"{order}: its target is pointed at already",
        )


def _check_branches(resident: Residency, nodes: list[Node], running: Mapping[BranchKey, int]) -> None:
    known = set(resident.branches)
    require(
        len(known) <= resident.branches.limit, f"{len(known)} branches, at most {resident.branches.limit}"
    )
    for branch in known:
        node = branch.node
        require(resident.branches.get(branch.key) is branch, f"{branch.key} is known under another name")
        require(
            node.attached and branch in node.branches, f"{branch.key} points at a node that does not know it"
        )
        require(
            1 <= branch.used <= len(node.tokens),
            f"{branch.key} uses {branch.used} of {len(node.tokens)} tokens",
        )
        require(branch.counted == (branch.key not in running), f"{branch.key} is counted={branch.counted}")
    for node in nodes:
        require(node.branches <= known, f"block {node.block} is the tip of an unknown branch")
        require(
            0 <= node.anonymous <= len(node.tokens), f"block {node.block} has more unnamed tokens than tokens"
        )


def _check_references(
    resident: Residency, nodes: list[Node], tables: Sequence[Table], copies: CopyQueue
) -> None:
    held = Counter(node.block for node in nodes)
    require(all(count == 1 for count in held.values()), "two nodes have the same block")
    reserved = Counter(block for table in tables for block in table.reserved)
    require(all(count == 1 for count in reserved.values()), "two tables have reserved the same block")
    require(not held.keys() & reserved.keys(), "a reserved block is a node's too")
    expected = held + reserved
    expected.update(node.block for table in tables for node in table.path)
    expected.update(copy.source.block for copy in copies)
    for block in range(resident.pool.total):
        refs = resident.pool.refs(block)
        require(refs == expected[block], f"block {block} is held {refs} times by {expected[block]} holders")
    idle = sum(resident.is_idle(node) for node in nodes)
    require(idle == resident.idle, f"{idle} idle blocks, counted {resident.idle}")
    for node in nodes:
        parent = node.parent
        if parent and not parent.is_root and resident.is_idle(parent):
            require(resident.is_idle(node), f"block {node.block} is pinned and the one before it is not")
        owned = node.owner is not None
        require(not owned or node.owner in tables, f"block {node.block} is owned by a table that is closed")


def _check_users(resident: Residency, nodes: list[Node], tables: Sequence[Table]) -> None:
    users = Counter(node for table in tables for node in table.path)
    users.update(node for branch in resident.branches if branch.counted for node in branch.node.path())
    for node in nodes:
        require(
            node.users == users[node], f"block {node.block} has {users[node]} users, counted {node.users}"
        )
    shared = sum(count > 1 for count in users.values())
    require(shared == resident.shared, f"{shared} shared blocks, counted {resident.shared}")


def _check_leaves(resident: Residency, nodes: list[Node]) -> None:
    leaves = [node for node in nodes if resident.is_idle_leaf(node)]
    require(
        len(leaves) == len(resident.leaves), f"{len(leaves)} idle leaves, {len(resident.leaves)} are on offer"
    )
    for leaf in leaves:
        where = f"idle leaf of block {leaf.block}"
        require(leaf in resident.leaves, f"{where} is not on offer")
        require(resident.leaves.up_to_date(leaf), f"{where} is on offer under an old rank")
        require(
            leaf.claimed == len(leaf.tokens),
            f"{where} holds {len(leaf.tokens)} tokens, {leaf.claimed} are claimed",
        )
        twin = next((other for other in resident.tree.extensions(leaf) if resident.is_idle(other)), None)
        require(twin is None, f"{where} holds nothing that its sibling {twin and twin.block} does not")
