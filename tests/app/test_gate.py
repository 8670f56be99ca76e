"""Who gets in: keys, cookies, hosts and origins, over HTTP and before a websocket opens."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse

from app.config import Settings
from app.main import create_app
from app.principal import COOKIE
from tests.app.support import ScriptedSessions, backend

HOST = "127.0.0.1:8000"
URL = f"ws://{HOST}/v1/responses"
BEARER = {"authorization": "Bearer secret"}


def client_of(**settings: object) -> TestClient:
    return TestClient(
        create_app(Settings(**settings), backend(ScriptedSessions())), base_url=f"http://{HOST}"
    )  # type: ignore[arg-type]


@pytest.fixture
def keyed() -> Iterator[TestClient]:
    with client_of(api_key=("secret",)) as client:
        yield client


@pytest.fixture
def keyless() -> Iterator[TestClient]:
    with client_of() as client:
        yield client


def upgrade_status(client: TestClient, headers: dict[str, str]) -> int:
    try:
        with client.websocket_connect(URL, headers=headers):
            return 101
    except WebSocketDenialResponse as denied:
        return denied.status_code


def test_everything_but_a_few_paths_needs_the_key(keyed: TestClient) -> None:
    for path in ("/v1/models", "/v1/conversations", "/v1/responses/x", "/v1/anything", "/other"):
        answer = keyed.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/", "/healthz", "/readyz", "/metrics"):
        assert keyed.get(path).status_code in (200, 503)
    assert keyed.get("/v1/models", headers=BEARER).status_code == 200


def test_a_websocket_is_refused_before_it_opens(keyed: TestClient) -> None:
    assert upgrade_status(keyed, {}) == 401
    assert upgrade_status(keyed, {"authorization": "Bearer wrong"}) == 401
    assert upgrade_status(keyed, BEARER) == 101


def test_signing_in_sets_a_cookie_that_scripts_cannot_read(keyed: TestClient) -> None:
    wrong = keyed.post("/login", json={"key": "guess"})
    assert wrong.status_code == 401
    assert "set-cookie" not in wrong.headers
    right = keyed.post("/login", json={"key": "secret"})
    cookie = right.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert keyed.get("/v1/models").status_code == 200
    origin = {"origin": f"http://{HOST}", "cookie": f"{COOKIE}={keyed.cookies[COOKIE]}"}
    assert upgrade_status(keyed, origin) == 101
    keyed.post("/logout")
    assert keyed.get("/v1/models").status_code == 401


def test_a_cookie_alone_opens_no_websocket(keyed: TestClient) -> None:
    keyed.post("/login", json={"key": "secret"})
    assert upgrade_status(keyed, {"cookie": f"{COOKIE}={keyed.cookies[COOKIE]}"}) == 403


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (f"http://{HOST}", 101),
        ("http://127.0.0.1", 403),
        ("http://127.0.0.1:8001", 403),
        (f"https://{HOST}", 101),
        ("https://evil.example", 403),
        (f"http://{HOST}.evil.example", 403),
        (f"http://evil.example/{HOST}", 403),
        (f"http://user@{HOST}", 403),
        ("null", 403),
        ("", 403),
        ("file://", 403),
        ("http://127.0.0.1:port", 403),
    ],
)
def test_pages_of_other_origins_are_kept_out(keyless: TestClient, origin: str, status: int) -> None:
    assert upgrade_status(keyless, {"origin": origin}) == status
    posted = keyless.post("/v1/responses", json={"input": "x"}, headers={"origin": origin})
    assert posted.status_code == (403 if status == 403 else 200)


def test_programs_send_no_origin_and_may_connect(keyless: TestClient) -> None:
    assert upgrade_status(keyless, {}) == 101


def test_behind_tls_a_plain_origin_is_another_one() -> None:
    app = create_app(Settings(allowed_hosts=("chat.example",)), backend(ScriptedSessions()))
    with TestClient(app, base_url="https://chat.example") as client:
        for origin, status in (("https://chat.example", 200), ("http://chat.example", 403)):
            assert (
                client.post("/v1/responses", json={"input": "x"}, headers={"origin": origin}).status_code
                == status
            )


def test_allowed_origins_are_compared_whole() -> None:
    with client_of(allowed_origins=("https://app.example",)) as client:
        for origin, status in (
            ("https://app.example", 101),
            ("https://app.example:443", 101),
            ("http://app.example", 403),
            ("https://app.example.evil", 403),
            ("https://xapp.example", 403),
        ):
            assert upgrade_status(client, {"origin": origin}) == status, origin
        preflight = client.options(
            "/v1/responses",
            headers={"origin": "https://app.example", "access-control-request-method": "POST"},
        )
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "", "[", "a:b:c"]
)
def test_other_host_names_are_not_answered(keyless: TestClient, host: str) -> None:
    answer = keyless.get("/v1/models", headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    assert upgrade_status(keyless, {"host": host}) == 403
    # Probes and scrapers come by address.
    assert keyless.get("/metrics", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:9", "[::1]:8000", "LOCALHOST"])
def test_this_machine_is_always_answered(keyless: TestClient, host: str) -> None:
    assert keyless.get("/v1/models", headers={"host": host}).status_code == 200
