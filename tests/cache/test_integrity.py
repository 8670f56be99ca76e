"""Every kind of damage to the books is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache.branches import BranchKey
from cache.errors import IntegrityError
from cache.manager import KVCacheManager
from tests.cache.test_tables import cache, run, words


def busy() -> KVCacheManager:
    """A cache with idle, shared and running blocks, a reservation and a waiting copy."""
    simulated = cache()
    simulated.turn("ann", words(10), "chat")
    simulated.turn("ann", [*words(8), 99, 98], "other")
    simulated.turn("ann", words(6, 200), "idle")
    table = run(simulated, [*words(8), 99, 98, 97], "other")
    simulated.manager.reserve(table, 6)
    simulated.open("ann", words(10), "third")
    simulated.check()
    return simulated.manager


def node(manager: KVCacheManager, name: str):  # type: ignore[no-untyped-def]
    branch = manager._resident.branches.get(BranchKey("ann", name))
    assert branch is not None
    return branch.node


DAMAGE: list[tuple[str, Callable[[KVCacheManager], object]]] = [
    ("held", lambda m: m._resident.pool.share(node(m, "idle").block)),
    ("held", lambda m: m._resident.pool.take()),
    ("free list twice", lambda m: m._resident.pool._free.append(m._resident.pool._free[0])),
    ("idle blocks", lambda m: setattr(m._resident, "idle", 9)),
    ("shared blocks", lambda m: setattr(m._resident, "shared", 9)),
    ("users", lambda m: setattr(node(m, "idle"), "users", 2)),
    ("tokens resident", lambda m: setattr(m._resident.tree, "tokens", 9)),
    ("nodes, counted", lambda m: setattr(m._resident.tree, "size", 99)),
    ("holds 0 tokens", lambda m: setattr(node(m, "idle"), "tokens", [])),
    ("claimed|uses", lambda m: m._resident.tree.extend(node(m, "idle"), [1])),
    ("uses", lambda m: m._resident.tree.shorten(node(m, "idle"), 1)),
    ("wrong order", lambda m: node(m, "chat").parent.children.reverse()),
    ("starts at", lambda m: setattr(node(m, "idle"), "start", 5)),
    ("does not know it", lambda m: node(m, "idle").branches.clear()),
    ("unknown branch", lambda m: m._resident.branches._branches.popitem(last=False)),
    (
        "counted=False",
        lambda m: setattr(m._resident.branches.get(BranchKey("ann", "idle")), "counted", False),
    ),
    ("not on offer|are on offer", lambda m: m._resident.leaves.withdraw(node(m, "idle"))),
    ("old rank", lambda m: setattr(node(m, "idle"), "last_used", 10_000)),
    ("same block", lambda m: setattr(node(m, "idle"), "block", node(m, "chat").block)),
    ("more unnamed", lambda m: setattr(node(m, "idle"), "anonymous", 9)),
    ("running names", lambda m: m._running.update([BranchKey("ann", "nobody")])),
    ("left its path", lambda m: next(iter(m._tables)).block_ids.reverse()),
    ("runs through", lambda m: setattr(next(iter(m._tables)), "kv_len", 3)),
    ("wrong owner", lambda m: setattr(next(iter(m._tables)).tail, "owner", None)),
    ("among the running", lambda m: setattr(next(iter(m._tables)), "closed", True)),
    ("held", lambda m: m._copies.take()),
]


@pytest.mark.parametrize(("text", "damage"), DAMAGE, ids=[f"{number}" for number in range(len(DAMAGE))])
def test_damage_is_found(text: str, damage: Callable[[KVCacheManager], object]) -> None:
    manager = busy()
    manager.check_integrity()
    damage(manager)
    with pytest.raises(IntegrityError, match=text):
        manager.check_integrity()
