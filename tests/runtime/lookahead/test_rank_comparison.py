"""Ranks that share no memory: whether all say the same, over a few connections each, and what a loop makes of it."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch.distributed as dist

import two_tables
from freescale.kernels.planning import rank_mesh
from freescale.runtime.lookahead import rendezvous as rank_status
from ranks import run_ranks

FINE = rank_status.RankStatus(rank_status.Action.TRAIN, 1, 3, 0, 2, -1, 3, 0, 5, 0)


@pytest.mark.parametrize("world", (2, 3, 7, 8, 1000, 4096))
def test_few_peers_who_know_each_other(world):
    few = 2 * (world - 1).bit_length()
    for rank in {0, 1, world // 3, world - 1}:
        peers = rank_mesh.peers_to_compare(rank, world)
        assert len(peers) <= few and rank not in peers
        assert all(rank in rank_mesh.peers_to_compare(peer, world) for peer in peers)


@pytest.mark.parametrize("field", rank_status.RankStatus._fields)
def test_a_step_begins_without_another_look_only_if_all_ranks_say_the_same(field):
    other = FINE._replace(**{field: getattr(FINE, field) + 1})
    assert rank_status.all_fine([FINE] * 3)
    for odd_one in range(3):
        assert not rank_status.all_fine([other if rank == odd_one else FINE for rank in range(3)])
    assert rank_status.all_fine([other] * 3) == (field not in ("incomplete", "planning_failed", "written"))


def test_a_write_beside_an_update_is_an_error_without_pending_gradients():
    """Late gradients of a collection that is compiled alone are applied while the user's code goes on."""
    idle = FINE._replace(pending=-1)
    assert rank_status.why_over([idle, idle._replace(written=1)]) == ""
    why = rank_status.why_over([idle, idle._replace(written=rank_status.BESIDE_UPDATE)])
    assert why.startswith("rank 1: something other than training wrote to a table before the gradients of an earlier step")


def _gathered():
    """What each rank knows of all, where none differs, then where rank 1 differs in one field, in turn."""
    sync, found = rank_status.RankSync(dist.group.WORLD), []
    for field in (None, *FINE._fields):
        differs = field is not None and dist.get_rank() == 1
        own = FINE._replace(**{field: getattr(FINE, field) + 1}) if differs else FINE
        found.append(sync.gather(own, 30.0))
    return found


def test_every_field_of_a_status_is_compared():
    others = [FINE, *(FINE._replace(**{field: getattr(FINE, field) + 1}) for field in FINE._fields)]
    assert run_ranks(_gathered, 3) == [[[FINE, other, FINE] for other in others]] * 3


def _open():
    rank, world = dist.get_rank(), dist.get_world_size()
    return rank_mesh.open_mesh(dist.group.WORLD, rank_mesh.peers_to_compare(rank, world)), rank, world


def _compared():
    mesh, rank, world = _open()
    found = [mesh.all_same([7, -1, 2**40], 30.0)]
    for odd_one in range(world):  # every rank hears of it, wherever it is
        found.append(mesh.all_same([3, int(rank == odd_one)], 30.0))
    found.append(mesh.all_same([rank // 2], 30.0))
    return [*found, mesh.all_same([5], 30.0)]


@pytest.mark.parametrize("world", (2, 3, 6))
def test_all_ranks_hear_whether_all_say_the_same(world):
    expected = [True, *[False] * world, world == 2, True]
    assert run_ranks(_compared, world) == [expected] * world


def _waits_in_vain(seconds, leaves):
    mesh, rank, _ = _open()
    dist.barrier()
    if rank == 1:
        if leaves:
            mesh.hang_up()
        else:
            dist.barrier()
        return "away"
    try:
        mesh.all_same([1], seconds)
    except RuntimeError as error:
        return str(error)
    finally:
        if not leaves:
            dist.barrier()
    return "all there"


def test_a_rank_that_leaves_or_stays_away():
    first, _, third = run_ranks(_waits_in_vain, 3, 30.0, True)
    assert "rank 1 disconnected" in (first, third)
    first, _, third = run_ranks(_waits_in_vain, 3, 1.0, False)
    assert "rank 1 did not arrive" in (first, third)


def _counts_gathers(closes_early):
    gathers = mock.Mock(wraps=rank_status.distributed.gather_ints)
    trainer = two_tables.Trainer("rowwise_adagrad")
    with mock.patch.object(rank_status.distributed, "gather_ints", gathers):
        result = trainer.train(0.3, 12, wrapped=True)
    in_common = trainer.train(0.3, 12, wrapped=False)
    error = ""
    if closes_early:
        import freescale

        with contextlib.suppress(StopIteration):
            loader = iter(freescale.LookaheadLoader(two_tables.Batches(6, 0.3), trainer.compiled))
            batch = next(loader)
            if dist.get_rank() == 1:
                loader.close()
            else:
                try:
                    trainer.compiled(batch)
                except RuntimeError as e:
                    error = str(e)
    return two_tables.same(result, in_common), gathers.call_count, error


@pytest.mark.thorough
def test_statuses_are_gathered_only_where_they_differ():
    """At the end of a loop, never in a step."""
    for rank, (same, gathers, error) in enumerate(run_ranks(_counts_gathers, 2, True)):
        assert same and gathers <= 2
        assert rank == 1 or "rank 1: leaves its loop" in error


def _comes_late():
    mesh, rank, _ = _open()
    if rank == 1:
        dist.barrier()  # the others have timed out
    try:
        mesh.all_same([1], 1.0)
    except RuntimeError as error:
        mesh.give_up()
        mesh.hang_up()
        return str(error)
    finally:
        if rank != 1:
            dist.barrier()
    return "all there"


@pytest.mark.parametrize("world", (2, 3))
def test_a_rank_that_is_late_does_not_take_what_was_said_before_for_agreement(world):
    found = run_ranks(_comes_late, world)
    assert all("disconnected" in f or "did not arrive" in f for f in found), found
    assert "disconnected" in found[1]
