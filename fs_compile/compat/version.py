"""The torch releases that freescale supports."""

from __future__ import annotations

import torch

SUPPORTED = ("2.11", "2.12", "2.13", "2.14", "2.15")


def torch_version() -> str:
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])
