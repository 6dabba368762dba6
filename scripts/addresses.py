"""Give a release its addresses, which are known only where it is released: python scripts/addresses.py OWNER/NAME TAG.

In README.md, images and links to files of the repository become absolute, so that a package index can show them.
pyproject.toml gets `[project.urls]`. Both files are changed in place, in the workflow's copy, and never committed.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def absolute(readme: str, repository: str, tag: str) -> str:
    """The README with absolute addresses.

    >>> absolute("![a](docs/a.png) and [b](docs/b.md#c)", "me/it", "v1")
    '![a](https://raw.githubusercontent.com/me/it/v1/docs/a.png) and [b](https://github.com/me/it/blob/v1/docs/b.md#c)'
    """

    def address(match: re.Match[str]) -> str:
        image, text, path = match.groups()
        host = f"https://raw.githubusercontent.com/{repository}/{tag}" if image else ""
        return f"{image}[{text}]({host or f'https://github.com/{repository}/blob/{tag}'}/{path})"

    return LINK.sub(address, readme)


def with_urls(project: str, repository: str) -> str:
    """pyproject.toml with the addresses of the repository."""
    where = f"https://github.com/{repository}"
    urls = {"Source": where, "Issues": f"{where}/issues", "Changelog": f"{where}/blob/main/CHANGELOG.md"}
    return project + "\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items())


if __name__ == "__main__":
    _, repository, tag = sys.argv
    readme, project = ROOT / "README.md", ROOT / "pyproject.toml"
    readme.write_text(absolute(readme.read_text(), repository, tag))
    project.write_text(with_urls(project.read_text(), repository))
