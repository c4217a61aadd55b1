"""`terrazzo ops`: how each operation on distributed tensors runs, and where that is written."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.table import Table

from terrazzo._meant import meant
from terrazzo.cli.screen import OUT, Json, print_json


def ops(
    name: Annotated[str, typer.Argument(help="An operation's name, or a part of it.")] = "",
    json: Json = False,
) -> None:
    """Print the table of operations: how each runs, its alias class, and the file and line of its rule."""
    import terrazzo.tensor  # noqa: F401  (fills the table)
    from terrazzo.tensor.ops.listing import rows

    found = rows(name)
    exact = [row for row in found if row.name == name]
    if not found:
        close = meant(name, [row.name for row in rows("")])
        raise typer.BadParameter(f"there is no operation whose name contains {name!r}{close}")
    if json:
        print_json([msgspec.to_builtins(row) for row in exact or found])
        return
    table = Table("operation", "how", "otherwise", "result", "where", box=None, header_style="bold")
    for row in exact or found:
        where = " ".join(filter(None, [row.where, row.otherwise_where]))
        table.add_row(row.name, row.how, row.otherwise or "", row.alias, where)
    OUT.print(table)
    for row in exact:
        for line in row.schema:
            OUT.print(line, markup=False, highlight=False)
