"""What pyproject.toml cannot say: matrices/ is shipped as data of `perfbench`, from one copy."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["nsa", "nsa.*", "perfbench", "perfbench.*"]),
        "perfbench.matrices",
    ],
    package_dir={"perfbench.matrices": "matrices"},
    package_data={
        "nsa": ["py.typed"],
        "perfbench": ["py.typed", "**/*.j2", "**/*.yaml"],
        "perfbench.matrices": ["*.yaml"],
    },
)
