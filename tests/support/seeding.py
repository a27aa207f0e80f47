"""The same random numbers every time, so that a failure can be seen again; `FRESH=1` takes new ones."""

from __future__ import annotations

import os
import random

import torch

FRESH = os.environ.get("FRESH", "0") == "1"


def seed() -> int:
    """Set and returned."""
    chosen = random.SystemRandom().randrange(2**31) if FRESH else 7
    torch.manual_seed(chosen)
    return chosen
