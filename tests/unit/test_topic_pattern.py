"""The topics that a pattern means."""

from __future__ import annotations

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from keyshard.core.topic_pattern import TopicPattern
from keyshard.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("orders-.*", "persistent://public/default/orders-.*"),
        (" a|b ", "persistent://public/default/a|b"),
        ("acme/shop/.*", "persistent://acme/shop/.*"),
        ("persistent://acme/shop/x", "persistent://acme/shop/x"),
        (" topic://acme/shop/x.*", "topic://acme/shop/x.*"),
    ],
)
def test_the_short_forms_are_completed(text: str, full: str) -> None:
    assert TopicPattern.parse(text).text == full
    assert TopicPattern.parse(full) == TopicPattern.parse(text)


@pytest.mark.parametrize(
    ("regex", "literal"),
    [
        ("orders", "orders"), ("orders-.*", "orders-"), ("ab*", "a"), ("ab?", "a"),
        ("ab{0,2}", "a"), ("ab+", "ab"), ("a*", ""), ("orders|bills", ""), ("(?i)orders", ""),
        (r"a\.b", "a"), ("a[b|c]", ""), (".*", ""), ("^a", ""), ("é", ""),
    ],
)  # fmt: skip
def test_the_literal_beginning_of_a_pattern_is_known(regex: str, literal: str) -> None:
    found = TopicPattern.parse(f"acme/shop/{regex}").prefix
    assert found == f"persistent://acme/shop/{literal}"


@given(st.from_regex(r"[a-c.*+?{}()|\\^$\[\]0-2-]{1,8}", fullmatch=True), st.data())
def test_each_name_that_matches_has_the_prefix(regex: str, data: st.DataObject) -> None:
    try:
        pattern = TopicPattern.parse(f"acme/shop/{regex}")
    except ConfigError:
        reject()
    name = data.draw(st.from_regex(pattern.regex, fullmatch=True))
    topic = f"persistent://acme/shop/{name}"
    assert topic.startswith(pattern.prefix) or not pattern.matches(topic)


@pytest.mark.parametrize(
    ("pattern", "topic", "expected"),
    [
        ("orders", "persistent://public/default/orders", True),
        ("order", "persistent://public/default/orders", False),
        ("rders", "persistent://public/default/orders", False),
        ("a|orders", "persistent://public/default/orders", True),
        ("a|orders", "persistent://public/default/abc", False),
        (".*", "persistent://public/other/orders", False),
        (".*", "persistent://other/default/orders", False),
        (".*", "non-persistent://public/default/orders", False),
        (".*", "persistent://public/default/__change_events", False),
        (".*", "persistent://public/default/orders-partition-3", False),
        ("acme/my.shop/t", "persistent://acme/myxshop/t", False),
        ("acme/my.shop/t", "persistent://acme/my.shop/t", True),
        (".*", "topic://public/default/orders", False),
        ("topic://public/default/.*", "persistent://public/default/orders", False),
        ("topic://public/default/.*", "topic://public/default/orders", True),
        ("topic://public/default/orde", "topic://public/default/orders", False),
        ("topic://public/default/.*", "topic://public/other/orders", False),
        ("topic://public/default/.*", "segment://public/default/orders/0000-ffff-0", False),
        ("topic://public/default/.*", "topic://public/default/orders-DLQ", False),
        ("topic://public/default/.*", "topic://public/default/__orders", False),
        ("topic://public/default/.*", "topic://public/default/a b", False),
        ("topic://public/default/.*", "topic://public/default/a/b", False),
        ("topic://public/default/.*", "topic://public/default/é", False),
        ("topic://public/default/.*", "topic://public/default/a:b=c(d)", True),
    ],
)
def test_a_pattern_matches_whole_names_of_one_namespace(
    pattern: str, topic: str, expected: bool
) -> None:
    assert TopicPattern.parse(pattern).matches(topic) is expected


@pytest.mark.parametrize(
    "text",
    ["topic://orders", "topic://public/default/", "topic://public/orders", "segment://a/b/.*",
     "topics://public/default/.*", "topic://"],
)  # fmt: skip
def test_a_pattern_of_no_known_form_is_refused_with_all_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="topics_pattern is") as caught:
        TopicPattern.parse(text)
    assert "For scalable topics, write 'topic://tenant/namespace/regex'" in caught.value.remedy


def test_the_prefix_of_a_pattern_of_scalable_topics_is_that_of_their_names() -> None:
    assert TopicPattern.parse("topic://acme/shop/or.*").prefix == "topic://acme/shop/or"


@pytest.mark.parametrize("regex", ["orders-[", "[[", "[[a-z]+", "a[b||c]", "a{99999999999}"])
def test_an_invalid_regular_expression_is_refused(regex: str) -> None:
    """Python warned on standard error about a nested character class, as other languages have."""
    for _ in range(2):
        with pytest.raises(ConfigError, match="not a regular expression") as caught:
            TopicPattern.parse(regex)
        assert caught.value.__suppress_context__
