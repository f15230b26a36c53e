"""What the scheduler tells a rank with a step, and what the rank answers."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from kvtide.errors import MessageError

__all__ = [
    "Answer",
    "Answers",
    "Description",
    "Grow",
    "Order",
    "Parting",
    "Place",
    "Sample",
    "Shrink",
    "decode_answers",
    "decode_description",
    "decode_orders",
    "encode",
]

# What a size or an offset in bytes can be; a message with another one is none.
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
# (offset, size) in bytes, relative to the arena.
Place = tuple[Bytes, Bytes]
# An extent, what is kept of it, and the granules that carry it over (none: it needs no carrying).
Parting = tuple[Place, tuple[Place, ...], tuple[Bytes, ...]]


class Grow(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """Map these places, all or none."""

    sequence: int
    extents: tuple[Place, ...]


class Shrink(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Give back these extents, and of these others all but the places kept.

    Whole extents go first, so that their memory can carry the copies of the splits.
    """

    sequence: int
    extents: tuple[Place, ...]
    splits: tuple[Parting, ...] = ()


class Sample(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """Measure the free memory of the device and publish it."""

    sequence: int


Order = Grow | Shrink | Sample


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What became of one order at one rank.

    Attributes
    ----------
    sequence
        Of the order.
    done
        For a growth: everything is mapped; if not, nothing is. For a shrink: all that could go
        is gone.
    kept
        For a shrink: the extents to be split that are still whole, by offset.
    stuck_bytes
        Bytes that the device did not take back while this was carried out. They stay charged.
    blocked
        All places of the arena where such memory is still mapped; nothing can be mapped there.
    stuck_before_bytes
        Of the rank's own changes before: what its device did not take back and no answer told of.
        It stays charged, and is no part of what was granted for the order.
    """

    sequence: int
    done: bool
    kept: tuple[Bytes, ...] = ()
    stuck_bytes: Bytes = 0
    blocked: tuple[Place, ...] = ()
    stuck_before_bytes: Bytes = 0


class Answers(msgspec.Struct, frozen=True, array_like=True):
    """One datagram of a rank: its answers since the last one, in order."""

    rank: int
    answers: tuple[Answer, ...]


class Description(msgspec.Struct, frozen=True):
    """What a rank tells of itself when its memory is ready.

    Attributes
    ----------
    rank, pid
        Of the process that holds the memory.
    device_uuid, device_bytes
        Its device, and how large that is.
    ledger
        Path of the device's ledger.
    instance, account
        Keys of the engine's and its own record there.
    blocks_total, strips, granularity_bytes
        Its geometry; strips as (offset, stride, length).
    extents
        What is mapped already.
    socket
        Abstract address on which it listens for the scheduler.
    layout
        `block-major` or `per-layer`, for people.
    """

    rank: int
    pid: int
    device_uuid: str
    device_bytes: int
    ledger: str
    instance: str
    account: str
    blocks_total: int
    strips: tuple[tuple[int, int, int], ...]
    granularity_bytes: int
    extents: tuple[Place, ...]
    socket: str
    layout: str


_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(tuple[Order, ...])
_answers = msgspec.msgpack.Decoder(Answers)
_description = msgspec.msgpack.Decoder(Description)

encode = _encoder.encode
T = TypeVar("T")


def _decode(decoder: msgspec.msgpack.Decoder[T], message: bytes, what: str) -> T:
    try:
        return decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(
            f"{what}, {len(message)} bytes, cannot be understood ({error}): all processes of an "
            "engine must have the same kvtide"
        ) from error


def decode_orders(message: bytes) -> tuple[Order, ...]:
    """The orders of a step. Raises `MessageError`."""
    return _decode(_orders, message, "the orders of a step")


def decode_answers(message: bytes) -> Answers:
    """A rank's answers. Raises `MessageError`."""
    return _decode(_answers, message, "the answers of a rank")


def decode_description(message: bytes) -> Description:
    """What a rank tells of itself. Raises `MessageError`."""
    return _decode(_description, message, "the description of a rank")
