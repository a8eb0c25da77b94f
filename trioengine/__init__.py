"""TrioEngine: LLM inference and serving built on Trio."""

__version__ = "0.1.0"
