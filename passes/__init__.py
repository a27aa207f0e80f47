"""Graph passes, in the order in which they run. Each is a pure function `(GraphModule, Config) -> number of sites`."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from freescale.config import PASS_ORDER, Config
from freescale.passes.bucket_gradients import bucket_gradients
from freescale.passes.compress_exchange import compress_exchange
from freescale.passes.find_exchanges import find_exchanges
from freescale.passes.gather_parts import gather_parts
from freescale.passes.join_pieces import join_pieces
from freescale.passes.lower_copies import lower_copies
from freescale.passes.move_background import move_background
from freescale.passes.overlap_attention import overlap_attention
from freescale.passes.split_exchanges import split_exchanges

Pass = Callable[[fx.GraphModule, Config], int]

_BY_NAME: dict[str, Pass] = {
    "find_exchanges": find_exchanges,
    "split_exchanges": split_exchanges,
    "join_pieces": join_pieces,
    "gather_parts": gather_parts,
    "bucket_gradients": bucket_gradients,
    "compress_exchange": compress_exchange,
    "overlap_attention": overlap_attention,
    "lower_copies": lower_copies,
    "move_background": move_background,
}
PASSES: tuple[tuple[str, Pass], ...] = tuple((name, _BY_NAME[name]) for name in PASS_ORDER)
