"""keyshard: consume Apache Pulsar with more parallelism than partitions.

``import keyshard`` loads neither the Pulsar client nor Spark nor Ray.
"""

from __future__ import annotations

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
from keyshard.version import VERSION

__all__ = [
    "Basic", "Checkpoint", "Connection", "DeadLetter", "HandlerConfig", "KeyShardError",
    "KeyShardSink", "KeyShardSource", "Message", "MessageId", "OAuth2", "Produce", "Reject",
    "RetryLater", "RetryPolicy", "Secret", "Segments", "Settings", "SourceBatch", "SourceRead",
    "SourceStream", "TakenMessage", "Token", "read_settings",
]  # fmt: skip
__version__ = VERSION
