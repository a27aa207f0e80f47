"""The ops that graphs contain: schema and fake (`ops`), readable reference (`reference`), plans (`plan`)."""

from freescale.kernels import reference, rows  # noqa: F401  (registers the ops and their implementations)
from freescale.kernels.ops import schemas  # noqa: F401  (registers the ops and their implementations)
from freescale.kernels.transports import choose  # noqa: F401  (registers the ops and their implementations)
