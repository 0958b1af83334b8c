"""Path `triton`: block-sparse kernels, forward and backward; ``attend`` is their operator.

``forward`` and ``backward`` choose between three ways: block by block (``forward_kernels``,
``backward_kernels``), over the ``block_lists`` of queries that chose each; by ``dense_tiles`` of
neighbouring queries, in short sequences; query by query (``by_row``), where there are few.
"""

from nsa.ops.selected.triton.operator import attend as attend
