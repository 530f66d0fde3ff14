"""What a broker refuses, as one sentence: who is not accepted, and who may not do what."""

from __future__ import annotations

from collections.abc import Sequence

from keyshard.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerUnavailableError,
    KeyShardError,
)


def not_accepted(where: str, who: str, said: str) -> AuthenticationError:
    """The broker does not take somebody for who they say they are."""
    return AuthenticationError(
        f"{where} does not accept {who}: {said.rstrip('.')}. Check the authentication of this "
        "connection: a token has to be signed for this cluster and must not have expired."
    )


def lacks(who: str, permission: str, what: str, said: str = "") -> AuthorizationError:
    """Somebody who is known may not do something; the broker may say more."""
    words = f" (the broker says: {said.rstrip('.')})" if said else ""
    granting = (
        f" Grant it: pulsar-admin topics grant-permission {what} --role ROLE --actions {permission}"
        if permission in ("consume", "produce")
        else ""
    )
    return AuthorizationError(
        f"{who[0].upper()}{who[1:]} lacks the permission {permission!r} on {what}{words}."
        f"{granting}",
        permission=permission,
    )


def no_host_answers(service_url: str, failed: Sequence[tuple[str, KeyShardError]]) -> KeyShardError:
    """The error of a service URL none of whose hosts lets this connection in.

    Args:
        service_url: The URL.
        failed: Each host, and what it did.
    """
    if len(failed) == 1:
        return failed[0][1]
    for _, error in failed:
        if not error.retriable:
            return error
    told = " ".join(f"{host}: {error.message}" for host, error in failed)
    return BrokerUnavailableError(
        f"None of the {len(failed)} hosts of {service_url} lets this connection in. {told}"
    )
