"""Path `triton`: block-sparse kernels, forward and backward; ``attend`` is their operator.

``kernels`` goes block by block, over the ``block_lists`` of queries that chose each; ``by_row``
goes query by query, where there are few.
"""

from nsa.ops.selected.triton.operator import attend as attend
