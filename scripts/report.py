# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks have in common: a table in Markdown, and the place of their figures in docs/performance.md."""
from __future__ import annotations

from pathlib import Path
from typing import List

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "performance.md"


def table(lines: List[List[str]], left: int = 1) -> str:
    """The first line holds the heads; so many columns are set to the left, the others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    made = ["| " + " | ".join(cell.ljust(width) if number < left else cell.rjust(width)
                              for number, (cell, width) in enumerate(zip(line, widths))) + " |" for line in lines]
    made.insert(1, "| " + " | ".join("-" * width if number < left else "-" * (width - 1) + ":"
                                     for number, width in enumerate(widths)) + " |")
    return "\n".join(made)


def record(what: str, text: str) -> None:
    """Put the text between the marks "WHAT: begin" and "WHAT: end" of the document."""
    begin, end = f"<!-- {what}: begin -->", f"<!-- {what}: end -->"
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(begin, 1)
    after = rest.split(end, 1)[1]
    DOCUMENT.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
    print(f"\nwritten: {DOCUMENT}")
