"""What the Triton kernels of several operations share: helpers of what launches them (``common``),
the one door to a launch (``launch``) and products of rows (``products``).

Only these modules and those of each operation that hold kernels (``kernels``, ``*_kernels`` and
others that .importlinter names) import triton. Logarithms in them are to base 2: exp2 is what the
hardware has. perfbench's witness knows the kernels by their names (TRITON_MARKS).
"""
