"""Apache Pulsar, through pulsar-client and the admin REST interface."""
