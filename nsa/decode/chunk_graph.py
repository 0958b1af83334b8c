"""ChunkGraph: a chunk of prefill of a TinyLM or a DenseLM as one CUDA graph.

B batch, T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nsa.decode.cache import NSACache
from nsa.decode.dense_cache import DenseCache
from nsa.decode.graph import StepGraph, Steppable


class ChunkGraph(StepGraph):
    """Prefill in chunks from one CUDA graph: ids int64 [B, tokens] -> logits [B, tokens,
    vocab_size] in the weights' dtype, of a chunk that continues each row.

    As `DecodeGraph`, for chunks of ``tokens`` a row: the host, which an eager chunk of some
    thousand tokens waits for, launches one graph. Every call takes a whole chunk; close the graph
    and call the model for what is left of a prompt. `forget_all` begins other sequences with the
    same graph. The caches are those of ``model.new_cache``; errors as of DecodeGraph, and
    ValueError for ``tokens`` that is not a whole number from 1 to max_len. A DenseLM of kind
    dense_flash is a RouteError: FA-2 takes no positions that are on the device.
    """

    kind, wanted = "ChunkGraph", "a whole chunk of each row"

    def __init__(
        self, model: Steppable, cache: Sequence[NSACache | DenseCache], tokens: int
    ) -> None:
        super().__init__(model, cache, tokens)

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Append ids int64 [B, tokens] and return the logits [B, tokens, V] of what follows each.

        The result, what it waits for and the errors are those of `DecodeGraph.__call__`.
        """
        return self.replayed(ids_BT)

    def forget_all(self) -> None:
        """Empty every row, for other sequences. ValueError where the rows held tokens when the
        graph was made.
        """
        self.steps.forget_all()
