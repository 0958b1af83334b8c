"""Certifies the gate on stored samples, and estimates the variance between machine starts."""
