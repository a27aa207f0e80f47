"""The ops that graphs contain: schema and fake (`ops`), readable reference (`reference`), GPU kernels, transports."""

from freescale.kernels import (  # noqa: F401  (registers the ops and their implementations)
    launch,
    reference,
    row_kernels,
)
from freescale.kernels.ops import schemas  # noqa: F401  (registers the ops and their implementations)
