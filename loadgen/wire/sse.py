"""Split a server-sent event body into frames, strictly: `data: <payload>` and an empty line."""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.wire.http_wire import ParsedBody

_PREFIX = b"data: "
_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class Frame:
    """One event.

    Attributes:
        time_s: When its last byte had arrived.
        payload: What stands between `data: ` and the empty line.
    """

    time_s: float
    payload: bytes


def split_frames(body: ParsedBody) -> tuple[list[Frame], list[str]]:
    """Return the well-formed frames in order, and what was malformed.

    Anything but a single `data: ` line is malformed: comments, other fields, several lines, CRLF,
    a missing space, bytes after the last empty line.
    """
    frames: list[Frame] = []
    faults: list[str] = []
    data, position, piece = body.data, 0, 0
    ends, times = body.ends, body.times_s
    while position < len(data):
        end = data.find(_END, position)
        if end < 0:
            faults.append(f"unfinished frame {data[position : position + 80]!r} at the end")
            break
        raw = data[position:end]
        position = end + len(_END)
        while ends[piece] < position:
            piece += 1
        if not raw.startswith(_PREFIX) or b"\n" in raw or b"\r" in raw:
            faults.append(f"frame {len(frames)} is {raw[:80]!r}, not one `data: ` line")
            continue
        frames.append(Frame(times[piece], raw[len(_PREFIX) :]))
    return frames, faults
