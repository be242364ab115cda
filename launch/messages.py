"""What rank, tray and head say to each other: msgspec structs in frames, no pickle.

A rank talks to its tray over the socket that is its standard input. A tray talks to the head over the authenticated
connection that its hello opened. Trays pass on what their ranks say.
"""

from __future__ import annotations

import msgspec

from pegahpc.config import FleetConfig
from pegahpc.launch.identity import ProcessId
from pegahpc.rank import RankContext
from pegahpc.wire.messages import PhaseTimes

PROTOCOL_VERSION = 1
HEARTBEAT_S = 0.25

# How sure a loss is to be the cause rather than a consequence: the heaviest of those that arrive together is named.
CONSEQUENCE, ERROR, REFUSAL, DEATH, TRAY_GONE, LAUNCHER_GONE = range(6)


class RankBoot(msgspec.Struct, frozen=True, kw_only=True):
    """First frame to a rank: who it is and what it serves."""

    context: RankContext
    fleet: FleetConfig
    num_experts: int
    secret_path: str


class RankRecord(msgspec.Struct, frozen=True, kw_only=True, tag="record"):
    """A rank is there and its request port is bound."""

    rank: int
    wire_endpoint: str
    device: str
    process: ProcessId
    slab: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """A rank's loading stage and how much of it is done, 0 to 1."""

    rank: int
    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A rank can step as soon as all others can."""

    rank: int


class Pulse(msgspec.Struct, frozen=True, kw_only=True, tag="pulse"):
    """A rank's status block, sent by its own thread."""

    rank: int
    step: int = 0
    exchange: int = 0
    phase: str = ""
    waiting_for: str = ""
    num_running: int = 0
    num_waiting: int = 0
    phases: PhaseTimes = PhaseTimes()
    age_s: float = 0.0  # how old it was when the tray passed it on


class Store(msgspec.Struct, frozen=True, kw_only=True, tag="store"):
    """Where the collectives' store listens; from rank 0 to all others."""

    host: str
    port: int


class Loss(msgspec.Struct, frozen=True, kw_only=True, tag="loss"):
    """Something ended that should not have; `weight` is one of the constants above."""

    reason: str
    weight: int
    rank: int | None = None  # None: the reason says who
    pid: int = 0


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A tray's first word to the head."""

    version: int = PROTOCOL_VERSION
    world_size: int
    first_rank: int
    num_ranks: int
    fingerprint: str
    host: str
    boot_id: str
    process: ProcessId
    records: list[RankRecord]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """A tray's pulse with those of its ranks."""

    pulses: list[Pulse]


class World(msgspec.Struct, frozen=True, kw_only=True, tag="world"):
    """The table of all ranks, in order: the rendezvous is over."""

    records: list[RankRecord]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Answer to a hello that does not fit this fleet."""

    reason: str


class Go(msgspec.Struct, frozen=True, tag="go"):
    """All ranks are ready: step."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave together, through the chain word."""


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End every rank of the tray now."""


RankToTray = RankRecord | Progress | Ready | Pulse | Store | Loss
TrayToRank = World | Store | Go | Stop
TrayToHead = Hello | Progress | Ready | Heartbeat | Store | Loss
HeadToTray = World | Refused | Store | Go | Stop | Kill

encode = msgspec.msgpack.Encoder().encode
decode_rank_boot = msgspec.msgpack.Decoder(RankBoot).decode
decode_from_rank = msgspec.msgpack.Decoder(RankToTray).decode
decode_to_rank = msgspec.msgpack.Decoder(TrayToRank).decode
decode_from_tray = msgspec.msgpack.Decoder(TrayToHead).decode
decode_from_head = msgspec.msgpack.Decoder(HeadToTray).decode
