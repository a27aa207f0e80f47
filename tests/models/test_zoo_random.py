"""Loops drawn at random over the zoo's models: what is done in which order, with how many samples.

By hand, for as long as you like, two ranks at a time: `python tests/models/test_zoo_random.py --minutes 60 --first 1000`. A seed
that fails becomes a case below.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import test_zoo  # noqa: E402

from ranks import HAS_TORCHREC, RankFailed, run_ranks  # noqa: E402

SEEDS = (1, 2, 3)  # and those that once failed


def draw(seed: int) -> tuple[list[str], Any, str, bool]:
    """The arguments of test_zoo's `_check`."""
    rng = random.Random(seed)
    name = rng.choice(test_zoo.ALL)
    ahead = name in test_zoo.PLANNED and rng.random() < 0.7
    life: list[tuple[str, Any]] = [("train", (test_zoo.FULL, test_zoo.FULL))]
    for _ in range(rng.randint(2, 7)):
        samples = rng.choice((1, 2, 3, test_zoo.FULL, test_zoo.FULL))
        per_rank = (samples, samples)
        if name not in test_zoo.EQUAL_COUNTS and rng.random() < 0.2:
            per_rank = rng.choice(((samples, 0), (0, samples)))
        life.append((rng.choice(("train", "train", "train", "evaluate")), per_rank))
    life.insert(rng.randint(1, len(life)), ("save and start again", ()))
    return [name], tuple(life), "eager", ahead


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_loops(seed):
    test_zoo._check(*draw(seed))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=60.0)
    p.add_argument("--first", type=int, default=1000, help="the first seed")
    args = p.parse_args()
    end, seed, failed = time.monotonic() + 60 * args.minutes, args.first, []
    while time.monotonic() < end:
        names, life, codegen, ahead = draw(seed)
        try:
            for found in run_ranks(test_zoo._lives, 2, names, life, codegen, ahead, timeout=300):
                (worst,) = found.values()
                assert worst <= test_zoo.TOLERANCE.get(names[0], 2e-6), worst
            print(f"{seed}: {names[0]}, {len(life)} events, look-ahead {ahead}: {worst:.1e}", flush=True)
        except (AssertionError, RankFailed) as error:
            failed.append(seed)
            print(f"{seed}: FAILED {names[0]} look-ahead {ahead} {life}: {str(error)[-1500:]}", flush=True)
        seed += 1
    print(f"{seed - args.first} loops, failed: {failed}")


if __name__ == "__main__":
    main()
