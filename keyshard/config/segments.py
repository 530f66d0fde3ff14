"""How a bounded read gets the entries of closed ledgers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from keyshard.config.connection import check_file
from keyshard.core.option_checks import check_bool, check_choice, check_folder, check_integer
from keyshard.errors import ConfigError
from keyshard.redaction import redacted, shown

BROKER: Final = "broker"
AUTO: Final = "auto"
BOOKIES: Final = "bookies"
_ADDRESS = re.compile(r"[^\s:]+:\d{1,5}|\[[^\s\]]+\]:\d{1,5}")
BYTES_IN_FLIGHT = 32 * 1024 * 1024
"""Default of ``bytes_in_flight_max``: most entries that a reader receives ahead, bytes. Readers of
the broker hold them by their mean size."""
ADDRESSES_MAX = 10_000
"""Most bookies with an address of their own."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The sources of closed ledgers, and the connections to bookies."""

    source: Literal["broker", "auto", "bookies"] = BROKER
    """``broker``: by the broker. ``auto``: from bookies, and by the broker where that is not
    possible. ``bookies``: as ``auto``, but it is an error if no bookie returns an entry."""
    bookies_map: Mapping[str, str] = field(default_factory=dict)
    """Address ``host:port`` of each bookie that is not reached under its name, by that name."""
    bookies_trust_certs_file_path: str | os.PathLike[str] | None = None
    """PEM file of the authorities of bookies. With it, bookies are read over TLS."""
    bookies_certificate_file_path: str | os.PathLike[str] | None = None
    """PEM file of the client certificate for bookies. Needs ``bookies_key_file_path``."""
    bookies_key_file_path: str | os.PathLike[str] | None = None
    """PEM file of the key of that certificate, without a passphrase."""
    bookies_hostname_verification: bool = True
    """Whether the certificate of a bookie must name the host of its address."""
    offloads: str | None = None
    """Path or fsspec URL of the store to which the brokers offload ledgers, such as
    ``s3://bucket``: offloaded ledgers are read from there, for any ``source``. With ``source``
    ``bookies``, it is an error if the store does not return an entry. ``None``: by the broker."""

    def __post_init__(self) -> None:
        check_choice("segments", self.source, BROKER, AUTO, BOOKIES)
        given = self.bookies_map
        if not isinstance(given, Mapping) or len(given) > ADDRESSES_MAX or not all(
            isinstance(name, str) and isinstance(address, str) and _ADDRESS.fullmatch(address)
            for name, address in given.items()
        ):  # fmt: skip
            raise ConfigError(
                f"bookies_map is {shown(given)}.",
                "Write an address host:port for each bookie by its name, such as "
                "{'bookie-0:3181': '10.0.0.1:3181'}.",
            )
        if given and self.source == BROKER:
            raise ConfigError(
                "bookies_map is given, but segments is 'broker'.", "Set segments to 'auto'."
            )
        if self.offloads is not None:
            check_folder("offloads", self.offloads)
        self._check_tls()

    def __repr__(self) -> str:
        """Return the fields, without credentials in the URL of the store."""
        shown_fields = {one.name: getattr(self, one.name) for one in fields(self)}
        shown_fields["offloads"] = None if self.offloads is None else redacted(self.offloads)
        return f"Segments({', '.join(f'{name}={value!r}' for name, value in shown_fields.items())})"

    @property
    def by_broker_only(self) -> bool:
        """Whether the broker is asked for all ledgers."""
        return self.source == BROKER and self.offloads is None

    def _check_tls(self) -> None:
        check_bool("bookies_hostname_verification", self.bookies_hostname_verification)
        given = [name for name in _FILES if getattr(self, name) is not None]
        for name in given:
            object.__setattr__(self, name, check_file(name, getattr(self, name)))
        if not (given or self.bookies_hostname_verification):
            raise ConfigError(
                "bookies_hostname_verification is given, but bookies_trust_certs_file_path is not.",
                "Name the PEM file of the authorities of bookies, so that they are read over TLS.",
            )
        trusted, *pair = _FILES
        missing = [name for name in pair if name not in given]
        if len(missing) == 1:
            raise ConfigError(
                f"{missing[0]} is missing. A certificate needs its key.", "Give both."
            )
        if given and trusted not in given:
            raise ConfigError(
                f"{given[0]} is given, but {trusted} is not.",
                "Name the PEM file of the authorities of bookies, so that they are read over TLS.",
            )
        if given and self.source == BROKER:
            raise ConfigError(
                f"{given[0]} is given, but segments is 'broker'.", "Set segments to 'auto'."
            )


_FILES = (
    "bookies_trust_certs_file_path",
    "bookies_certificate_file_path",
    "bookies_key_file_path",
)


def check_bytes_in_flight(given: object, name: str = "bytes_in_flight_max") -> None:
    """Check the limit of the entries that a read receives ahead.

    Raises:
        ConfigError: It is not a number of bytes from 1 MiB to 1 GiB.
    """
    check_integer(name, given, 1024 * 1024, 1024 * 1024 * 1024)


def check_segments(given: object) -> None:
    """Check the argument ``segments`` of a read.

    Raises:
        ConfigError: It is neither :class:`Segments` nor ``None``.
    """
    if not isinstance(given, Segments | None):
        raise ConfigError(f"segments is {shown(given)}.", "Give Segments('auto') or None.")
