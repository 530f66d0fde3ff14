"""The command ``keyshard``, run in the process of the test."""

from __future__ import annotations

import pytest

from keyshard.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, output and errors of a command; anything but an orderly end fails the test."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    output = capsys.readouterr()
    code = caught.value.code
    return (code if isinstance(code, int) else 0), output.out, output.err
