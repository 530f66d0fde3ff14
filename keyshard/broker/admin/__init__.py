"""The admin REST interface of Pulsar."""
