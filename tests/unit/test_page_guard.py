"""Requests that the page answers, and those that it refuses."""

from __future__ import annotations

import pytest

from keyshard.errors import ConfigError
from keyshard.observe.page.guard import ADDRESSES_MAX, WRONG_TOKENS_MAX, Guard

TOKEN = "0123456789abcdef-secret"
LOCAL = Guard.of("127.0.0.1", None)
EVERY = "0.0.0.0"  # noqa: S104 - only compared
PUBLIC = Guard.of(EVERY, TOKEN, ["Board.example"])
BEARER = [f"Bearer {TOKEN}"]


def status_of(
    guard: Guard, headers: dict[str, list[str]], method: str = "GET", path: str = "/api/status",
    *, client: str = "192.0.2.1", now_s: float = 0.0,
) -> int:  # fmt: skip
    refusal = guard.refusal(method, path, headers, client=client, now_s=now_s)
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


def guesses(guard: Guard, client: str, now_s: float, count: int = WRONG_TOKENS_MAX) -> list[int]:
    headers = {"host": ["10.0.0.1"], "authorization": ["Bearer wrong"]}
    return [status_of(guard, headers, client=client, now_s=now_s) for _ in range(count)]


def with_token(guard: Guard, client: str, now_s: float, **headers: list[str]) -> int:
    given = {"host": ["10.0.0.1"], "authorization": BEARER} | headers
    return status_of(guard, given, client=client, now_s=now_s)


def test_wrong_tokens_make_their_address_wait_and_no_other() -> None:
    guard = Guard.of(EVERY, TOKEN)
    assert guesses(guard, "192.0.2.1", 0.0) == [401] * WRONG_TOKENS_MAX
    assert guesses(guard, "192.0.2.1", 59.9, 3) == [429] * 3
    assert with_token(guard, "192.0.2.1", 59.9) == 429, "the answer would tell the right token"
    assert with_token(guard, "192.0.2.2", 59.9) == 200
    assert status_of(guard, {"host": ["10.0.0.1"]}, client="192.0.2.1", now_s=1.0) == 401
    assert status_of(guard, {"host": ["10.0.0.1"]}, path="/", client="192.0.2.1", now_s=1.0) == 200
    assert with_token(guard, "192.0.2.1", 60.0) == 200


def test_a_refused_guess_says_when_the_next_is_answered() -> None:
    guard = Guard.of(EVERY, TOKEN)
    guesses(guard, "192.0.2.1", 100.0)
    headers = {"host": ["10.0.0.1"], "authorization": ["Bearer wrong"]}
    refusal = guard.refusal("GET", "/api/status", headers, client="192.0.2.1", now_s=130.5)
    assert refusal is not None
    assert refusal.retry_after_s == 30
    assert refusal.text == "Too many wrong tokens came from this address. Try again in 30 s."


def test_ten_wrong_tokens_in_each_minute_are_answered() -> None:
    guard = Guard.of(EVERY, TOKEN)
    answers = [guesses(guard, "192.0.2.1", float(second), 1)[0] for second in range(600)]
    assert answers.count(401) == 10 * WRONG_TOKENS_MAX


def test_a_request_of_the_wrong_form_tells_nothing_about_its_token() -> None:
    guard = Guard.of(EVERY, TOKEN)
    guesses(guard, "192.0.2.1", 0.0)
    for authorization in (BEARER, ["Bearer wrong"]):
        headers = {"host": ["10.0.0.1"], "authorization": authorization}
        assert status_of(guard, headers, "POST", "/api/ask", client="192.0.2.1") == 415


@pytest.mark.parametrize(
    ("first", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::2:3", True), ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True), ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("", "", True), ("192.0.2.1", "192.0.2.2", False),
    ],
)  # fmt: skip
def test_addresses_that_one_machine_may_have_count_together(
    first: str, other: str, same: bool
) -> None:
    guard = Guard.of(EVERY, TOKEN)
    guesses(guard, first, 0.0)
    assert with_token(guard, other, 1.0) == (429 if same else 200)


def test_the_number_of_counted_addresses_is_limited() -> None:
    guard = Guard.of(EVERY, TOKEN)
    for number in range(ADDRESSES_MAX + 50):
        guesses(guard, f"10.{number // 256}.{number % 256}.1", 0.0, 1)
    assert len(guard.wrong_tokens._at_s) == ADDRESSES_MAX


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
