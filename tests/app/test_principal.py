import pytest
from starlette.requests import HTTPConnection

from app.principal import COOKIE, COOKIE_SECONDS, LOCAL_OWNER, Keys, owner_of


def connection(**headers: str) -> HTTPConnection:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return HTTPConnection({"type": "http", "headers": raw})


def test_without_keys_everyone_is_the_local_owner() -> None:
    principal = Keys([]).principal(connection(authorization="Bearer whatever"))
    assert principal is not None
    assert principal.owner == LOCAL_OWNER


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer no", "Basic secret", "secret", "Bearer secret x"]
)
def test_a_wrong_key_is_nobody(header: str) -> None:
    assert Keys(["secret"]).principal(connection(authorization=header)) is None


def test_each_key_is_an_owner_whose_name_tells_nothing() -> None:
    keys = Keys(["one", "two"])
    owners = set()
    for key in ("one", "two"):
        principal = keys.principal(connection(authorization=f"Bearer {key}"))
        assert principal is not None
        assert not principal.by_cookie
        owners.add(principal.owner)
    assert owners == {owner_of("one"), owner_of("two")}
    assert not any("one" in owner or "two" in owner for owner in owners)


def test_a_cookie_stands_for_its_key_until_it_ends() -> None:
    now = 1000.0
    keys = Keys(["secret"], clock=lambda: now)
    cookie = keys.login("secret")
    assert cookie is not None
    assert "secret" not in cookie
    principal = keys.principal(connection(cookie=f"{COOKIE}={cookie}"))
    assert principal is not None
    assert (principal.owner, principal.by_cookie) == (owner_of("secret"), True)
    now += COOKIE_SECONDS
    assert keys.principal(connection(cookie=f"{COOKIE}={cookie}")) is None


def test_a_wrong_key_gets_no_cookie() -> None:
    assert Keys(["secret"]).login("guess") is None


@pytest.mark.parametrize("change", ["9", "x", "longer.signature", "9" * 5000 + ".a", "٣.a", "-1.a", ""])
def test_a_forged_cookie_is_nobody(change: str) -> None:
    keys = Keys(["secret"])
    cookie = keys.login("secret") or ""
    expires, _, signature = cookie.partition(".")
    for forged in (
        change,
        f"{int(expires) + 1}.{signature}",
        f"{expires}.{signature[:-1]}",
        f"{cookie}{change}x",
    ):
        assert keys.principal(connection(cookie=f"{COOKIE}={forged}".encode().decode("latin-1"))) is None


def test_a_cookie_of_a_key_that_was_taken_away_is_nobody() -> None:
    cookie = Keys(["old"]).login("old")
    assert Keys(["new"]).principal(connection(cookie=f"{COOKIE}={cookie}")) is None
