"""A message put on streams, and a wait for it, call by call: what issue_native.py does in one call, for any driver.

    x can be read, out can be written    event `ready` on the compute stream; each stream waits for it when first used
    for each piece, in order             wait for the word, copy, signal
    the streams come together            in that of the last receive (else the last send), and there: event `done`

So a wait, and the question whether a message has finished, need one event. Nothing that is sent waits for a receive,
and no other priority is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import torch

from freescale.kernels.transports.channel import Channel
from freescale.kernels.transports.slot_rings import Lane, LaneTransfer


class PythonIssuer:
    """Of one transport; a channel for each priority level."""

    def __init__(self, driver: Any, channels: Sequence[Channel]) -> None:
        self._driver, self._channels = driver, channels

    def largest_count(self, send_counts: torch.Tensor, recv_counts: torch.Tensor, n_send: int, n_recv: int) -> int:
        """The most rows to or from a peer; -1 if the counts do not add up to those sent and received."""
        send, recv = send_counts.tolist(), recv_counts.tolist()
        return max(*send, *recv) if sum(send) == n_send and sum(recv) == n_recv else -1

    def launch(
        self, level: int, stream: int, x: int, out: int, send_counts: torch.Tensor, recv_counts: torch.Tensor,
        row_bytes: int,
    ) -> Any:  # fmt: skip
        """Rows at address `x` to their receivers, what comes to `out`, when `stream` has got there. Returns `done`."""
        send, recv = ([n * row_bytes for n in counts.tolist()] for counts in (send_counts, recv_counts))
        return self.launch_pieces(level, stream, x, out, self._channels[level].transfers_in_order(send, recv))

    def launch_pieces(self, level: int, stream: int, x: int, out: int, transfers: Iterable[LaneTransfer]) -> Any:
        """The same, of pieces that the caller has put in order."""
        driver, channel = self._driver, self._channels[level]
        next_out, next_in = cycle(channel.outwards), cycle(channel.inwards)
        ready = driver.record_event(stream)
        used: dict[int, None] = {}
        last_in = last_out = None
        for lane, offset, nbytes in transfers:
            at = next(next_out if lane.sends else next_in)
            if at not in used:
                driver.wait_for_event(at, ready)
                used[at] = None
            self._move(channel, lane, (x if lane.sends else out) + offset, nbytes, at)
            if lane.sends:
                last_out = at
            else:
                last_in = at
        last = last_in if last_in is not None else last_out
        for at in channel.streams:
            if at in used and at != last:
                driver.wait_for_event(last, driver.record_event(at))
        return driver.record_event(last if last is not None else stream)

    def _move(self, channel: Channel, lane: Lane, data: int, nbytes: int, stream: int) -> None:
        driver, piece = self._driver, lane.next_piece
        slot, awaited_round = lane.slot(piece), lane.awaited_round(piece)
        if awaited_round and (lane.wait_words is None or not lane.may_move(piece, lane.wait_words)):
            driver.wait_for_word(lane.wait_address + slot * lane.word_stride, awaited_round, stream)
        place = lane.data_address + slot * lane.piece_bytes
        if channel.between_devices:
            driver.copy_device_to_device(*((place, data) if lane.sends else (data, place)), nbytes, stream)
        elif lane.sends:
            driver.copy_to_host(place, data, nbytes, stream)
        else:
            driver.copy_to_device(data, place, nbytes, stream)
        signal, now = lane.signal_address + slot * lane.word_stride, piece // lane.slots + 1
        scratch = channel.scratch_of_stream.get(stream)
        if scratch is not None:
            driver.write_word(scratch, now, stream)
            driver.copy_device_to_device(signal, scratch, 4, stream)
        else:
            driver.write_word(signal, now, stream)
        lane.next_piece += 1

    def wait(
        self, stream: int, done: Any, times: tuple[Any, Any] | None = None, earlier: tuple[Any, Any] | None = None
    ) -> tuple[bool, float | None]:
        """`stream` goes on when `done` is reached. Returns whether it was already; then nothing is put on the stream.

        Else `times` are recorded around the wait. Also returned are the seconds between two `earlier` ones, unless the
        device has not got there.
        """
        driver = self._driver
        arrived = driver.is_done(done)
        if not arrived:
            if times is not None:
                driver.record(times[0], stream)
            driver.wait_for_event(stream, done)
            if times is not None:
                driver.record(times[1], stream)
        seconds = driver.seconds_between(*earlier) if earlier is not None and driver.is_done(earlier[1]) else None
        return arrived, seconds

    def are_done(self, events: Sequence[Any]) -> list[bool]:
        return [self._driver.is_done(event) for event in events]
