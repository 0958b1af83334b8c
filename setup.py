"""What pyproject.toml cannot say: matrices/ and configs/ are shipped as data of `perfbench` and
`nsa.train`, from one copy; and the README's links lead to the repository that builds, since a
package index shows it without its neighbours.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).with_name("README.md")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z][a-z0-9+.-]*:|#)([^)\s]+)\)")


def repository() -> str:
    """The address of the repository, '' outside of GitHub's runner: nobody else knows it.

    A build reads its environment itself: the packages that may are not installed yet.
    """
    name = os.environ.get("GITHUB_REPOSITORY", "")
    return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}" if name else ""


def readme(home: str, revision: str) -> str:
    """README.md with absolute links, at the commit that is built; without a repository the words
    of a link alone, and no picture.
    """

    def absolute(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if not home:
            return "" if picture else words
        return f"{picture}[{words}]({home}/{'raw' if picture else 'blob'}/{revision}/{target})"

    parts = CODE.split(README.read_text(encoding="utf-8"))
    return "".join(part if i % 2 else LINK.sub(absolute, part) for i, part in enumerate(parts))


def urls(home: str) -> dict[str, str]:
    pages = {
        "Homepage": "",
        "Documentation": "/tree/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: home + page for name, page in pages.items()} if home else {}


setup(
    long_description=readme(repository(), os.environ.get("GITHUB_SHA", "main")),
    long_description_content_type="text/markdown",
    project_urls=urls(repository()),
    packages=[
        *find_packages(include=["nsa", "nsa.*", "perfbench", "perfbench.*"]),
        "nsa.train.configs",
        "perfbench.matrices",
    ],
    package_dir={"nsa.train.configs": "configs", "perfbench.matrices": "matrices"},
    package_data={
        "nsa": ["py.typed", "**/*.json"],
        "perfbench": ["py.typed", "**/*.j2", "**/*.yaml", "**/*.css", "**/*.js"],
        "nsa.train.configs": ["*.yaml"],
        "perfbench.matrices": ["*.yaml"],
    },
)
