"""Fixtures that several test files share."""

from tests.perfbench.ab_bench import bench, template

__all__ = ["bench", "template"]
