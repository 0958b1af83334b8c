"""What is published: the README as a package index shows it, and the workflow that does it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.test_pages import links

ROOT = Path(__file__).parents[1]
METADATA = """
import sys, setuptools.build_meta as build
print(build.prepare_metadata_for_build_wheel(sys.argv[1]))
"""
GITHUB = {
    "GITHUB_REPOSITORY": "owner/name",
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_SHA": "c0ffee",
}


def metadata(folder: Path, env: dict[str, str]) -> Message:
    """METADATA as a build with these variables writes it."""
    source, out = folder / "source", folder / "out"
    for name in ("nsa", "perfbench", "matrices", "configs"):  # as little as a build looks at
        (source / name).mkdir(parents=True)
        (source / name / "__init__.py").touch()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out.mkdir()
    subprocess.run(
        [sys.executable, "-c", METADATA, str(out)],
        cwd=source,
        env={"PATH": "/usr/bin:/bin", **env},
        check=True,
        capture_output=True,
    )
    (file,) = out.glob("*.dist-info/METADATA")
    return message_from_string(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("env", [{}, GITHUB], ids=["unknown repository", "GitHub's runner"])
def test_no_link_of_the_published_readme_is_relative(env: dict[str, str], tmp_path: Path) -> None:
    """FAULTS.md, "installed from the wheel": README.md links to its neighbours, which no
    package index has.
    """
    assert len(links((ROOT / "README.md").read_text(encoding="utf-8"))) > 15
    found = metadata(tmp_path, env)
    text = found.get_payload()
    assert isinstance(text, str) and links(text) == []
    assert found["Description-Content-Type"] == "text/markdown"
    assert "](" not in re.sub(r"\]\([a-z]+://|\]\(#", "", text)
    assert "[arXiv 2502.11089](https://arxiv.org/abs/2502.11089)" in text


def test_links_lead_to_the_files_of_the_commit(tmp_path: Path) -> None:
    found = metadata(tmp_path, GITHUB)
    text = str(found.get_payload())
    home = "https://github.com/owner/name"
    assert f"]({home}/raw/c0ffee/docs/lengths.png)" in text
    targets = re.findall(rf"\]\({home}/(?:blob|raw)/c0ffee/([^)]+)\)", text)
    assert len(targets) == len(links((ROOT / "README.md").read_text(encoding="utf-8")))
    assert all((ROOT / target).exists() for target in targets)
    urls = dict(one.split(", ") for one in found.get_all("Project-URL") or [])
    assert urls["Homepage"] == home and urls["Issues"] == f"{home}/issues" and len(urls) == 4


def test_metadata_say_what_it_is(tmp_path: Path) -> None:
    found = metadata(tmp_path, {})
    classifiers = found.get_all("Classifier") or []
    assert {"Framework :: Pytest", "Typing :: Typed"} <= set(classifiers)
    assert found["License-Expression"] == "Apache-2.0" and found["Author"]
    tested = ci()["jobs"]["nox"]["strategy"]["matrix"]["python"]
    stated = [one.rpartition(" ")[2] for one in classifiers if re.search(r":: 3\.\d+$", one)]
    assert stated == tested  # a version that no job runs is not claimed


def ci(name: str = "ci") -> dict[str, Any]:
    text = (ROOT / f".github/workflows/{name}.yml").read_text(encoding="utf-8")
    found = YAML(typ="safe").load(text)
    assert isinstance(found, dict)
    return found


def test_a_tag_publishes_what_was_built_and_tried() -> None:
    """No token is stored, and the job that may publish builds nothing itself."""
    release = ci("release")
    assert release["on"] == {"push": {"tags": ["v*"]}}
    assert release["permissions"] == {"contents": "read"}
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    assert "permissions" not in build and publish["needs"] == "build"
    assert publish["environment"] == "pypi" and publish["permissions"]["id-token"] == "write"
    assert not any("run" in step for step in publish["steps"])
    assert "secrets." not in str(release) and "password" not in str(release)
    runs = "\n".join(step.get("run", "") for step in build["steps"])
    assert "nox -s dist" in runs and 'test "v$version" = "$GITHUB_REF_NAME"' in runs
    made = {step["with"]["path"] for step in build["steps"] if "upload" in step.get("uses", "")}
    assert made == {"dist/", "build/sbom.cdx.json"}
    (attest,) = (step for step in publish["steps"] if "attest-sbom" in step["uses"])
    assert attest["with"]["sbom-path"] == "sbom/sbom.cdx.json"


def test_the_page_of_the_runs_is_built_for_every_change_and_published_from_main() -> None:
    """The job that may publish runs nothing of a change; no event reaches a shell."""
    pages = ci("pages")
    assert pages["permissions"] == {"contents": "read"} and "pull_request" in pages["on"]
    build, publish = pages["jobs"]["build"], pages["jobs"]["publish"]
    assert "permissions" not in build and publish["needs"] == "build"
    assert "refs/heads/main" in publish["if"] and "vars.PAGES" in publish["if"]
    assert not any("run" in step for step in publish["steps"])
    runs = "\n".join(step.get("run", "") for step in build["steps"])
    assert "perfbench history add --all reports/evidence" in runs and "perfbench site" in runs
    assert "${{" not in runs and "secrets." not in str(pages)
    assert all(job["timeout-minutes"] <= 15 for job in (build, publish))


def test_the_session_makes_what_the_workflow_takes() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    (session,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "dist"
    )
    words = {node.value for node in ast.walk(session) if isinstance(node, ast.Constant)}
    assert {"dist", "build", "sbom.cdx.json", "twine", "cyclonedx-py"} <= words
