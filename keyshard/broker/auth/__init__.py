"""Credentials of a connection, TLS, and the errors of both."""
