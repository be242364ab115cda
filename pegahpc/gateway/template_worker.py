"""The process in which a chat template runs: the kernel bounds its CPU time and memory, whatever it does.

Nothing inside the interpreter could: one call of a C function (`'x' * 10**10`, `'%9999999999d'`, a replace) takes all
memory or hours at once, and threads cannot be ended. Past its CPU time this process is killed by SIGPROF, also in the
middle of such a call; past its memory it gets a MemoryError. It ends when its standard input does, or with its parent.
"""

from __future__ import annotations

import contextlib
import pprint
import resource
import signal
import sys
import textwrap
import time
from collections.abc import Iterator

from jinja2 import constants, debug

from pegahpc.gateway.template_messages import (
    Chat,
    Outcome,
    Refused,
    Rendered,
    TemplateSetup,
    TooMuch,
    decode_chat,
    decode_setup,
    encode,
)
from pegahpc.gateway.templates import ChatTemplate, TemplateRefusal
from pegahpc.parent_death import die_with_parent

LATE_IMPORTS = (
    constants,
    debug,
    pprint,
    textwrap,
)  # jinja2 imports them when they are used, and then no file can be opened


def main() -> None:
    """Answer each line until there is none."""
    die_with_parent()  # also in the middle of a call
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the gateway, which drains
    setup = decode_setup(sys.stdin.buffer.readline())
    _bound_memory(setup.memory_bytes)
    with _bounded_time(setup.cpu_s):
        template = _compile(setup)
    if not isinstance(template, ChatTemplate):
        return _say(template)
    _close_the_door()
    _say(Rendered(""))
    for line in sys.stdin.buffer:
        with _bounded_time(setup.cpu_s):
            outcome = _render(template, decode_chat(line), setup.max_chars)
        _say(outcome)


def _compile(setup: TemplateSetup) -> ChatTemplate | Outcome:
    try:
        return ChatTemplate(setup.source, setup.special_tokens)
    except MemoryError:
        return TooMuch("the memory that it may have")
    except Exception as error:  # constants are folded, so anything that a template can raise
        return Refused("messages", _words(error))


def _render(template: ChatTemplate, chat: Chat, max_chars: int) -> Outcome:
    try:
        text = template.render(chat)
        if len(text) > max_chars:
            return TooMuch(f"{max_chars} characters")
        text.encode()  # a template can make halves of surrogate pairs, which are no text
        return Rendered(text)
    except TemplateRefusal as refusal:
        return Refused(refusal.param, str(refusal))
    except MemoryError:
        return TooMuch("the memory that it may have")
    except RecursionError:
        return TooMuch("the depth that it may have")
    except Exception as error:  # a template may raise anything
        return Refused("messages", f"the model's chat template refuses them: {_words(error)}")


def _words(error: Exception) -> str:
    return str(error).encode(errors="replace").decode() or type(error).__name__


def _say(outcome: Outcome) -> None:
    sys.stdout.buffer.write(encode(outcome) + b"\n")
    sys.stdout.buffer.flush()


@contextlib.contextmanager
def _bounded_time(cpu_s: float) -> Iterator[None]:
    """CPU time, not the clock's: a busy machine makes no template guilty."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _bound_memory(num_bytes: int) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))


def _close_the_door() -> None:
    """No file and no socket can be opened from here on, should a template ever leave the sandbox."""
    time.tzset()  # reads the zone's file, for strftime_now
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


if __name__ == "__main__":
    main()
