"""keyshard: consume Apache Pulsar with more parallelism than partitions.

``import keyshard`` loads neither the Pulsar client nor Spark nor Ray.
"""

from __future__ import annotations

from keyshard.core.checkpoint import Checkpoint
from keyshard.errors import KeyShardError
from keyshard.source import KeyShardSource, SourceBatch, SourceStream

__all__ = ["Checkpoint", "KeyShardError", "KeyShardSource", "SourceBatch", "SourceStream"]
__version__ = "0.1.0"
