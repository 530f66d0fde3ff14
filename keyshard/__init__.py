"""keyshard: consume Apache Pulsar with more parallelism than partitions.

``import keyshard`` loads neither the Pulsar client nor Spark nor Ray.
"""

from __future__ import annotations

from keyshard.connection import Basic, Connection, OAuth2, Token
from keyshard.core.checkpoint import Checkpoint
from keyshard.core.failure import Reject, RetryLater
from keyshard.core.message import Message, MessageId
from keyshard.core.retrying import RetryPolicy
from keyshard.errors import KeyShardError
from keyshard.handlers.config import HandlerConfig
from keyshard.redaction import Secret
from keyshard.source import KeyShardSource, SourceBatch, SourceStream

__all__ = [
    "Basic", "Checkpoint", "Connection", "HandlerConfig", "KeyShardError", "KeyShardSource",
    "Message", "MessageId", "OAuth2", "Reject", "RetryLater", "RetryPolicy", "Secret",
    "SourceBatch", "SourceStream", "Token",
]  # fmt: skip
__version__ = "0.1.0"
