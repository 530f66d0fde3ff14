"""Handlers that actors import."""

from __future__ import annotations

from keyshard import Message


def key_and_number(message: Message) -> tuple[str | None, int]:
    """Its key, and the number that is its value."""
    return message.routing_key, int(message.value)
