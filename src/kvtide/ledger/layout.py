"""Where each word of a ledger file lies: a header, 64 instance records, 256 pool records.

A word is 8 bytes, signed, in the machine's order, and is read and written whole: it never tears.
A record is live while its generation is odd, so that one store brings it to life or ends it.
Everything that must survive a writer's death at any moment is an order of single stores.
"""

from __future__ import annotations

from typing import Final

WORD_BYTES: Final = 8
MAGIC: Final = int.from_bytes(b"kvtide\x00\x01", "little")
LAYOUT: Final = 1

MAX_INSTANCES: Final = 64
MAX_POOLS: Final = 256
RECORD_WORDS: Final = 64
HEADER_WORDS: Final = 512
INSTANCES_AT: Final = HEADER_WORDS
POOLS_AT: Final = INSTANCES_AT + MAX_INSTANCES * RECORD_WORDS
FILE_WORDS: Final = POOLS_AT + MAX_POOLS * RECORD_WORDS
FILE_BYTES: Final = FILE_WORDS * WORD_BYTES

NONE: Final = -1
"""What an optional size holds when it is not set."""

# Header, from word 0.
H_MAGIC: Final = 0
H_LAYOUT: Final = 1
H_SEQUENCE: Final = 2  # odd while somebody changes the ledger
H_TOTAL: Final = 3
H_MARGIN: Final = 4
H_CAP: Final = 5
H_GRANULARITY: Final = 6
H_BUDGET: Final = 7  # signed: what is below zero is kept, readers clamp
H_SAMPLED_NS: Final = 8  # monotonic, when the published sample was begun; 0 = never
H_TICKET_DRAWN: Final = 9
H_TICKET_PUBLISHED: Final = 10
H_REMOVALS: Final = 11  # pool records removed ever, orderly or not
H_RETIRED_NS: Final = 12  # monotonic, the last retirement of a dead holder; 0 = never
H_HOLDER_PID: Final = 13  # who held the lock last
H_INSTANCES_HIGH: Final = 14  # no live record at or above; a hint that saves scanning
H_POOLS_HIGH: Final = 15
H_FREE_SAMPLED: Final = 16
H_BEYOND: Final = 17  # what the last sample found beyond the budget that the cap leaves
H_UUID: Final = 64
H_BACKEND: Final = 80
H_NAME: Final = 96
UUID_BYTES: Final = 64
BACKEND_BYTES: Final = 16
NAME_BYTES: Final = 128

# Instance record, from its first word.
I_GENERATION: Final = 0
I_PID: Final = 1
I_STATE: Final = 2
I_LIMIT: Final = 3
I_REVISION: Final = 4
I_WISH: Final = 5
I_WISH_SINCE_NS: Final = 6
I_ANSWERED_NS: Final = 7  # monotonic, when its scheduler last looked what is demanded of it
I_MIN: Final = 8
I_PRIORITY: Final = 9
I_HEADROOM: Final = 10
I_RESERVED: Final = 11  # bytes that it is about to load; never a charge
I_LOADED: Final = 12  # of these, loaded by now
I_NON_KV: Final = 13  # what it holds apart from its pools, measured after its start
I_NON_KV_SOURCE: Final = 14  # by what; see records.NON_KV_SOURCES
I_DEADLINE_NS: Final = 15  # monotonic, until when its wish waits; 0 = for ever
I_CALLED_NS: Final = 16  # monotonic, the first call to give since it answered
I_WISH_LEAST: Final = 17
I_WISH_SEEN_NS: Final = 18  # monotonic, when the wish was last repeated
I_RESERVED_NS: Final = 19  # monotonic, since when it reserves
I_TRIM_ASKED: Final = 20  # counts requests to trim
I_TRIM_DONE: Final = 21  # the last one that was carried out
I_TRIM_TO: Final = 22
I_TRIM_RUNNING: Final = 23  # 1: running requests give too
I_TAKEN: Final = 24  # of its headroom, what it had taken at its last sample
I_NAME: Final = 32

# Pool record, from its first word.
P_GENERATION: Final = 0
P_PID: Final = 1
P_INSTANCE: Final = 2  # slot of its instance, which outlives it
P_CHARGE: Final = 3  # zero in a record that is not live
P_CREATED: Final = 4  # monotone, raised after a create
P_RELEASED: Final = 5  # monotone, raised before a release
P_RANK: Final = 6
P_BLOCKS_TOTAL: Final = 7
P_BLOCK_BYTES: Final = 8
P_FIGURES_SEQUENCE: Final = 9  # odd while its owner publishes the figures
P_BLOCKS_MAPPED: Final = 10
P_BLOCKS_USED: Final = 11
P_BLOCKS_CACHED: Final = 12
P_EXTENTS: Final = 13
P_IDLE: Final = 14
P_RELEASING: Final = 15
P_PINNED: Final = 16
P_QUARANTINED: Final = 17
P_NAME: Final = 32


def instance_at(slot: int) -> int:
    """First word of an instance's record."""
    return INSTANCES_AT + slot * RECORD_WORDS


def pool_at(slot: int) -> int:
    """First word of a pool's record."""
    return POOLS_AT + slot * RECORD_WORDS


def truncated(text: str, size_bytes: int) -> bytes:
    """UTF-8 of a text, cut to whole characters and filled with zeros to `size_bytes`."""
    cut = text.encode()[:size_bytes].decode(errors="ignore").encode()
    return cut.ljust(size_bytes, b"\0")


def put_text(raw: memoryview, word: int, size_bytes: int, text: str) -> None:
    """Write a text field that starts at a word; what does not fit is cut."""
    raw[word * WORD_BYTES : word * WORD_BYTES + size_bytes] = truncated(text, size_bytes)


def get_text(raw: memoryview | bytes, word: int, size_bytes: int) -> str:
    """Read a text field that starts at a word."""
    at = word * WORD_BYTES
    return bytes(raw[at : at + size_bytes]).rstrip(b"\0").decode(errors="replace")
