"""Tables of runs: one small representation, and how it looks on the screen, in Markdown, in LaTeX and as CSV."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isfinite, isnan
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group as Stack
from rich.table import Table as Screen
from rich.text import Text

Value = str | float | None
NOTHING = "-"  # what is shown for None and NaN
LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "[": "{[}", "]": "{]}", "*": "{*}",  # after \\ these are arguments
}  # fmt: skip
MARKDOWN = {"&": "&amp;", "<": "&lt;", ">": "&gt;", **{mark: f"\\{mark}" for mark in "\\`*_[]|#~$"}}
FORMULA = ("=", "+", "-", "@")  # what spreadsheets would execute


@dataclass(frozen=True)
class Column:
    """A column of text, or of numbers."""

    heading: str
    form: str | None = None  # how numbers are shown, such as ".2f"; text if None
    best: Literal["min", "max"] | None = None  # which number is bold, in each group of rows
    over: str = ""  # a heading above it, shared with its neighbours

    @property
    def title(self) -> str:
        """Both headings."""
        return f"{self.over}: {self.heading}" if self.over else self.heading

    def text(self, value: Value) -> str:
        """As it is shown."""
        if value is None or (isinstance(value, float) and isnan(value)):
            return NOTHING
        return value if isinstance(value, str) else format(value, self.form or "")


@dataclass(frozen=True)
class Table:
    r"""Columns, rows and notes.

    Example:
        >>> columns = (Column("attack"), Column("norm", ".1f", best="min"))
        >>> print(to_markdown(Table("norms", "Norms", columns, (("fmn", 2.04), ("alma_prox", 1.96)))))
        **Norms**
        <BLANKLINE>
        | attack     |    norm |
        | :--------- | ------: |
        | fmn        | **2.0** |
        | alma\_prox | **2.0** |
    """

    name: str  # of its files
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()
    keys: int = 0  # rows that agree in so many leading columns are a group
    apart: frozenset[tuple[Value, ...]] = frozenset()  # groups of which no row is best: they are about other images

    def said(self) -> "Table":
        """The table without columns that say nothing in any row, for where there is little room."""
        shown = [k for k, c in enumerate(self.columns) if any(c.text(row[k]) != NOTHING for row in self.rows)]
        rows = tuple(tuple(row[k] for k in shown) for row in self.rows)
        return replace(self, columns=tuple(self.columns[k] for k in shown), rows=rows)

    def groups(self) -> Iterator[tuple[tuple[Value, ...], list[int]]]:
        """Groups of rows: what they agree in, and which they are."""
        for key, numbers in groupby(range(len(self.rows)), key=lambda row: self.rows[row][: self.keys]):
            yield key, list(numbers)

    def bold(self) -> set[tuple[int, int]]:
        """Row and column of what is best; numbers that look the same are equally good."""
        found = set()
        for key, numbers in self.groups():
            for place, column in enumerate(self.columns):
                values = {row: self.rows[row][place] for row in numbers}
                known = {row: v for row, v in values.items() if isinstance(v, int | float) and isfinite(v)}
                if not column.best or len(known) < 2 or key in self.apart:
                    continue
                best = (min if column.best == "min" else max)(known.values())
                found |= {(row, place) for row, v in known.items() if column.text(v) == column.text(best)}
        return found


def to_screen(table: Table) -> Stack:
    """For a terminal: a block for each group of rows and of columns, so that it stays narrow."""
    blocks: list[Text | Screen] = [Text(table.title, style="bold")]
    bold = table.bold()
    numbered = list(enumerate(table.columns))[table.keys :]
    lead = [place for place, column in numbered if column.form is None and not column.over]
    for key, numbers in table.groups():
        for over, places in _spans([(place, column) for place, column in numbered if place not in lead]):
            title = ", ".join(str(part) for part in (*key, over) if part)
            blocks.append(_block(table, numbers, [*lead, *places], title, bold))
    return Stack(*blocks, *(Text(note, style="dim") for note in table.notes))


def _block(
    table: Table, numbers: Sequence[int], places: Sequence[int], title: str, bold: set[tuple[int, int]]
) -> Screen:
    screen = Screen(box=SIMPLE_HEAD, pad_edge=False, title=Text(title) if title else None, title_justify="left")
    for place in places:
        numeric = table.columns[place].form is not None
        screen.add_column(Text(table.columns[place].heading), justify="right" if numeric else "left", no_wrap=numeric)
    for row in numbers:
        cells = [(place, _plain(table.columns[place].text(table.rows[row][place]))) for place in places]
        screen.add_row(*(Text(text, style="bold" if (row, place) in bold else "") for place, text in cells))
    return screen


def to_markdown(table: Table) -> str:
    """With aligned columns; names are shown as they are, whatever is in them."""
    heads = [markdown_text(column.title) for column in table.columns]
    cells = _rendered(table, markdown_text, "**{}**")
    widths = [max(3, *(len(line[place]) for line in [heads, *cells])) for place in range(len(heads))]
    sides = ["><"[column.form is None] for column in table.columns]
    rule = [f"{'-' * (width - 1)}:" if side == ">" else f":{'-' * (width - 1)}" for width, side in zip(widths, sides)]
    lines = [[f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths)] for line in [heads, *cells]]
    body = "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])
    return "\n\n".join([f"**{markdown_text(table.title)}**", body, *map(markdown_text, table.notes)])


def to_latex(table: Table) -> str:
    r"""A `tabular` in the style of booktabs: `\usepackage{booktabs}` and UTF-8 are all it needs."""
    cells = _rendered(table, _latex, r"\textbf{{{}}}")
    layout = "".join("l" if column.form is None else "r" for column in table.columns)
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", *_latex_heads(table)]
    for _, numbers in table.groups():
        lines.append(r"\midrule")
        lines += [_latex_line(cells[row], table.keys if row != numbers[0] else 0) for row in numbers]
    lines += [r"\bottomrule", r"\end{tabular}"]
    caption = " ".join(_latex(text) for text in (f"{table.title}.", *table.notes))
    head = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\label{{tab:{table.name}}}"]
    return "\n".join([*head, *lines, r"\end{table}", ""])


def _latex_line(cells: Sequence[str], hidden: int) -> str:
    """Without the first cells, which the line before has too."""
    return " & ".join(["" if place < hidden else cell for place, cell in enumerate(cells)]) + r" \\"


def _latex_heads(table: Table) -> list[str]:
    heads = _latex_line([_latex(column.heading) for column in table.columns], 0)
    if not any(column.over for column in table.columns):
        return [heads]
    above, rules = [], []
    for over, places in _spans(enumerate(table.columns)):
        above.append(rf"\multicolumn{{{len(places)}}}{{c}}{{{_latex(over)}}}")
        rules += [rf"\cmidrule(lr){{{places[0] + 1}-{places[-1] + 1}}}"] if over else []
    return [" & ".join(above) + r" \\", " ".join(rules), heads]


def to_csv(table: Table) -> str:
    """Unrounded numbers for other programs; text that a spreadsheet would execute gets an apostrophe."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([_csv(column.title) for column in table.columns])
    writer.writerows([[_csv(value) for value in row] for row in table.rows])
    return file.getvalue()


WRITERS: dict[str, Callable[[Table], str]] = {"md": to_markdown, "tex": to_latex, "csv": to_csv}  # by ending


def _rendered(table: Table, escape: Callable[[str], str], strong: str) -> list[list[str]]:
    bold = table.bold()
    lines = []
    for number, row in enumerate(table.rows):
        cells = [escape(column.text(value)) for column, value in zip(table.columns, row)]
        lines.append([strong.format(cell) if (number, place) in bold else cell for place, cell in enumerate(cells)])
    return lines


def _spans(columns: Iterable[tuple[int, Column]]) -> list[tuple[str, list[int]]]:
    """Numbered columns: neighbours with the same heading above them."""
    return [(over, [place for place, _ in some]) for over, some in groupby(columns, key=lambda pair: pair[1].over)]


def _plain(text: str) -> str:
    """On one line, without control characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)


def _replaced(text: str, table: dict[str, str]) -> str:
    return "".join(table.get(character, character) for character in _plain(text))


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _replaced(text, MARKDOWN)


def _latex(text: str) -> str:
    return _replaced(text, LATEX)


def _csv(value: Value) -> str | float:
    if value is None or (isinstance(value, float) and isnan(value)):
        return ""
    if not isinstance(value, str):
        return value
    text = _plain(value)
    return f"'{text}" if text.lstrip(" ").startswith(FORMULA) else text
