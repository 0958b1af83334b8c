"""Compiles nsa's kernels for cards that are not here, in processes of its own."""

from perfbench.worker.codegen.builds import ARCHITECTURES, BUILDS, COMPILER
