"""The board over which ranks of one host tell each other where they are."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch.distributed as dist

from freescale.runtime.lookahead import rank_status, status_board
from loops import Training, data
from ranks import run_ranks


def _board() -> status_board.StatusBoard:
    board = status_board.open_board(dist.group.WORLD)
    assert board is not None
    return board


def _many_rounds(rounds: int) -> bool:
    """Ranks that come early, late, and twice before another has read."""
    board, rank, world = _board(), dist.get_rank(), dist.get_world_size()
    chance = random.Random(rank)
    for n in range(rounds):
        if chance.random() < 0.02:
            time.sleep(chance.random() * 0.01)
        count = 1 + n % 8
        assert board.gather([rank * 10**15 + n] * count, 30) == [[r * 10**15 + n] * count for r in range(world)]
    return True


def test_every_round_brings_what_every_rank_said():
    assert run_ranks(_many_rounds, 3, 2000) == [True] * 3


def _stays_away(how: str) -> str:
    board, rank = _board(), dist.get_rank()
    board.gather([rank], 30)
    if rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "is late":
        time.sleep(4)
    began = time.monotonic()
    try:
        board.gather([rank], 20 if how == "dies" else 1)
    except RuntimeError as error:
        assert time.monotonic() - began < 15
        return str(error)
    return "all came"


def _raises_if_missed(how: str) -> None:
    raise RuntimeError(_stays_away(how))


def test_a_rank_that_dies_is_missed_at_once():
    first, dead, third = run_ranks(_raises_if_missed, 3, "dies", expect_errors=True)
    assert dead == "died"
    assert "rank 1 is gone" in first + third and "all came" not in first + third


@pytest.mark.thorough
def test_a_rank_that_is_late_hears_that_the_others_have_gone():
    first, late, third = run_ranks(_stays_away, 3, "is late")
    assert "rank 1 has not come" in (first, third) and {first, third} <= {"rank 1 has not come", "rank 0 is gone", "rank 2 is gone"}
    assert late in ("rank 0 is gone", "rank 2 is gone")


def _over_sockets() -> list[float]:
    rank_status.open_board = lambda group: None
    t = Training(True)
    for batch in t.loader(data(3)):
        t.step(batch)
    return t.losses


def _over_memory() -> list[float]:
    t = Training(True)
    for batch in t.loader(data(3)):
        t.step(batch)
    return t.losses


@pytest.mark.thorough
def test_without_shared_memory_the_ranks_gather_over_sockets():
    assert run_ranks(_over_sockets, 2) == run_ranks(_over_memory, 2)
