"""Requests that the page answers, and those that it refuses."""

from __future__ import annotations

import pytest

from keyshard.errors import ConfigError
from keyshard.observe.page.guard import Guard

TOKEN = "0123456789abcdef-secret"
LOCAL = Guard.of("127.0.0.1", None)
EVERY = "0.0.0.0"  # noqa: S104 - only compared
PUBLIC = Guard.of(EVERY, TOKEN, ["Board.example"])
BEARER = [f"Bearer {TOKEN}"]


def status_of(
    guard: Guard, headers: dict[str, list[str]], method: str = "GET", path: str = "/api/status"
) -> int:
    refusal = guard.refusal(method, path, headers)
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8650", 200), ("localhost:8650", 200), ("LOCALHOST", 200), ("[::1]:8650", 200),
        ("127.8.8.8", 200),
        ("evil.example:8650", 421), ("localhost.evil.example", 421), ("10.0.0.1", 421),
        ("user@localhost", 421), ("localhost:port", 421), ("", 421), ("[::1", 421),
        ("localhost/x", 421), ("127.0.0.1.", 421),
    ],
)  # fmt: skip
def test_a_loopback_page_is_served_for_loopback_hosts_only(host: str, status: int) -> None:
    assert status_of(LOCAL, {"host": [host]}) == status
    assert status_of(LOCAL, {"host": [host]}, path="/") == status, "also the files"


def test_a_request_has_one_host() -> None:
    assert status_of(LOCAL, {}) == 421
    assert status_of(LOCAL, {"host": ["localhost", "localhost"]}) == 421


@pytest.mark.parametrize(
    ("host", "status"),
    [("10.0.0.1:8650", 200), ("board.example", 200), ("other.example", 421), ("[fe80::1]", 200)],
)
def test_a_public_page_is_served_for_addresses_and_named_hosts(host: str, status: int) -> None:
    assert status_of(PUBLIC, {"host": [host], "authorization": BEARER}) == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": ["http://localhost:1"]}, 200),
        ({"origin": ["https://localhost:1"]}, 200),
        ({"origin": ["http://localhost:2"]}, 403),
        ({"origin": ["http://evil.example"]}, 403),
        ({"origin": ["null"]}, 403),
        ({"origin": ["http://localhost:1", "http://evil.example"]}, 403),
        ({"sec-fetch-site": ["same-origin"]}, 200),
        ({"sec-fetch-site": ["none"]}, 200),
        ({"sec-fetch-site": ["cross-site"]}, 403),
        ({"sec-fetch-site": ["same-site"]}, 403),
    ],
)
def test_other_sites_get_no_data(headers: dict[str, list[str]], status: int) -> None:
    assert status_of(LOCAL, {"host": ["localhost:1"]} | headers) == status


@pytest.mark.parametrize(
    ("method", "path", "kind", "status"),
    [
        ("GET", "/", [], 200), ("HEAD", "/page.js", [], 200), ("POST", "/", [], 405),
        ("PUT", "/api/ask", [], 405), ("OPTIONS", "/api/ask", [], 405),
        ("POST", "/api/ask", ["application/json"], 200), ("POST", "/api/ask", [], 415),
        ("POST", "/api/ask", ["text/plain"], 415),
        ("POST", "/api/ask", ["application/x-www-form-urlencoded"], 415),
    ],
)  # fmt: skip
def test_wrong_methods_and_content_types_are_refused(
    method: str, path: str, kind: list[str], status: int
) -> None:
    headers = {"host": ["localhost"]} | ({"content-type": kind} if kind else {})
    assert status_of(LOCAL, headers, method, path) == status


@pytest.mark.parametrize(
    "values",
    [[], ["Bearer wrong"], [TOKEN], ["Bearer "], BEARER * 2, [f"bearer {TOKEN}"], ["Bearer \xff"]],
)
def test_data_needs_the_token_where_there_is_one(values: list[str]) -> None:
    headers = {"host": ["10.0.0.1"]} | ({"authorization": values} if values else {})
    assert status_of(PUBLIC, headers) == 401
    assert status_of(PUBLIC, headers, path="/page.js") == 200, "files have no data"


@pytest.mark.parametrize("host", [EVERY, "::", "10.1.2.3", "board.example"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        Guard.of(host, None)
    assert Guard.of(host, TOKEN).token == TOKEN


@pytest.mark.parametrize("token", ["", "short", "x" * 15, "x" * 20 + "\n", "ü" * 20])
def test_a_token_that_is_easy_or_unfit_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError, match="at least 16 printable ASCII") as caught:
        Guard.of("127.0.0.1", token)
    assert not token or token not in caught.value.message
