"""Names for the sharded tables of this process, so that an op can find the optimizer of the rows it updates: learning
rate, optimizer state and FBGEMM modules cannot be op arguments, and change without a recompilation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch


class RegisteredTable(Protocol):
    """Anything that an op can name."""

    def describe(self, feature: int) -> str:
        """Name the feature and its table, for error messages."""


class ShardedTable(RegisteredTable, Protocol):
    """The rows of one exchange that this rank owns."""

    @property
    def weight(self) -> torch.Tensor:
        """[rows, dim], the storage itself."""

    def apply_update(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        """Take one optimizer step. `grads[i]` is the full gradient of `weight[rows[i]]`; rows are unique and
        ascending."""

    def settings(self) -> Any:
        """Current values of everything else that an update depends on, such as the learning rate."""

    def set_settings(self, settings: Any) -> None:
        """Restore what `settings` returned."""

    # Optional: stored(), the tensors that an update may write, if not only `weight`; count_step(), called before the
    # first update of each step, and count_lookup(), called in each forward pass, if an update depends on their number;
    # on a GPU sum_and_update(grad, rows, order, ends), which sums duplicates as sum_rows does and takes the step in one
    # pass; and gather(rows), if the rows are not simply those of `weight`.


_ops = torch.ops.freescale
_tables: WeakValueDictionary[str, RegisteredTable] = WeakValueDictionary()
_times_registered: Counter[str] = Counter()  # per preferred name
# Updates per table: after a failed step, tells whether its update had already run.
update_counts: Counter[str] = Counter()
backward_update_counts: Counter[str] = Counter()  # of those, the ones in backward passes; the others are late
last_step_settings: dict[str, Any] = {}  # per table, of its last update that was not late
_watched: WeakValueDictionary[str, WatchedTable] = WeakValueDictionary()
_own_writes: Counter[int] = Counter()  # writes by updates, per storage id, summed over the tables that share it
_after_backward: list[tuple[frozenset[str], Callable[[], None]]] = []  # tables, and a callback after such an update


def register(table: RegisteredTable, preferred_name: str) -> str:
    """Register `table` under `preferred_name`; a number is appended if the name was taken in this process. (Ranks
    compare names, so a name must not depend on when a rank's garbage is collected.)"""
    _times_registered[preferred_name] += 1
    times = _times_registered[preferred_name]
    name = preferred_name if times == 1 else f"{preferred_name}#{times}"
    _tables[name] = table
    return name


class WatchedTable:
    """Detects writes to a table other than updates, through torch's version counter. Writes through `.data` or in
    user-written kernels are not seen."""

    def __init__(self, table: ShardedTable) -> None:
        tensors = table.stored() if hasattr(table, "stored") else (table.weight,)
        self._tensors, self._key = [t for t in tensors if not t.is_inference()], id(tensors[0])

    def version(self) -> int:
        return sum(t._version for t in self._tensors)

    def count_own(self, writes: int) -> None:
        _own_writes[self._key] += writes

    def other_writes(self) -> int:
        """A number that changes with every write that is not an update."""
        return self.version() - _own_writes[self._key]


def watch(name: str) -> WatchedTable:
    """Watch a table's writes for as long as the caller keeps the result."""
    watched = _watched.get(name)
    if watched is None:
        watched = _watched[name] = WatchedTable(cast(ShardedTable, get_table(name)))
    return watched


def count_lookup(name: str) -> None:
    table: Any = _tables.get(name)
    if hasattr(type(table), "count_lookup"):  # hasattr on a module's instance takes 10 us when it fails
        table.count_lookup()


def gather_rows(name: str, rows: torch.Tensor) -> torch.Tensor:
    table = cast(ShardedTable, get_table(name))
    return table.gather(rows) if hasattr(table, "gather") else _ops.pack_rows.default(table.weight, rows)


@contextmanager
def table_for_update(name: str, late: bool) -> Iterator[ShardedTable]:
    """The table to update. A late update uses the settings of the step that it belongs to."""
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
        for names, call in _after_backward:
            if name in names:
                call()


def call_after_backward(names: Sequence[str], call: Callable[[], None]) -> Callable[[], None]:
    """Call `call` after each backward pass that updates one of the tables, in that pass's thread and near its end.
    Returns a function that removes the callback."""
    entry = frozenset(names), call
    _after_backward.append(entry)
    return lambda: _after_backward.remove(entry)


def get_table(name: str) -> RegisteredTable:
    try:
        return _tables[name]
    except KeyError:
        raise RuntimeError(
            f"freescale: table {name!r} is no longer registered: "
            "the model that this graph was compiled for was freed"
        ) from None
