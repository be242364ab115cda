"""The head's server against trays that fit, trays that do not, and strangers."""

import asyncio
import resource
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pegahpc.launch import rendezvous as rendezvous_module
from pegahpc.launch.frames import FrameError, FrameStream, SignedStream
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.messages import (
    ERROR,
    HeadToTray,
    Heartbeat,
    Hello,
    Loss,
    Progress,
    RankRecord,
    Refused,
    TrayToHead,
    World,
    decode_from_head,
    encode,
)
from pegahpc.launch.rendezvous import Rendezvous
from pegahpc.wire.keys import FleetSecret

SECRET = FleetSecret.create()


class Head:
    """A server and what it heard."""

    def __init__(self, num_trays: int = 2, ranks_per_tray: int = 2) -> None:
        self.heard: list[tuple[int, TrayToHead]] = []
        self.gone: list[int] = []
        self.port = 0
        self.server = Rendezvous(
            secret=SECRET,
            fingerprint="f1",
            num_trays=num_trays,
            ranks_per_tray=ranks_per_tray,
            on_message=lambda tray, message: self.heard.append((tray, message)),
            on_gone=self.gone.append,
        )


@asynccontextmanager
async def opened(num_trays: int = 2, ranks_per_tray: int = 2) -> AsyncIterator[Head]:
    head = Head(num_trays, ranks_per_tray)
    async with head.server.open("127.0.0.1") as address:
        head.port = int(address.rpartition(":")[2])
        yield head


def hello(tray: int, **changed: object) -> Hello:
    ranks = [tray * 2, tray * 2 + 1]
    own = ProcessId.own()
    records = [RankRecord(rank=rank, wire_endpoint=f"tcp://h:{rank}", device="cpu", process=own) for rank in ranks]
    fields: dict[str, object] = {
        "world_size": 4, "first_rank": ranks[0], "num_ranks": 2, "fingerprint": "f1", "host": f"host{tray}",
        "boot_id": "b", "process": own, "records": records,
    }  # fmt: skip
    return Hello(**(fields | changed))  # type: ignore[arg-type]


async def connect(head: Head, secret: FleetSecret = SECRET) -> SignedStream:
    reader, writer = await asyncio.open_connection("127.0.0.1", head.port)
    nonce = await FrameStream(reader, writer).receive()
    assert nonce is not None and len(nonce) == 32
    return SignedStream(reader, writer, secret=secret, nonce=nonce, is_head=False)


async def join(head: Head, said: Hello) -> SignedStream:
    tray = await connect(head)
    tray.send(encode(said))
    return tray


async def next_order(tray: SignedStream) -> HeadToTray:
    payload = await asyncio.wait_for(tray.receive(), 5)
    assert payload is not None
    return decode_from_head(payload)


async def is_closed(tray: FrameStream) -> bool:
    return await asyncio.wait_for(tray.receive(), 8) is None


async def test_when_the_slices_tile_the_world_all_get_the_table_in_rank_order() -> None:
    async with opened() as head:
        trays = [await join(head, hello(1)), await join(head, hello(0))]
        records = await head.server.gather(5)
        assert [record.rank for record in records] == [0, 1, 2, 3]
        head.server.broadcast(World(records=records))
        for tray in trays:
            answer = await next_order(tray)
            assert isinstance(answer, World) and answer.records == records
            await tray.close()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"version": 2}, "host host1, ranks 2..3: speaks protocol 2, the head 1"),
        ({"world_size": 8}, "expects a world of 8 ranks, the head 4"),
        ({"fingerprint": "f2"}, r"has another config, code or model \(f2\) than the head \(f1\)"),
        ({"first_rank": 1}, "ranks 1..2: is no tray of 2 ranks in a world of 4"),
        ({"first_rank": 4}, "is no tray of 2 ranks in a world of 4"),
        ({"first_rank": -2}, "is no tray of 2 ranks in a world of 4"),
        ({"num_ranks": 1}, "is no tray of 2 ranks in a world of 4"),
        ({"records": []}, r"brings records of ranks \[\]"),
        ({"first_rank": 0, "records": hello(0).records}, "these ranks are taken by host host0 .pid"),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_by_name(changed: dict[str, object], says: str) -> None:
    async with opened() as head:
        first = await join(head, hello(0))
        while not head.server.hellos:
            await asyncio.sleep(0.01)
        other = await join(head, hello(1, **changed))
        answer = await next_order(other)
        assert isinstance(answer, Refused)
        with pytest.raises(AssertionError, match=says):
            raise AssertionError(answer.reason)
        assert await is_closed(other)
        with pytest.raises(TimeoutError, match=r"tray 1 \(ranks 2..3\) did not come within 0.1 s; refused: host host1"):
            await head.server.gather(0.1)
        assert head.server.connected == {0}
        for tray in (first, other):
            await tray.close()


async def test_while_it_waits_the_head_names_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous_module, "NAME_MISSING_EVERY_S", 0.1)
    async with opened(num_trays=3) as head:
        tray = await join(head, hello(1, world_size=6))
        with caplog.at_level("INFO"), pytest.raises(TimeoutError):
            await head.server.gather(0.5)
        assert "waiting for tray 0 (ranks 0..1), tray 2 (ranks 4..5)" in caplog.text
        await tray.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * 64,
        b"\xff" * 64,
        struct.pack(">I", (1 << 20) + 1),
        struct.pack(">I", 40) + b"x" * 40,
    ],
)
async def test_garbage_is_closed_and_logged_and_a_tray_still_gets_in(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(num_trays=1) as head:
        reader, writer = await asyncio.open_connection("127.0.0.1", head.port)
        writer.write(garbage)
        assert len(await asyncio.wait_for(reader.read(), 5)) == 36  # the nonce, then the end
        writer.close()
        tray = await join(head, hello(0, world_size=2))
        assert len(await head.server.gather(5)) == 2
        await tray.close()
    assert "rendezvous: closed 127.0.0.1:" in caplog.text


async def test_a_tray_with_another_fleets_secret_is_not_heard() -> None:
    async with opened() as head:
        stranger = await connect(head, FleetSecret.create())
        stranger.send(encode(hello(0)))
        assert await is_closed(stranger)
        assert head.server.hellos == {} and head.heard == []
        await stranger.close()


async def test_slow_strangers_stall_nobody_and_are_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous_module, "HELLO_TIMEOUT_S", 0.5)
    async with opened(num_trays=1) as head:
        slow = [await asyncio.open_connection("127.0.0.1", head.port) for _ in range(20)]
        tray = await join(head, hello(0, world_size=2))
        assert len(await head.server.gather(0.4)) == 2
        for reader, writer in slow:
            await asyncio.wait_for(reader.read(), 5)
            writer.close()
        await tray.close()
    assert "no hello in time" in caplog.text


async def test_no_more_than_a_bounded_number_of_strangers_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "MAX_STRANGERS", 3)
    async with opened() as head:
        held = [await connect(head) for _ in range(3)]
        tray = await join(head, hello(0))  # takes the place of the first for a moment
        assert await is_closed(held[0])
        assert set(head.server.hellos) == {0}
        later = await connect(head)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(held[1].receive(), 0.2)
        for stranger in [*held, later, tray]:
            await stranger.close()


async def test_a_flood_of_strangers_keeps_no_tray_out_and_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(num_trays=1) as head:
        strangers = [await asyncio.open_connection("127.0.0.1", head.port) for _ in range(300)]
        tray = await join(head, hello(0, world_size=2))
        assert len(await head.server.gather(1.0)) == 2
        strangers += [await asyncio.open_connection("127.0.0.1", head.port) for _ in range(300)]
        assert set(head.server.hellos) == {0} and head.gone == []
        for _, writer in strangers:
            writer.close()
        await tray.close()
    assert len(caplog.messages) <= 20


async def test_strangers_that_announce_a_megabyte_do_not_grow_memory() -> None:
    async with opened() as head:
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(200):
            _, writer = await asyncio.open_connection("127.0.0.1", head.port)
            writer.write(struct.pack(">I", 1 << 20) + b"x" * 1000)
            writer.close()
        await asyncio.sleep(0.2)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 20_000


async def test_what_an_admitted_tray_says_is_passed_on_and_its_end_is_noticed() -> None:
    async with opened() as head:
        tray = await join(head, hello(1))
        said: list[TrayToHead] = [Progress(rank=2, stage="load", fraction=0.5), Heartbeat(pulses=[])]
        for message in said:
            tray.send(encode(message))
        while len(head.heard) < 2:
            await asyncio.sleep(0.01)
        assert head.heard == [(1, message) for message in said]
        await tray.close()
        while not head.gone:
            await asyncio.sleep(0.01)
        assert head.gone == [1] and head.server.connected == set()


async def test_a_loss_before_any_hello_is_heard() -> None:
    async with opened() as head:
        tray = await connect(head)
        loss = Loss(rank=3, reason="exited with code 7", weight=ERROR)
        tray.send(encode(loss))
        assert await is_closed(tray)
        assert head.heard == [(-1, loss)]
        await tray.close()


async def test_a_frame_that_is_sent_twice_ends_the_connection() -> None:
    async with opened() as head:
        reader, writer = await asyncio.open_connection("127.0.0.1", head.port)
        nonce = await FrameStream(reader, writer).receive()
        assert nonce is not None
        payload = encode(hello(0))
        mac = SECRET.sign(nonce + b"tray" + struct.pack(">Q", 0), payload)  # written out, as another program would
        FrameStream(reader, writer).send(mac + payload)
        while not head.server.hellos:
            await asyncio.sleep(0.01)
        FrameStream(reader, writer).send(mac + payload)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        assert head.gone == [0]
        writer.close()


async def test_a_tray_does_not_take_its_own_frame_for_the_heads(tmp_path: Path) -> None:
    nonce = b"n" * 32
    path = tmp_path / "socket"
    served = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameStream(reader, writer)
        payload = await frames.receive()
        assert payload is not None
        frames.send(payload)
        await frames.close()
        served.set()

    async with await asyncio.start_unix_server(echo, path):
        reader, writer = await asyncio.open_unix_connection(path)
        tray = SignedStream(reader, writer, secret=SECRET, nonce=nonce, is_head=False)
        tray.send(b"x")
        with pytest.raises(FrameError, match="signature"):
            await tray.receive()
        await served.wait()
        await tray.close()
