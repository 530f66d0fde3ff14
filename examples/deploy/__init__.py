"""Files that run a service in a container, by compose, in Kubernetes and by systemd."""
