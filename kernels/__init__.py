"""The ops that graphs contain: schema and fake (`ops`), readable reference (`reference`), GPU kernels, transports."""

from freescale.kernels import (  # noqa: F401  (registers the ops and their implementations)
    packed_average,
    packed_launches,
    reference,
    row_kernels,
)
from freescale.kernels.ops import schemas  # noqa: F401  (registers the ops and their implementations)
from freescale.kernels.transports import open_transports  # noqa: F401  (registers the ops and their implementations)
