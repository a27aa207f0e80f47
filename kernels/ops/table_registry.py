"""Names for the sharded tables of this process, so that an op can find the optimizer of the rows it updates.

An op's arguments are tensors, numbers and text. Learning rate, optimizer state and FBGEMM's module are none
of these, and they change without a recompilation; the op therefore carries a name, and the name leads here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch


class Named(Protocol):
    """What an op can name."""

    def describe(self, feature: int) -> str:
        """Feature and table in words, for errors."""


class Table(Named, Protocol):
    """The rows of one exchange that this rank owns."""

    weight: torch.Tensor  # [rows, dim], the storage itself

    def apply_update(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        """One optimizer step. `grads[i]` is all the gradient of `weight[rows[i]]`; rows unique, ascending."""

    def settings(self) -> Any:
        """What else an update depends on, as it is now: the learning rate and the like."""

    def set_settings(self, settings: Any) -> None:
        """As `settings` returned them."""

    # A table may also have, for a GPU: sum_and_update(grad, rows, order, ends), which sums the duplicates as sum_rows
    # does and takes the step at once.


_ops = torch.ops.freescale
_tables: WeakValueDictionary[str, Named] = WeakValueDictionary()
_named: Counter[str] = Counter()
# How often each was updated: tells, after a step that failed, whether its update had run already.
updates: Counter[str] = Counter()
backwards: Counter[str] = Counter()  # of those, by backward passes themselves: the others are late
step_settings: dict[str, Any] = {}  # of each table in its last update that was not a late one


def register(table: Named, wish: str) -> str:
    """Give `table` a name near `wish` that no table of this process has had.

    A name is part of what ranks compare, so it must not depend on when a rank collects its garbage.
    """
    _named[wish] += 1
    name = wish if _named[wish] == 1 else f"{wish}#{_named[wish]}"
    _tables[name] = table
    return name


def look_up(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a table, in a buffer of its own."""
    return _ops.pack_rows.default(cast(Table, find(name)).weight, rows)


@contextmanager
def updating(name: str, late: bool) -> Iterator[Table]:
    """The table, to be updated. A late update belongs to the step before: it is done with the settings of that one,
    whatever a schedule has made of them since."""
    table = cast(Table, find(name))
    now = table.settings()
    if not late:
        step_settings[name] = now
    table.set_settings(step_settings.get(name, now))
    try:
        yield table
    finally:
        table.set_settings(now)
    updates[name] += 1
    backwards[name] += not late


def find(name: str) -> Named:
    try:
        return _tables[name]
    except KeyError:
        raise RuntimeError(
            f"freescale: no table is called {name!r} any more: "
            "the model that this graph was compiled for is gone"
        ) from None
