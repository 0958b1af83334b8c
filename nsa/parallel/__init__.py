"""One sequence over several processes: `ContextParallel`."""

from nsa.parallel.context import ContextParallel as ContextParallel

__all__ = ["ContextParallel"]
