"""Tools to test a consumer: a handler run until nothing is left, a real broker on this machine,
recorded histories, and checkers.
"""

from __future__ import annotations

from keyshard.testing.idle import run_until_idle

__all__ = ["run_until_idle"]
