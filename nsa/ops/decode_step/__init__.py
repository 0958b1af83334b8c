"""All that one layer's attention does in a step of one token a row, positions on the device: RoPE,
gates, cache writes, compression of a finished block, three branches and their gated sum, in five
launches.
"""

from nsa.ops.decode_step.operator import attend as attend
from nsa.ops.decode_step.shapes import Buffers as Buffers
from nsa.ops.decode_step.shapes import Projected as Projected
from nsa.ops.decode_step.shapes import RowRoom as RowRoom
from nsa.ops.decode_step.shapes import StepGeometry as StepGeometry
from nsa.ops.decode_step.shapes import StepPages as StepPages
