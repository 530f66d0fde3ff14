"""The live page: what runs on this machine, in a browser; see ``docs/page.md``."""
