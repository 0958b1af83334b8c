"""Attention of few queries, a decode step: the kernels to which the launchers of ``interval`` and
``selected`` hand such calls. Without an operator of its own, since the callers have theirs.
"""
