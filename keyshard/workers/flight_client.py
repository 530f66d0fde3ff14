"""Makes the Flight clients by which keyshard's processes ask one another."""

from __future__ import annotations

from pyarrow import flight

_DIRECT = ("grpc.enable_http_proxy", 0)


def flight_client(endpoint: str, **options: int) -> flight.FlightClient:
    """Connect to a server of keyshard, never through a proxy of the environment.

    By default, gRPC sends even requests to this machine through ``http_proxy`` or ``grpc_proxy``.

    Args:
        endpoint: Address of the server: ``grpc://host:port``.
        options: Further options of gRPC, without their prefix ``grpc.``.
    """
    own = [(f"grpc.{name}", value) for name, value in options.items()]
    return flight.connect(endpoint, generic_options=[_DIRECT, *own])
