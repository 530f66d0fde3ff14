"""Which keyshard this is; what runs on several machines compares it."""

VERSION = "0.1.0"
