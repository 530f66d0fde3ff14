"""What a broker refuses, as one sentence: who is not accepted, and who may not do what."""

from __future__ import annotations

from keyshard.errors import AuthenticationError, AuthorizationError


def not_accepted(where: str, who: str, said: str) -> AuthenticationError:
    """The broker does not take somebody for who they say they are."""
    return AuthenticationError(
        f"{where} does not accept {who}: {said.rstrip('.')}. Check the authentication of this "
        "connection: a token has to be signed for this cluster and must not have expired."
    )


def lacks(who: str, permission: str, what: str) -> AuthorizationError:
    """Somebody who is known may not do something."""
    granting = (
        f" Grant it: pulsar-admin topics grant-permission {what} --role ROLE --actions {permission}"
        if permission in ("consume", "produce")
        else ""
    )
    return AuthorizationError(
        f"{who[0].upper()}{who[1:]} lacks the permission {permission!r} on {what}.{granting}",
        permission=permission,
    )
