"""The gated sum of three branches as one function of autograd, whose backward goes through all of
them at once.
"""

from nsa.ops.joint_backward.operator import KV as KV
from nsa.ops.joint_backward.operator import attend as attend
