"""Proves, before anything is timed, that the measured path computes what it should."""
