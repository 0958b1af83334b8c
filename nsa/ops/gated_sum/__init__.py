"""The gated sum of the branches (arXiv 2502.11089, Eq. 5): formula, and operator of ``kernels``."""

from nsa.ops.gated_sum.operator import fused_gated_sum as fused_gated_sum
from nsa.ops.gated_sum.operator import gated_sum as gated_sum
