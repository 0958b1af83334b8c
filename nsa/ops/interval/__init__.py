"""Attention over one interval of keys a query: the compressed and the sliding branch.

``compressed`` and ``sliding`` are their formulas in PyTorch; ``attend`` is the operator of
``forward_kernels`` and ``backward``, which serve both.
"""

from nsa.ops.interval.operator import attend as attend
