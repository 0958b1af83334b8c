"""The gated sum of three branches as one function of autograd, whose backward goes through all of
them at once; `one_node` does so for a whole call.
"""

from nsa.ops.joint_backward import one_node as one_node
from nsa.ops.joint_backward.operator import KV as KV
from nsa.ops.joint_backward.operator import Joined as Joined
from nsa.ops.joint_backward.operator import arguments as arguments
from nsa.ops.joint_backward.operator import attend as attend
