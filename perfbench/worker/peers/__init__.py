"""Peers in a measuring process: importing one, calling it, and adapters of the built-in ones."""
