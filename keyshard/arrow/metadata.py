"""What producers may write into metadata that no column can hold.

Any client may set any 64-bit number as a time, and bytes that are no text as a key or a property.
Such a message is delivered like every other. A time that is none is null, and its number stays in
the message as the property ``__eventTime`` or ``__publishTime``; bytes that are no text come as the
text that is nearest.
"""

from __future__ import annotations

from collections.abc import Sequence

TIME_MS_MAX = 253_370_764_800_000
"""The year 9999, in milliseconds since the epoch: a time zone might carry a time from then on
beyond what ``datetime`` holds. Micro- and nanoseconds of our days lie far above."""
EVENT_TIME, PUBLISH_TIME = "__eventTime", "__publishTime"
"""Properties that keep the number of a time that is none."""
NOT_TEXT = "__notText"
"""Property in place of all those of a message that has one that is no text: a client tells only the
first of them."""


def is_time(milliseconds: int) -> bool:
    """Whether a number is a time; 0 is "unset"."""
    return 0 <= milliseconds < TIME_MS_MAX


def readable_times(
    event_ms: Sequence[int], publish_ms: Sequence[int], properties: Sequence[dict[str, str]]
) -> tuple[list[int], list[int], list[dict[str, str]], list[bool]]:
    """Times of messages without those that are none, which become 0 and a property.

    Args:
        event_ms: Event time of each message.
        publish_ms: Publish time of each message.
        properties: Properties of each message; a property of the user's own stays.

    Returns:
        (event times, publish times, properties, whether each message had a time that is none).
    """
    events, published = list(event_ms), list(publish_ms)
    kept = list(properties)
    wrong = [False] * len(kept)
    for name, times in (EVENT_TIME, events), (PUBLISH_TIME, published):
        for row, time_ms in enumerate(times):
            if not is_time(time_ms):
                kept[row] = {name: str(time_ms)} | kept[row]
                times[row] = 0
                wrong[row] = True
    return events, published, kept, wrong
