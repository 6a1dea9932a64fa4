"""Tables from rows, for a terminal and for a page. The writer of all benchmarks.

A row is a dictionary; a column says which of its values it shows, and how.

>>> columns = [Column("step", "name"), Column("ms", "ms", number)]
>>> steps = Table(columns, [{"name": "a", "ms": 94.09}])
>>> print(steps.markdown())
| step | ms |
|---|---|
| a | 94.1 |

Each benchmark has a function tables(results) that returns name -> Table. Numbers have one style:
three digits of a measured value, 1.14x for a ratio (above 1 is faster), 98% for a share of a limit.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

# ---- how values are shown -----------------------------------------------------------------------


def number(value: float) -> str:
    """Three digits, from 100 to 1,000 four: 1,234, 104.2, 94.1, 5.70, 0.119."""
    if not value:
        return "0"
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(int(abs(value) < 1000), decimals)}f}"


def tenths(value: float) -> str:
    """94.1, 0.3, -0.1."""
    # Without a -0.0.
    return f"{round(value, 1) + 0.0:,.1f}"


def ratio(value: float) -> str:
    """How many times as fast as the peer: 1.14x."""
    return f"{value:.2f}x"


def share(value: float) -> str:
    """Of a limit, or of a rate: 98%."""
    return f"{value:.0%}"


def integer(value: int) -> str:
    return f"{value:,}"


def thousands(value: float) -> str:
    """174K."""
    return f"{value / 1e3:,.0f}K"


def scientific(value: float) -> str:
    """3e-08."""
    return f"{value:.0e}"


# ---- tables -------------------------------------------------------------------------------------


class Column(NamedTuple):
    """head: its heading. key: of the value in a row. form: value -> text."""

    head: str
    key: str
    form: Callable[[Any], str] = str


class Table:
    """Headings and cells. A value that is missing or None is an empty cell.

    Columns without a value are left out."""

    def __init__(self, columns: list[Column], rows: list[dict]):
        used = [c for c in columns if any(row.get(c.key) is not None for row in rows)]
        self.head = [column.head for column in used]
        self.rows = [
            ["" if row.get(c.key) is None else c.form(row[c.key]) for c in used] for row in rows
        ]

    def only(self, heads: list[str]) -> "Table":
        """The first column and those with these headings."""
        if unknown := set(heads) - set(self.head):
            raise ValueError(f"no columns {sorted(unknown)}; expected some of {self.head}")
        return self._with([0, *(self.head.index(head) for head in heads)])

    def _with(self, indices: list[int]) -> "Table":
        table = Table([], [])
        table.head = [self.head[i] for i in indices]
        table.rows = [[row[i] for i in indices] for row in self.rows]
        return table

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        text = [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        ]
        return "\n".join([text[0], text[1].replace(" ", ""), *text[2:]])

    def text(self) -> str:
        """Plain text; numbers are aligned to the right."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


def side_by_side(tables: dict[str, Table]) -> Table:
    """One table of several with the same first column, such as those of several GPUs.

    tables: what a heading gets in addition -> its table. Rows are matched by their first cell."""
    first, *_ = tables.values()
    joined = Table([], [])
    joined.head = first.head[:1]
    labels = dict.fromkeys(row[0] for table in tables.values() for row in table.rows)
    joined.rows = [[label] for label in labels]
    for name, table in tables.items():
        joined.head += [f"{name}: {head}" for head in table.head[1:]]
        cells = {row[0]: row[1:] for row in table.rows}
        for row in joined.rows:
            row += cells.get(row[0], [""] * (len(table.head) - 1))
    return joined


def show(tables: dict[str, Table]):
    """Print tables under their names, without empty ones."""
    for name, table in tables.items():
        if table.rows:
            print(f"\n{name}\n{table.text()}", flush=True)
