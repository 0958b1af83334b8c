"""Measures two versions in turns, in pairs of fresh processes."""
