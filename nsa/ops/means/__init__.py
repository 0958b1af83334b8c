"""Means of the compressed branch, K and V together; the formula is ``nsa.compression``."""

from nsa.ops.means.operator import means as means
