"""keyshard: consume Apache Pulsar with more parallelism than partitions.

``import keyshard`` loads neither the Pulsar client nor Spark nor Ray. It imports each public name
at its first use, because every task and worker process imports this package and needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from keyshard.version import VERSION

if TYPE_CHECKING:
    from keyshard.config.connection import Basic, Connection, OAuth2, Token
    from keyshard.config.handlers import HandlerConfig
    from keyshard.config.segments import Segments
    from keyshard.config.settings import Settings, read_settings
    from keyshard.core.dead_letter import DeadLetter
    from keyshard.core.lanes.failure import Reject, RetryLater
    from keyshard.core.lanes.retry_policy import RetryPolicy
    from keyshard.core.message import Message, MessageId, Produce, TakenMessage
    from keyshard.core.position.checkpoint import Checkpoint
    from keyshard.errors import KeyShardError
    from keyshard.redaction import Secret
    from keyshard.sink import KeyShardSink
    from keyshard.source import KeyShardSource
    from keyshard.source_read import SourceRead
    from keyshard.source_stream import SourceBatch, SourceStream

__all__ = [
    "Basic", "Checkpoint", "Connection", "DeadLetter", "HandlerConfig", "KeyShardError",
    "KeyShardSink", "KeyShardSource", "Message", "MessageId", "OAuth2", "Produce", "Reject",
    "RetryLater", "RetryPolicy", "Secret", "Segments", "Settings", "SourceBatch", "SourceRead",
    "SourceStream", "TakenMessage", "Token", "read_settings",
]  # fmt: skip
__version__ = VERSION
_LATER = {
    "Basic": "keyshard.config.connection",
    "Checkpoint": "keyshard.core.position.checkpoint",
    "Connection": "keyshard.config.connection",
    "DeadLetter": "keyshard.core.dead_letter",
    "HandlerConfig": "keyshard.config.handlers",
    "KeyShardError": "keyshard.errors",
    "KeyShardSink": "keyshard.sink",
    "KeyShardSource": "keyshard.source",
    "Message": "keyshard.core.message",
    "MessageId": "keyshard.core.message",
    "OAuth2": "keyshard.config.connection",
    "Produce": "keyshard.core.message",
    "Reject": "keyshard.core.lanes.failure",
    "RetryLater": "keyshard.core.lanes.failure",
    "RetryPolicy": "keyshard.core.lanes.retry_policy",
    "Secret": "keyshard.redaction",
    "Segments": "keyshard.config.segments",
    "Settings": "keyshard.config.settings",
    "SourceBatch": "keyshard.source_stream",
    "SourceRead": "keyshard.source_read",
    "SourceStream": "keyshard.source_stream",
    "TakenMessage": "keyshard.core.message",
    "Token": "keyshard.config.connection",
    "read_settings": "keyshard.config.settings",
}
"""Modules of the public names. Their first use imports them."""


def __getattr__(name: str) -> Any:
    """Import a public name, or the module of errors, at its first use."""
    if name == "errors":
        return import_module("keyshard.errors")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    """Return all names of the module, imported or not."""
    return sorted({*globals(), *__all__})
