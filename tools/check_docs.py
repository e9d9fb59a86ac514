"""Check the documents: relative links lead to files and headings; docs/KERNELS.md lists what kernels.def lists.

Prints each defect with file and line; exits with 1 if there is any. Of web addresses only the form is checked.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$")
KERNEL_ROW = re.compile(r"^\|\s*`(\w+)`\s*\|")
KERNEL_DEF = re.compile(r"^\s*FFPA_KERNEL\((\w+),")


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a Markdown file outside fenced code."""
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def anchors(path: Path) -> set[str]:
    """Fragments that GitHub gives a file's headings."""
    headings = (HEADING.match(line) for _, line in text_lines(path))
    return {re.sub(r"[^\w\- ]", "", match[1].lower()).replace(" ", "-") for match in headings if match}


def link_defect(path: Path, target: str) -> str | None:
    url = urlparse(target)
    if url.scheme in ("http", "https"):
        return None if url.netloc else "an address without a host"
    if url.scheme:
        return None
    file = (path.parent / url.path).resolve() if url.path else path
    if not file.exists():
        return "no such file"
    if url.fragment and file.suffix == ".md" and url.fragment not in anchors(file):
        return "no such heading"
    return None


def check_links(documents: list[Path]) -> Iterator[str]:
    for path in documents:
        for number, line in text_lines(path):
            for match in LINK.finditer(line):
                defect = link_defect(path, match[1])
                if defect:
                    yield f"{path.relative_to(ROOT)}:{number}: {match[1]}: {defect}"


def check_kernels(index: Path, table: Path) -> Iterator[str]:
    documented = [m[1] for _, line in text_lines(index) if (m := KERNEL_ROW.match(line))]
    defined = [m[1] for line in table.read_text().splitlines() if (m := KERNEL_DEF.match(line))]
    for name in defined:
        if documented.count(name) != 1:
            yield f"{index.relative_to(ROOT)}: {name} has {documented.count(name)} rows, must have 1"
    for name in documented:
        if name not in defined:
            yield f"{index.relative_to(ROOT)}: {name} is not in {table.relative_to(ROOT)}"


def main() -> int:
    documents = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    defects = [*check_links(documents), *check_kernels(ROOT / "docs/KERNELS.md", ROOT / "src/dispatch/kernels.def")]
    for defect in defects:
        print(defect)
    print(f"documents: {len(documents)} read, {len(defects)} defects")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
