"""Implementations, a folder an operation: formula, operator (what PyTorch sees, with its gradient)
and Triton kernels. Nothing here decides anything: ``nsa.dispatch`` is the only caller.

``interval``: the compressed and the sliding branch. ``scores``: the choice of blocks.
``selected``: attention over chosen blocks, a path a file. ``means``, ``learned_phi``,
``gated_sum``, ``joint_backward``: before, after and behind the branches. ``decode``: kernels of few
queries.
"""
