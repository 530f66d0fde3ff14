"""The dead-letter topic of a source: keeping letters, reading them, letting them out."""
