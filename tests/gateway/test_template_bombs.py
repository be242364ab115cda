"""A template or a chat that would take all time or memory ends within its bounds, and nobody else notices."""

import asyncio
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pegahpc.config import ConfigError
from pegahpc.gateway import template_pool
from pegahpc.gateway.errors import ApiError
from pegahpc.gateway.template_messages import Chat
from pegahpc.gateway.template_pool import TemplatePool
from pegahpc.gateway.text_files import check_text_files
from tests.gateway.conftest import TINY, Serve
from tests.gateway.fake_engine import updates_for

CPU_S = 0.3
BODY_BYTES = 1 << 16
PoolOf = Callable[[str], TemplatePool]
HI = Chat(messages=[{"role": "user", "content": "hi"}])
BOMB = Chat(messages=[{"role": "user", "content": "bomb"}] * 2)
PLAIN = "{{ messages[0].content }}"
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ (2 + messages | length) ** (10 ** 8) % 7 }}",
    "a loop over a string": "{% for a in ('x' * 99999) %}{% for b in ('x' * 99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
}
HUGE = {
    "repeated text": "{{ messages[0].content * 10 ** 10 }}",
    "a repeated list": "{{ [messages] * 10 ** 10 }}",
    "doubled text": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a width": "{{ messages[0].content.center(10 ** 10) }}",
    "a format": "{{ '%9999999999d' % 1 }}{{ '{:>9999999999}'.format(1) }}",
    "an indent": "{{ ((messages[0].content ~ '\\n') * 9999) | indent(10 ** 8) }}",
    "a replacement": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "a join": "{{ range(99999) | join('x' * 99999) }}",
    "a batch": "{{ [1] | batch(10 ** 10, 0) | list }}",
    "json": "{{ messages | tojson(indent=10 ** 10) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "more text than a chat can need": "{{ messages[0].content * 10 ** 6 }}",
    "lorem ipsum": "{{ lipsum(n=10 ** 8) }}",
}
QUADRATIC = (
    "{% for m in messages %}{% for n in messages %}{% if n.role == 'tool' %}{{ n }}{% endif %}{% endfor %}{% endfor %}x"
)


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolOf]:
    monkeypatch.setattr(template_pool, "CPU_S", CPU_S)
    pools = []

    def make(source: str) -> TemplatePool:
        pools.append(TemplatePool(source, {"bos_token": "<s>"}, max_body_bytes=BODY_BYTES))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if template_pool.COMMAND[-1] in child.cmdline()]


def bomb_in(source: str) -> str:
    """A template that is harmless for a chat of one message."""
    return "{% if messages | length > 1 %}" + source + "{% endif %}" + PLAIN


@pytest.mark.parametrize("source", {**ENDLESS, **HUGE}.values(), ids=list(ENDLESS) + list(HUGE))
def test_a_bomb_is_a_refusal_within_its_bounds_and_the_next_chat_is_rendered(pool_of: PoolOf, source: str) -> None:
    pool = pool_of(bomb_in(source))
    assert pool.render(HI) == "hi"
    with pytest.raises(ApiError) as raised:
        pool.render(BOMB)
    assert (raised.value.status, raised.value.body.code, raised.value.body.param) == (400, "template_limit", "messages")
    assert raised.value.body.message.startswith("messages: ")
    assert pool.render(HI) == "hi"


def test_the_bounds_are_the_kernels_and_those_of_the_body(pool_of: PoolOf) -> None:
    pool_of(PLAIN).warm_up()
    (worker,) = workers()
    limit, _ = resource.prlimit(worker.pid, resource.RLIMIT_AS)
    assert (256 << 20) < limit < (512 << 20)
    assert resource.prlimit(worker.pid, resource.RLIMIT_NOFILE) == (0, 0)


def test_a_chat_that_a_quadratic_template_cannot_take_is_a_refusal(pool_of: PoolOf) -> None:
    pool = pool_of(QUADRATIC)
    assert pool.render(Chat(messages=[{"role": "user", "content": "a"}] * 30)) == "x"
    with pytest.raises(ApiError, match="CPU time"):
        pool.render(Chat(messages=[{"role": "user", "content": "a"}] * 30_000))


@pytest.mark.parametrize("source", ["{{ 3 ** (10 ** 8) }}", "{{ ('a\\n' * 9999) | indent(10 ** 8) }}"])
def test_constants_that_explode_when_they_are_folded_are_found_before_the_weights_are_read(
    tmp_path: Path, pool_of: PoolOf, source: str
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% if 0 %}" + source + "{% endif %}")
    with pytest.raises(ConfigError, match=r"model\.path: .*it takes more than"):
        check_text_files(tmp_path)
    with pytest.raises(ApiError) as raised:
        pool_of(source).render(HI)
    assert (raised.value.status, raised.value.body.code) == (500, "template_failed")


async def test_bombs_of_many_clients_hold_up_no_stream_and_cost_no_thread(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_pool, "CPU_S", CPU_S)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(bomb_in(ENDLESS["a power"]))
    async with serve(f"model.path={tmp_path}") as served:
        served.engine.script = lambda request: updates_for(request, [[70]] * 50)
        served.engine.pause_s = 0.01
        bombs = [asyncio.create_task(served.chat(messages=BOMB.messages)) for _ in range(4)]
        longest_s = await longest_turn_s(until=bombs)
        assert [(status, body["error"]["code"]) for status, body in map(asyncio.Task.result, bombs)] == [
            (400, "template_limit")
        ] * 4
        assert longest_s < 1  # a power holds the interpreter for as long as it takes
        answers = await asyncio.gather(*(served.chat() for _ in range(4)))
        assert [status for status, _ in answers] == [200] * 4


async def longest_turn_s(until: list[asyncio.Task[tuple[int, dict[str, object]]]]) -> float:
    """The longest time that the event loop, which is also the gateway's, took for a turn."""
    longest_s = 0.0
    while not all(task.done() for task in until):
        began_s = time.monotonic()
        await asyncio.sleep(0.01)
        longest_s = max(longest_s, time.monotonic() - began_s)
    return longest_s


def test_processes_that_are_killed_are_replaced_and_no_chat_fails(pool_of: PoolOf) -> None:
    pool = pool_of(PLAIN)
    for _ in range(2):
        pool.warm_up()
        for worker in workers():
            worker.kill()
        assert pool.render(HI) == "hi"


def test_a_process_that_stands_still_is_one_failed_chat_and_is_replaced(
    pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_pool, "WALL_S", 1.0)
    pool = pool_of(PLAIN)
    pool.warm_up()
    (worker,) = workers()
    worker.suspend()
    with pytest.raises(ApiError) as raised:
        pool.render(HI)
    assert (raised.value.status, raised.value.body.code) == (503, "template_lost")
    assert not worker.is_running()
    assert pool.render(HI) == "hi"


def test_closing_ends_a_bomb_that_runs(pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_pool, "CPU_S", 60.0)
    pool = pool_of(bomb_in(ENDLESS["a power"]))
    pool.warm_up()
    (worker,) = workers()
    statuses: list[int] = []

    def render() -> None:
        with pytest.raises(ApiError) as raised:
            pool.render(BOMB)
        statuses.append(raised.value.status)

    thread = threading.Thread(target=render)
    thread.start()
    while worker.status() != psutil.STATUS_RUNNING:
        time.sleep(0.01)
    pool.close()
    thread.join(5)
    assert statuses == [503] and not workers()
    with pytest.raises(ApiError):
        pool.render(HI)


PARENT = """
import psutil
from pegahpc.gateway import template_pool
from pegahpc.gateway.template_messages import Chat
template_pool.CPU_S = 60.0
pool = template_pool.TemplatePool("{{ (2 + messages | length) ** (10 ** 8) % 7 }}", {}, max_body_bytes=1024)
pool.warm_up()
print(psutil.Process().children()[0].pid, flush=True)
pool.render(Chat(messages=[]))
"""


def test_a_bomb_dies_with_the_process_that_waits_for_it() -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        while worker.cpu_times().user < 0.3:
            time.sleep(0.01)
        parent.kill()
        psutil.wait_procs([worker], timeout=5)
        assert not worker.is_running()
