"""What is published says what is true: versions, addresses, pins, workflows."""

import importlib.util
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins():
    lines = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {name.lower().replace("_", "-"): version for name, _, version in lines}


def test_the_version_has_one_source():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).is_file()


def test_every_dependency_and_tool_of_tests_and_site_is_pinned():
    extras = PROJECT["project"]["optional-dependencies"]
    for entry in [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["docs"]]:
        name = re.split(r"[\[>=]", entry)[0].lower().replace("_", "-")
        assert name in pins(), entry


def test_pre_commit_uses_the_pinned_versions():
    for hook in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]:
        for entry in hook.get("additional_dependencies", []):
            name, _, version = entry.partition("==")
            assert pins()[name] == version


def test_the_source_distribution_has_what_tests_need():
    listed = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"/tests", "/src", "/docs", "/scripts", "/constraints.txt", "/mkdocs.yml"} <= set(listed)
    assert [entry for entry in listed if not (ROOT / entry.lstrip("/")).exists()] == []


def test_workflows_and_forms_are_yaml_with_what_they_need():
    for file in (ROOT / ".github").rglob("*.yml"):
        assert yaml.safe_load(file.read_text())["name"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    versions = workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]
    known = [text.rpartition(" ")[2] for text in PROJECT["project"]["classifiers"] if "Python :: 3." in text]
    assert versions == known
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "twine check" in release
    assert "id-token: write" in release


def test_a_release_has_absolute_addresses():
    addresses = script("addresses")
    text = addresses.absolute((ROOT / "README.md").read_text(), "owner/name", "v1")
    assert "https://raw.githubusercontent.com/owner/name/v1/docs/images/demo.png" in text
    assert not re.search(r"\]\((?!https://)", text)
    urls = tomllib.loads(addresses.with_urls((ROOT / "pyproject.toml").read_text(), "owner/name"))["project"]["urls"]
    assert urls["Source"] == "https://github.com/owner/name"


def test_minimal_versions_are_those_of_the_project():
    found = script("minimal_versions").minimal_versions((ROOT / "pyproject.toml").read_text())
    assert "torch==2.4" in found
    assert len(found) == len(PROJECT["project"]["dependencies"])


def test_broken_links_and_loaded_addresses_of_a_site_are_found(tmp_path):
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="#top"></a><a href="other.html#no"></a><a href="gone.html"></a>'
        '<script src="https://example.org/x.js"></script><a href="https://example.org"></a>'
    )
    (tmp_path / "other.html").write_text("<p></p>")
    wrong, pages, links = script("check_site").problems(tmp_path)
    assert (len(wrong), pages, links) == (3, 2, 5)
