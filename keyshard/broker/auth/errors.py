"""Errors for rejected credentials and missing permissions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keyshard.core.position.entry import namespace_of
from keyshard.core.topic_segments import SCALABLE, SEGMENT
from keyshard.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerUnavailableError,
    KeyShardError,
)

_ROLE = re.compile(r"role '([^']+)'")

EITHER = "consume or produce"
"""Permissions one of which a look-up needs."""
_ACTIONS = {
    "consume": "consume",
    "produce": "produce,consume",
    EITHER: "produce,consume (a source needs only consume)",
}
"""Actions to grant for a missing permission. A grant replaces the older ones of the role, and sinks
also read."""


def not_accepted(where: str, who: str, said: str) -> AuthenticationError:
    """Create the error for a broker that rejects the credentials."""
    return AuthenticationError(
        f"{where} rejects {who}: {said.rstrip('.')}.",
        "Check the authentication of this connection. A token must be signed for this cluster, "
        "and must not be expired.",
    )


def lacks(who: str, permission: str, what: str, said: str = "") -> AuthorizationError:
    """Create the error for a missing permission, with the broker's text if there is one."""
    words = f" (the broker says: {said.rstrip('.')})" if said else ""
    granting = ""
    if permission in _ACTIONS:
        role = _ROLE.match(who)
        target = f"topics grant-permission {what}"
        if what.startswith((SCALABLE, SEGMENT)):
            # pulsar-admin 5.0 has no command for permissions of a scalable topic.
            target = f"namespaces grant-permission {namespace_of(what)}"
        granting = (
            f"Grant it: pulsar-admin {target} --role {role[1] if role else 'ROLE'} "
            f"--actions {_ACTIONS[permission]}"
        )
    return AuthorizationError(
        f"{who[0].upper()}{who[1:]} lacks the permission {permission!r} on {what}{words}.",
        granting,
        permission=permission,
    )


def no_host_answers(service_url: str, failed: Sequence[tuple[str, KeyShardError]]) -> KeyShardError:
    """Create the error for a service URL none of whose hosts accepts this connection.

    Args:
        service_url: The URL.
        failed: Each host, and its error.
    """
    return _none_answers("hosts", service_url, failed)


def no_ip_answers(host: str, failed: Sequence[tuple[str, KeyShardError]]) -> KeyShardError:
    """Create the error for a host none of whose IP addresses accepts this connection.

    Args:
        host: The host.
        failed: Each IP address, and its error.
    """
    if len({error.message for _, error in failed}) == 1:
        return failed[0][1]
    return _none_answers("IP addresses", host, failed)


def _none_answers(kind: str, of: str, failed: Sequence[tuple[str, KeyShardError]]) -> KeyShardError:
    if len(failed) == 1:
        return failed[0][1]
    for _, error in failed:
        if not error.retriable:
            return error
    reasons = " ".join(f"{one}: {error.problem}" for one, error in failed)
    remedies = " ".join(dict.fromkeys(error.remedy for _, error in failed))
    return BrokerUnavailableError(
        f"None of the {len(failed)} {kind} of {of} accepts the connection. {reasons}", remedies
    )
