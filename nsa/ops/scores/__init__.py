"""The choice of blocks in kernels: their scores, and the best of them; the formula is
``nsa.selection``.
"""

from nsa.ops.scores.operator import choose as choose
