"""Commands that create topics, as error texts name them."""

from __future__ import annotations

import pytest

from keyshard.core.creation import create_or_correct

TOPIC = "persistent://public/default/orders"


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        (TOPIC, f"topics create {TOPIC}"),
        (f"{TOPIC}-partition-2", f"topics create-missed-partitions {TOPIC}"),
        (f"{TOPIC}-partition-of-us", f"topics create {TOPIC}-partition-of-us"),
        (f"{TOPIC} $(x)", f"topics create '{TOPIC} $(x)'"),
    ],
)
def test_the_remedy_for_a_missing_topic_names_the_command(missing: str, command: str) -> None:
    assert create_or_correct(missing) == (
        f"Create the topic (pulsar-admin {command}), or correct its name."
    )
