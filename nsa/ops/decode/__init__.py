"""Attention of few queries, a decode step: the kernels to which the launchers of ``interval`` and
``selected`` hand such calls. The callers register the operators.
"""
