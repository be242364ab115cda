"""A rank process: `python -P -m pegahpc.launch.rank`, started by its tray with a socket as standard input.

In order: bind the request port, meet the others, connect the collectives, load, say ready, step until told to stop.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pegahpc.checkpoint.files import CheckpointError
from pegahpc.config import ConfigError
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.messages import CONSEQUENCE, ERROR, REFUSAL, Pulse, RankBoot, RankRecord
from pegahpc.launch.rank_link import RankLink, take_stdin
from pegahpc.log_lines import configure_logging
from pegahpc.models.fields import UnsupportedModel
from pegahpc.wire.keys import FleetSecret
from pegahpc.wire.sockets import RankSocket

if TYPE_CHECKING:
    from pegahpc.engine.status import StatusBlock
    from pegahpc.moe.dispatch import Dispatcher
    from pegahpc.moe.fabric import FabricPort

log = logging.getLogger("pegahpc.launch.rank")  # __name__ is __main__ here


def main() -> None:
    """Run one rank; its last word to the tray is why it ended."""
    configure_logging()
    link = RankLink(take_stdin())
    try:
        _serve(link)
    except Exception as error:  # the process's border: everything is logged, told to the tray, and ends the rank
        log.exception("rank %d failed", link.boot.context.rank)
        link.complain(*_in_one_line(error))
        _leave(1)
    _leave(0)


def _leave(exit_code: int) -> NoReturn:
    """End now. To take torch apart Python needs a second or more, and what is left the kernel takes back."""
    logging.shutdown()
    os._exit(exit_code)


def _serve(link: RankLink) -> None:
    boot, context = link.boot, link.boot.context
    with RankSocket(context.bind_host, FleetSecret.load(Path(boot.secret_path))) as wire:
        link.report("boot", 0.0)
        port = _open_port(boot)
        link.join(
            RankRecord(
                rank=context.rank,
                wire_endpoint=wire.endpoint,
                device=context.device,
                process=ProcessId.own(),
                slab=port.address if port else "",
            )
        )
        # torch takes a second or more to import: here, while the trays meet, and never in a tray
        from pegahpc.engine.build import build_engine

        gc.freeze()  # what imports made stays: a collection that looked through it took 80 ms, in the load or a step
        link.report("rendezvous", 0.0)
        world = link.wait_for_world(boot.fleet.fleet.rendezvous_timeout_s)
        dispatcher = _connect(link, port, [record.slab for record in world.records])
        link.report("load", 0.0)
        engine = build_engine(boot.fleet, context, dispatcher=dispatcher, progress=link.report)
        link.publish(_pulse_reader(context.rank, engine.status))
        link.report("ready", 1.0)
        if link.wait_to_go(boot.fleet.fleet.ready_timeout_s):
            engine.run(wire, link.is_stopping)
        dispatcher.close()
    log.info("rank %d left with the fleet", context.rank)


def _open_port(boot: RankBoot) -> FabricPort | None:
    """Where the others fetch this rank's slab; its address travels with the hello."""
    if boot.fleet.engine.dispatcher != "fabric":
        return None
    from pegahpc.engine.build import slab_shape
    from pegahpc.moe.fabric import FabricPort

    return FabricPort(boot.context.rank, slab_shape(boot.fleet))


def _connect(link: RankLink, port: FabricPort | None, slabs: list[str]) -> Dispatcher:
    """The configured dispatcher, joined with its peers on all ranks at once."""
    fleet, context, num_experts = link.boot.fleet, link.boot.context, link.boot.num_experts
    if port is not None:
        from pegahpc.moe.dispatch_fabric import FabricDispatcher

        return FabricDispatcher.connect(port, slabs, timeout_s=fleet.fleet.ready_timeout_s)
    if fleet.engine.dispatcher == "local":
        from pegahpc.moe.dispatch import LocalDispatcher

        return LocalDispatcher(num_experts)
    from pegahpc.launch.store import share_store
    from pegahpc.moe.collectives_torch import TorchCollectives
    from pegahpc.moe.dispatch_collective import CollectiveDispatcher

    store = share_store(link, fleet.fleet.rendezvous_timeout_s)
    collectives = TorchCollectives(  # its bound holds for every exchange, the first of which waits for the slowest load
        store, rank=context.rank, world_size=context.world_size, timeout_s=fleet.fleet.ready_timeout_s
    )
    return CollectiveDispatcher(collectives, num_experts=num_experts)


def _pulse_reader(rank: int, status: StatusBlock) -> Callable[[], Pulse]:
    def read() -> Pulse:
        return Pulse(
            rank=rank,
            step=status.step,
            exchange=status.exchange,
            phase=status.phase,
            waiting_for=status.waiting_for,
            num_running=status.num_running,
            num_waiting=status.num_waiting,
            phases=status.phases(),
        )

    return read


def _in_one_line(error: Exception) -> tuple[str, int]:
    """Reason and weight: what a user set or gave stands alone, a fault of ours names its type."""
    said = " ".join(str(error).split())
    if isinstance(error, ConfigError | CheckpointError | UnsupportedModel | FileNotFoundError | PermissionError):
        return said, REFUSAL
    is_peers_fault = isinstance(error, RuntimeError) and "gloo" in said  # torch has no type for a peer that is gone
    return f"failed with {type(error).__name__}: {said}", CONSEQUENCE if is_peers_fault else ERROR


if __name__ == "__main__":
    main()
