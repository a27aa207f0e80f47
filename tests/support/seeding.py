"""A fixed random seed, so that failures are reproducible; `FRESH=1` draws a new one."""

from __future__ import annotations

import os
import random

import torch

FRESH = os.environ.get("FRESH", "0") == "1"


def seed() -> int:
    """Set the seed and return it."""
    chosen = random.SystemRandom().randrange(2**31) if FRESH else 7
    torch.manual_seed(chosen)
    return chosen
