"""Proves the step that is timed, the very callable, against a plain twin before it is timed."""
