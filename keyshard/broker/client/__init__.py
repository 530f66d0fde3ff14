"""The broker port on pulsar-client."""
