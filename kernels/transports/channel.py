"""One priority of a transport: the streams and lanes that its messages take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from freescale.kernels.transports import slot_rings
from freescale.kernels.transports.slot_rings import Lane, LaneTransfer


@dataclass
class Channel:
    rank: int
    outwards: list[int]  # streams, taken in turn
    inwards: list[int]
    lanes_out: list[Lane]  # by peer; where there is none for each, a launch says which lanes its pieces take
    lanes_in: list[Lane]
    piece_bytes: int
    between_devices: bool = False  # slots are in a device's memory, not in the host's
    scratch_of_stream: dict[int, int] = field(default_factory=dict)  # where a flag is written that is then copied

    @property
    def streams(self) -> list[int]:
        return [*self.outwards, *self.inwards]

    def transfers_in_order(self, send: Sequence[int], recv: Sequence[int]) -> Iterator[LaneTransfer]:
        """Every piece of one message of so many bytes to and from each peer, in the order in which it is issued."""
        lanes = self.lanes_in, self.lanes_out
        for sends, peer, offset, nbytes in slot_rings.transfers_in_order(self.rank, send, recv, self.piece_bytes):
            yield LaneTransfer(lanes[sends][peer], offset, nbytes)
