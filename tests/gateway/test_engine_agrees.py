"""The gateway and a real engine call a page by the same name: with two names no request would ever find its prefix."""

from engines import GREEDY, build, request, run

from pegahpc.config import compose_fleet
from pegahpc.gateway.model import ServedModel
from pegahpc.gateway.prefix_index import PrefixIndex
from pegahpc.wire.messages import KvEvents
from tests.gateway.conftest import TINY

NUM_EXPERTS = 16
PROMPT = [3 + idx % 200 for idx in range(50)]  # three full pages of 16


def test_pages_that_an_engine_stored_are_found_by_the_gateway_and_hit_as_far_as_it_says() -> None:
    fleet = compose_fleet([])
    model = ServedModel(fleet.model, default_max_tokens=1, page_tokens=fleet.engine.page_tokens, max_body_bytes=4096)
    engine = build(TINY, num_experts=NUM_EXPERTS)
    run(engine, [request("first", PROMPT, 2, GREEDY)])
    index = PrefixIndex(1)
    index.apply(0, KvEvents(stored=engine.scheduler.pool.names, is_snapshot=True))
    for prompt, num_pages in ((PROMPT, 3), (PROMPT[:48], 2), (PROMPT[:33] + [9] * 20, 2), ([9, *PROMPT], 0)):
        assert index.prefix_pages(model.prefix_names(prompt)).get(0, 0) == num_pages
        (update,) = [
            update
            for update in run(engine, [request(f"again-{len(prompt)}", prompt, 1, GREEDY)]).updates
            if update.scheduled is not None
        ]
        assert update.cached_tokens == 16 * num_pages
