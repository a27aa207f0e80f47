"""Batches planned in C, over sockets and over gloo, against the oracle: the same bytes. What C says when a rank is gone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from freescale.kernels.native import c_library
from freescale.kernels.planning import native_plan, rank_mesh
from freescale.kernels.planning.native_plan import BatchPlan, Copy, Room, plan_alone
from freescale.kernels.planning.owners import ExchangeTables, Shard, first_row_of_each_table, owner_map
from planning_oracle import OraclePlan
from ranks import run_ranks


def _row_wise(rows: list[int], world: int, features: list[int]) -> ExchangeTables:
    """Tables in blocks of rows; some ranks have none. `features`: their tables."""
    shards, bases = [], [0] * world
    for table, n in enumerate(rows):
        block = -(-n // world)
        for rank in range(world):
            # the last table lies the other way round: greater rows on lower ranks
            owner = rank if table + 1 < len(rows) else world - 1 - rank
            size = max(0, min(block, n - rank * block))
            shards.append(Shard(table, rank * block, size, owner, bases[owner]))
            bases[owner] += size
    first = first_row_of_each_table(rows)
    return ExchangeTables([first[t] for t in features], [rows[t] for t in features], owner_map(shards, rows, world))


def _ids(rng: np.random.Generator, tables: ExchangeTables, most: int) -> list[torch.Tensor]:
    made = []
    for size in tables.table_sizes:
        n = int(rng.integers(0, most)) * int(rng.integers(0, 3))
        ids = torch.from_numpy((rng.zipf(1.2, n) - 1) % size)
        made.append(ids.int() if size < 2**31 and rng.integers(0, 2) else ids)
    return made


def _memory(plan, last: bool = False) -> np.ndarray:
    return np.full((plan.needed_for_last if last else plan.needed) + 1, -7, dtype=np.int64)


def _room(memory: np.ndarray) -> Room:
    return Room(native_plan.address_of(memory), memory.shape[0] - 1)


def _arrays(memory: np.ndarray, extents) -> list[list[int]]:
    return [memory[begin : begin + size].tolist() for begin, size in extents]


def _planned(plan, last: bool = False, already: tuple[np.ndarray, Room] | None = None) -> list[Any]:
    """What was planned, for each exchange. `already`: where it is."""
    memory, room = already if already is not None else (made := _memory(plan, last), _room(made))
    used, exchanges = (plan.plan_last if last else plan.plan)(room)
    assert used < memory.shape[0] and memory[-1] == -7
    assert not last or not any(e.size for x in exchanges for e in x.rows)
    return [
        (
            _arrays(memory, x.gradients), [c.tolist() for c in x.gradient_counts if c.sum()],
            None if last else (_arrays(memory, x.rows), [c.tolist() for c in x.row_counts], x.urgent_entries),
        )
        for x in exchanges
    ]  # fmt: skip


def _open_mesh(over: str) -> rank_mesh.RankMesh | rank_mesh.GroupMesh:
    group = dist.group.WORLD
    return rank_mesh.open_mesh(group) if over == "sockets" else rank_mesh.GroupMesh(group)


SOURCE = np.array([3, 1, 4])


def _same(seed: int, batches: int, over: str, whole: bool = False) -> int:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    tables = [_row_wise([100, 1, 7], world, [0, 2, 1, 0]), _row_wise([2**33 + 5, 3], world, [0, 1])]
    mesh = _open_mesh(over)
    native, oracle = BatchPlan(mesh, tables, 30.0, whole), OraclePlan(group, tables, whole)
    rng, planned = np.random.default_rng((seed, rank)), 0
    for number in range(batches):
        ids = [i for t in tables for i in _ids(rng, t, 1 + 40 * (number % 3))]
        # Room for none, or for any of these batches; on each rank for others.
        memory, copied = np.full(int(rng.integers(0, 2)) * 9000 + 1, -7, dtype=np.int64), np.zeros(3, dtype=np.int64)
        room = Room(*_room(memory)[:2], [Copy(*map(native_plan.address_of, (copied, SOURCE)), SOURCE.nbytes)])
        assert native.request(0, ids, room) is None
        at_once = native.needed <= room.elements
        assert (copied == SOURCE).all() == at_once == (memory.shape[0] > 1)
        in_c = _planned(native, already=(memory, room) if at_once else None)
        assert oracle.request(0, ids) is None and _planned(oracle) == in_c
        planned += sum(map(len, in_c[0][0]))
        (urgent, *_, late, _, _, _), _, (rows, counts, _) = in_c[0]
        assert min(map(min, counts)) >= 0
        assert not whole or (late == rows[4] == [] and urgent == list(range(len(rows[3]))))  # no early ones either
    assert whole or _planned(native, last=True) == _planned(oracle, last=True)
    return planned


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("over", ["sockets", "gloo"])
def test_same_plans_as_the_oracle(world, over):
    assert all(n > 100 for n in run_ranks(_same, world, 5, 12, over))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("over", ["sockets", "gloo"])
def test_same_self_contained_plans_as_the_oracle(world, over):
    assert all(n > 100 for n in run_ranks(_same, world, 5, 6, over, True))


def _rounds(exchanges: int) -> list[int]:
    rounds, carrier = [], rank_mesh._CARRIER

    def counting(carry: Any) -> Any:
        return carrier(lambda *args: (rounds.append(rounds.pop() + 1), carry(*args))[1])

    with mock.patch.object(rank_mesh, "_CARRIER", counting):
        mesh = _open_mesh("gloo")
    plan = BatchPlan(mesh, [_row_wise([100], dist.get_world_size(), [0])] * exchanges, 30.0)
    for _ in range(3):
        rounds.append(0)
        plan.request(0, [torch.arange(100)] * exchanges)
        memory = _memory(plan)
        plan.plan(_room(memory))
    return rounds


@pytest.mark.parametrize("exchanges", [1, 5])
def test_all_exchanges_of_a_batch_are_planned_in_the_same_three_rounds(exchanges):
    """How many rows and whether all go on, the rows, which of them collide; the first batch collides with none."""
    assert run_ranks(_rounds, 3, exchanges) == [[2, 3, 3]] * 3


def _headers(over: str, status: list[int], bad: int) -> tuple:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    tables = [_row_wise([10], world, [0]), _row_wise([5, 6], world, [0, 1])]
    ids = [torch.tensor([3, 9]), torch.tensor([4]), torch.tensor([bad if rank == 1 else 5, 0])]
    native = BatchPlan(_open_mesh(over), tables, 30.0)
    first, second = (
        plan.request(status[rank], None if status[rank] else ids) for plan in (native, OraclePlan(group, tables))
    )
    assert first.statuses == second.statuses and first.invalid_ids == second.invalid_ids
    return first.statuses, first.invalid_ids


@pytest.mark.parametrize("over", ["sockets", "gloo"])
def test_ranks_hear_who_does_not_go_on_and_of_invalid_ids(over):
    for statuses, invalid in run_ranks(_headers, 2, over, [0, 2], 5):
        assert statuses == [0, 2] and invalid == [None, None]
    for statuses, invalid in run_ranks(_headers, 2, over, [0, 0], 6):
        assert statuses == [0, 0] and invalid == [None, (1, (1, 6))]
    for _, invalid in run_ranks(_headers, 2, over, [0, 0], -2):
        assert invalid == [None, (1, (1, -2))]


def _one_leaves(how: str) -> str:
    rank, mesh = dist.get_rank(), _open_mesh("sockets")
    plan = BatchPlan(mesh, [_row_wise([10], 3, [0])], 2.0)
    plan.request(0, [torch.tensor([0, 5, 9])])  # a row of each rank
    if rank == 2:
        if how == "dies":
            os._exit(1)
        if how == "hangs up":
            mesh.hang_up()
        time.sleep(4)
        raise RuntimeError("rank 2 is the one")
    start, memory = time.monotonic(), _memory(plan)
    try:
        plan.plan(_room(memory))
    except RuntimeError as error:
        assert how == "sleeps" or time.monotonic() - start < 1
        raise error
    return "planned"


@pytest.mark.parametrize("how, expected", [
    ("dies", "disconnected"),
    pytest.param("hangs up", "disconnected", marks=pytest.mark.thorough),
    pytest.param("sleeps", "did not respond within 2 s", marks=pytest.mark.thorough),
])  # fmt: skip
def test_a_rank_that_leaves_is_named(how, expected):
    errors = run_ranks(_one_leaves, 3, how, expect_errors=True)
    # The other rank may have failed first, and left in turn.
    assert all("RuntimeError: rank" in e and ("disconnected" in e or expected in e) for e in errors[:2]), errors
    assert any(f"rank 2 {expected}" in e for e in errors[:2]), errors


def _large(megabytes: int) -> None:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    rows = megabytes * 2**17
    plan = BatchPlan(rank_mesh.open_mesh(group), [_row_wise([rows], world, [0])], 60.0)
    for _ in range(2):
        plan.request(0, [torch.randperm(rows)])
        memory = _memory(plan)
        _, (planned,) = plan.plan(_room(memory))
    assert planned.rows[4].size == 0 and planned.rows[5].size == rows  # all collide
    assert (np.sort(memory[planned.rows[1].offset :][:rows]) == np.arange(rows)).all(), rank


def test_messages_that_no_socket_takes_at_once():
    run_ranks(_large, 2, 16)


def _without_ports() -> bool:
    def listen() -> None:
        raise OSError("no ports are left")

    if dist.get_rank() == 1:
        rank_mesh._listen = listen
    return rank_mesh.open_mesh(dist.group.WORLD) is None


def test_where_a_rank_cannot_be_called_there_is_no_mesh():
    assert run_ranks(_without_ports, 2) == [True, True]


def _unreachable() -> bool:
    group = dist.group.WORLD
    if dist.get_rank() == 0:
        rank_mesh._network = lambda: ("elsewhere", 0)
        rank_mesh._addresses = lambda: []
    rank_mesh._CONNECT_SECONDS = 1.0
    return rank_mesh.open_mesh(group) is None


@pytest.mark.thorough
def test_where_ranks_cannot_connect_there_is_no_mesh():
    assert run_ranks(_unreachable, 2) == [True, True]


def _stranger() -> bool:
    """Somebody else who calls the port is not taken for a rank."""
    import socket
    import threading

    group, rank = dist.group.WORLD, dist.get_rank()
    listen = rank_mesh._listen

    def with_stranger() -> socket.socket:
        listener = listen()
        port = listener.getsockname()[1]

        def call() -> None:
            with socket.create_connection(("127.0.0.1", port)) as s:
                s.sendall(b"\x01" + b"\0" * 7 + b"x" * 16)
                time.sleep(1)

        threading.Thread(target=call, daemon=True).start()
        time.sleep(0.3)
        return listener

    rank_mesh._listen = with_stranger
    mesh = rank_mesh.open_mesh(group)
    plan = BatchPlan(mesh, [_row_wise([10], 2, [0])], 5.0)
    return plan.request(rank, None).statuses == [0, 1]


def test_a_stranger_is_not_taken_for_a_rank():
    assert run_ranks(_stranger, 2) == [True, True]


def _without_library(where: list[int], folder: str) -> list[str]:
    """What a loop and an op without a loop say, where the library is missing on some ranks."""
    rank, group = dist.get_rank(), dist.group.WORLD
    if rank in where:
        c_library._FOLDER = Path(folder)
        c_library.library.cache_clear()
    tables, said = _row_wise([10], 2, [0]), []
    for plan in (lambda: rank_mesh.open_mesh(group), lambda: plan_alone([torch.tensor([rank])], tables, "t", group)):
        with pytest.raises(RuntimeError) as error:
            plan()
        said.append(str(error.value))
    return said


@pytest.mark.parametrize("where", ([1], [0, 1]))
def test_without_the_c_library_all_ranks_say_so(where, tmp_path):
    why = f"its C library is not in {tmp_path}: install freescale with pip, in a checkout with `pip install -e .`"
    other = "because its C library is missing: run `python -m freescale doctor` on rank 1"
    for rank, said in enumerate(run_ranks(_without_library, 2, where, str(tmp_path))):
        own = f"freescale: this rank cannot plan batches: {why}"
        assert said == [
            f"freescale: rank {where[0]} cannot plan batches: {why}",
            own if rank in where else f"freescale: rank 1 cannot plan batches, {other}",
        ]


def _group_fails() -> str:
    """On rank 1 the process group does, between the collectives of a batch."""
    mesh = _open_mesh("gloo")
    plan, send = BatchPlan(mesh, [_row_wise([10], 2, [0])], 5.0), rank_mesh.all_to_all_cpu

    def fail(*args: Any) -> None:
        raise ConnectionError("no way there")

    plan.request(0, [torch.tensor([0, 5])])
    memory = _memory(plan)
    with mock.patch.object(rank_mesh, "all_to_all_cpu", fail if dist.get_rank() == 1 else send):
        plan.plan(_room(memory))
    return "planned"


def test_what_a_process_group_fails_with_is_raised():
    errors = run_ranks(_group_fails, 2, expect_errors=True)
    assert errors[1].startswith("ConnectionError: no way there") and errors[0].startswith("RuntimeError: "), errors
