"""Put a message on streams call by call, for any driver; native/transfers.c does so in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, cycle
from typing import NamedTuple

from freescale.kernels.transports.slot_rings import WORD_STRIDE


class Transfer(NamedTuple):
    """One piece, to or from a peer."""

    sends: bool
    peer: int
    offset: int
    nbytes: int


def transfers_in_order(rank: int, send: Sequence[int], recv: Sequence[int], piece_bytes: int) -> Iterator[Transfer]:
    """Every piece of a message, in the deadlock-free order; `send` and `recv` are bytes per peer."""
    world = len(send)
    starts_out, starts_in = [0, *accumulate(send)], [0, *accumulate(recv)]
    for begin in range(0, max((*send, *recv), default=0), piece_bytes):
        for distance in (*range(1, world), 0):  # the rank's data for itself comes last
            to, source = (rank + distance) % world, (rank - distance) % world
            if begin < send[to]:
                yield Transfer(True, to, starts_out[to] + begin, min(piece_bytes, send[to] - begin))
            if begin < recv[source]:
                yield Transfer(False, source, starts_in[source] + begin, min(piece_bytes, recv[source] - begin))


class PythonIssuer:
    """The same as issue.Issuer, for valid counts."""

    def __init__(self, driver, channels):
        self._driver, self._channels = driver, channels

    def launch(self, level, stream, x, out, send_counts, recv_counts, row_bytes):
        driver, channel = self._driver, self._channels[level]
        send, recv = ([n * row_bytes for n in counts.tolist()] for counts in (send_counts, recv_counts))
        next_out, next_in = cycle(channel.outwards), cycle(channel.inwards)
        ready = driver.record_event(stream)
        used = {}
        last_in = last_out = None
        for sends, peer, offset, nbytes in transfers_in_order(channel.rank, send, recv, channel.piece_bytes):
            lane = (channel.lanes_out if sends else channel.lanes_in)[peer]
            at = next(next_out if sends else next_in)
            if at not in used:
                driver.wait_for_event(at, ready)
                used[at] = None
            self._move(lane, (x if sends else out).data_ptr() + offset, nbytes, at)
            if sends:
                last_out = at
            else:
                last_in = at
        last = last_in if last_in is not None else last_out
        for at in channel.streams:
            if at in used and at != last:
                driver.wait_for_event(last, driver.record_event(at))
        return driver.record_event(last if last is not None else stream)

    def _move(self, lane, data, nbytes, stream):
        driver, piece = self._driver, lane.next_piece
        slot, awaited_round = piece % lane.slots, lane.awaited_round(piece)
        if awaited_round and not lane.may_move(piece):
            driver.wait_for_word(lane.wait_address + slot * WORD_STRIDE, awaited_round, stream)
        place = lane.data_address + slot * lane.piece_bytes
        if lane.sends:
            driver.copy_to_host(place, data, nbytes, stream)
        else:
            driver.copy_to_device(data, place, nbytes, stream)
        driver.write_word(lane.signal_address + slot * WORD_STRIDE, piece // lane.slots + 1, stream)
        lane.next_piece += 1
