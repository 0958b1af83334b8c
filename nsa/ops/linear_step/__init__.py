"""The linear layers of a decode step, whose few rows leave a GPU waiting for weights: with the norm
before them and what follows them, in one launch.
"""

from nsa.ops.linear_step.operator import apply as apply
