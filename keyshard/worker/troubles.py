"""Logs refusals of brokers, brokers that do not answer, and the end of both."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from keyshard.core.position.entry import TopicPartition
from keyshard.core.refusals import words_of

NAMED_AFTER_S = 2.0
"""Time for which there is a trouble before it is named, seconds: most pass within it."""
REMIND_S = 60.0
"""Time after which it is named again, seconds."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Trouble:
    since_s: float
    words: str
    named_s: float | None = None


class Troubles:
    """Those of one source. Time is an argument, from any monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[TopicPartition, _Trouble] = {}

    def look(self, now_s: float, troubles: Mapping[TopicPartition, str]) -> None:
        """Log changes since the last call; to be called every second."""
        for where in [where for where in self._known if where not in troubles]:
            if self._known.pop(where).named_s is not None:
                _log.warning("the broker serves %s again", where)
        due: dict[str, list[TopicPartition]] = {}
        for where, text in sorted(troubles.items()):
            words = words_of(text)
            known = self._known.setdefault(where, _Trouble(now_s, words))
            if known.words != words and known.named_s is not None:
                known.named_s = None
            known.words = words
            waits = now_s - known.since_s < NAMED_AFTER_S
            if not waits and (known.named_s is None or now_s - known.named_s >= REMIND_S):
                known.named_s = now_s
                due.setdefault(words.replace(str(where), ""), []).append(where)
        for found in due.values():
            more = f" and {len(found) - 1} more topic partitions" if len(found) > 1 else ""
            _log.warning("%s%s is not received from: %s", found[0], more, troubles[found[0]])
