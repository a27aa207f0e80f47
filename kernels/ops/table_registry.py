"""Names for the sharded tables of this process, so that an op can find the optimizer of the rows it updates.

An op's arguments are tensors, numbers and text. Learning rate, optimizer state and FBGEMM's module are none
of these, and they change without a recompilation; the op therefore carries a name, and the name leads here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch


class RegisteredTable(Protocol):
    """Whatever an op can name."""

    def describe(self, feature: int) -> str:
        """Feature and table in words, for error messages."""


class ShardedTable(RegisteredTable, Protocol):
    """The rows of one exchange that this rank owns."""

    @property
    def weight(self) -> torch.Tensor:
        """[rows, dim], the storage itself."""

    def apply_update(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        """One optimizer step. `grads[i]` is all the gradient of `weight[rows[i]]`; rows unique, ascending."""

    def settings(self) -> Any:
        """What else an update depends on, as it is now: the learning rate and the like."""

    def set_settings(self, settings: Any) -> None:
        """As `settings` returned them."""

    # A table may also have stored(), the tensors that an update may write, where that is not `weight` alone;
    # count_step(), called before the first update of each step, or count_lookup(), called in each
    # forward pass, where an update depends on the number of either; and for a GPU: sum_and_update(grad, rows, order,
    # ends), which sums the duplicates as sum_rows does and takes the step at once; and gather(rows), where its rows are
    # not simply those of `weight`.


_ops = torch.ops.freescale
_tables: WeakValueDictionary[str, RegisteredTable] = WeakValueDictionary()
_times_registered: Counter[str] = Counter()  # per preferred name
# How often each was updated: tells, after a step that failed, whether its update had run already.
update_counts: Counter[str] = Counter()
backward_update_counts: Counter[str] = Counter()  # of those, by backward passes themselves: the others are late
last_step_settings: dict[str, Any] = {}  # of each table in its last update that was not a late one
_watched: WeakValueDictionary[str, WatchedTable] = WeakValueDictionary()
_own_writes: Counter[int] = Counter()  # of all tables that share their storage, by its id: what updates added
_after_backward: dict[str, list[Callable[[], None]]] = {}  # by table: who wants to know of such an update


def register(table: RegisteredTable, preferred_name: str) -> str:
    """Register `table` under `preferred_name`, with a number added if a table of this process has had that name.

    A name is part of what ranks compare, so it must not depend on when a rank collects its garbage.
    """
    _times_registered[preferred_name] += 1
    times = _times_registered[preferred_name]
    name = preferred_name if times == 1 else f"{preferred_name}#{times}"
    _tables[name] = table
    return name


class WatchedTable:
    """Tells whether anything but an update writes to a table: torch counts all writes that it sees.

    Not those through `.data` or in a kernel of the user's own.
    """

    def __init__(self, table: ShardedTable) -> None:
        tensors = table.stored() if hasattr(table, "stored") else (table.weight,)
        self._tensors, self._key = [t for t in tensors if not t.is_inference()], id(tensors[0])

    def version(self) -> int:
        return sum(t._version for t in self._tensors)

    def count_own(self, writes: int) -> None:
        _own_writes[self._key] += writes

    def other_writes(self) -> int:
        """A number that changes with every write that is not an update's."""
        return self.version() - _own_writes[self._key]


def watch(name: str) -> WatchedTable:
    """Its writes are told apart for as long as the caller keeps this."""
    watched = _watched.get(name)
    if watched is None:
        watched = _watched[name] = WatchedTable(cast(ShardedTable, get_table(name)))
    return watched


def count_lookup(name: str) -> None:
    """A forward pass has begun to look up rows."""
    table: Any = _tables.get(name)
    if hasattr(type(table), "count_lookup"):  # (a module takes ten microseconds to say what it does not have)
        table.count_lookup()


def gather_rows(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a table, in a new tensor."""
    table = cast(ShardedTable, get_table(name))
    return table.gather(rows) if hasattr(table, "gather") else _ops.pack_rows.default(table.weight, rows)


@contextmanager
def table_for_update(name: str, late: bool) -> Iterator[ShardedTable]:
    """The table, to be updated. A late update belongs to the step before: it is done with the settings of that one,
    whatever a schedule has made of them since."""
    table = cast(ShardedTable, get_table(name))
    if not late and hasattr(table, "count_step"):
        table.count_step()
    current, watched = table.settings(), _watched.get(name)
    version = 0 if watched is None else watched.version()
    if not late:
        last_step_settings[name] = current
    settings = last_step_settings.get(name, current)
    if settings == current:
        yield table
    else:
        table.set_settings(settings)
        try:
            yield table
        finally:
            table.set_settings(current)
    if watched is not None:
        watched.count_own(watched.version() - version)
    update_counts[name] += 1
    if not late:
        backward_update_counts[name] += 1
        for call in _after_backward.get(name, ()):
            call()


def call_after_backward(names: Sequence[str], call: Callable[[], None]) -> Callable[[], None]:
    """Whenever a backward pass has updated one of the tables: in the thread of that pass, and near its end, as a lookup
    is near the begin of a forward pass. Returns a function that ends it."""
    for name in names:
        _after_backward.setdefault(name, []).append(call)

    def end() -> None:
        for name in names:
            _after_backward[name].remove(call)
            if not _after_backward[name]:
                del _after_backward[name]

    return end


def get_table(name: str) -> RegisteredTable:
    try:
        return _tables[name]
    except KeyError:
        raise RuntimeError(
            f"freescale: no table is called {name!r} any more: "
            "the model that this graph was compiled for is gone"
        ) from None
