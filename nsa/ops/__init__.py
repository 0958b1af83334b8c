"""Implementations. Nothing here decides anything: ``nsa.dispatch`` is the only caller."""
