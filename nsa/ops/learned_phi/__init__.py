"""A learned phi of the compressed branch, K and V together; the formula is ``nsa.compression``."""

from nsa.ops.learned_phi.operator import linear as linear
from nsa.ops.learned_phi.operator import mlp as mlp
