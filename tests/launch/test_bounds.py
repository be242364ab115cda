"""The worst case, added up: the waits that pass in full between a process that stands still and a fleet that is gone.

What dies on its own is seen at once (a closed socket, a child's end), so it waits for less than what stands still.
Not in the sums, because they are not waits of ours: the kernel ends what was killed (bounded by
`local.KILL_BOUND_S`, all of it together), writes to fleet.home, and Python leaving. The slack is for those.
"""

import pytest

from pegahpc.config import GatewayConfig
from pegahpc.gateway.boot import BEAT_S
from pegahpc.launch import gateway_child, head, local, tray
from pegahpc.launch.freeze import BOUND_SHARE
from pegahpc.launch.losses import GRACE_S
from pegahpc.launch.messages import HEARTBEAT_S

BOUND_S = 10.0  # from the moment on which the process stands still
SLACK_S = 1.5
STILL_S = GatewayConfig().stall_s * BOUND_SHARE
LOOK_S = HEARTBEAT_S  # head and trays look so often, and the last word before the freeze may be as old
FOLLOW_S = local.TICK_S + local.TRAYS_FOLLOW_S + local.TICK_S  # the launcher sees the head's end, then kills the rest
FAREWELL_S = max(gateway_child.FAREWELL_S, head.KILL_BOUND_S)  # side by side: clients are told, trays end their ranks

WAITS = {
    "tray 0, whatever it does: its launcher looks": (local.TICK_S, STILL_S, local.TICK_S),
    "another tray that has not said hello: its launcher looks": (local.TICK_S, STILL_S, local.TICK_S),
    "another tray: silent for the head, and never ends by itself": (STILL_S, LOOK_S, GRACE_S, FAREWELL_S, FOLLOW_S),
    "a rank that loads: its tray looks": (LOOK_S, STILL_S, LOOK_S, GRACE_S, FAREWELL_S, FOLLOW_S),
    "a rank that serves: silent for the head": (LOOK_S, STILL_S, LOOK_S, GRACE_S, FAREWELL_S, FOLLOW_S),
    "the gateway: silent for the head, and killed without a farewell": (
        BEAT_S, STILL_S, LOOK_S, GRACE_S, head.KILL_BOUND_S, FOLLOW_S,
    ),
    "the launcher: trays look, end with it, and the head ends it": (
        LOOK_S, STILL_S, LOOK_S, max(GRACE_S + FAREWELL_S, tray.PARENT_GONE_GRACE_S),
    ),
}  # fmt: skip


@pytest.mark.parametrize("who", WAITS)
def test_the_waits_for_whatever_stands_still_leave_time_for_the_rest(who: str) -> None:
    assert sum(WAITS[who]) <= BOUND_S - SLACK_S


def test_the_watch_of_the_head_is_late_by_one_look_at_most_though_it_is_held_up_itself() -> None:
    """A look that comes late is left out once; HEAD_LATE_S more is then in the sum, and the slack has it."""
    assert head.HEAD_LATE_S + 2 * HEARTBEAT_S <= SLACK_S
