"""Check the built site without a network: python scripts/check_site.py FOLDER.

Every link leads to a file, and to an anchor that is in it; nothing is loaded from elsewhere when a page is viewed.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}


class Links(HTMLParser):
    """The anchors of a page, where it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[tuple[str, bool]] = []  # and whether it is loaded with the page
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """The parser calls this for each tag."""
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.targets.append((value, (tag, name) in LOADED))


def problems(site: Path) -> tuple[list[str], int, int]:
    """What is wrong, and how many pages and links were looked at."""
    pages = {path.resolve(): Links(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found, count = [], 0
    for page, links in pages.items():
        for target, loaded in links.targets:
            parts = urlsplit(target)
            if parts.scheme in ("data", "mailto", "javascript"):
                continue
            count += 1
            if parts.scheme or parts.netloc:
                if loaded:
                    found.append(f"{page.name} loads {target}")
                continue
            path = unquote(parts.path)
            file = (site / path[1:] if path.startswith("/") else page.parent / path).resolve() if path else page
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                found.append(f"{page.name} links to {target}, which is not there")
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors:
                found.append(f"{page.name} links to {target}, which has no such anchor")
    return found, len(pages), count


if __name__ == "__main__":
    wrong, pages, links = problems(Path(sys.argv[1]))
    print(*wrong, f"{pages} pages, {links} links, {len(wrong)} problems", sep="\n")
    sys.exit(bool(wrong))
