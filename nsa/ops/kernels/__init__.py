"""Triton kernels of path `triton`, a file an operation: kernels and their launchers.

Only these modules import triton.

``interval``: attention over one interval of keys a query (compressed and sliding branches).
``scores``: block scores, and the best of them. ``selected``: attention over chosen blocks.
``combine``: the gated sum. The operators that PyTorch sees, and their gradients, are in
``nsa.ops``: ``interval``, ``scoring``, ``selected.triton`` and ``combine``. Logarithms here are to
base 2: exp2 is what the hardware has. perfbench's witness knows the kernels by their names
(TRITON_MARKS).
"""
