"""Credentials in fsspec URLs stay out of errors, whatever a file system says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keyshard.errors import ConfigError
from keyshard.handlers.checkpoint_store import CheckpointStore
from keyshard.publishing.staging import Staging
from keyshard.reading.ledger_index import LedgerIndex


@pytest.mark.parametrize("secret", ["hidden-key", "hidden/key@more"])
@pytest.mark.parametrize(
    ("option", "opens"),
    [("checkpoint", CheckpointStore), ("staging", Staging), ("ledger_index", LedgerIndex)],
)
def test_an_error_of_a_file_system_does_not_show_the_password(
    option: str, opens: Callable[[str], object], secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_url: str) -> None:
        raise OSError(f"no bucket ann:{secret}@bucket")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(
        ConfigError, match=f"{option} is .*no bucket .*\nRemedy: Write an fsspec URL"
    ) as error:
        opens(f"github://ann:{secret}@bucket/x.json")
    assert secret not in str(error.value)
