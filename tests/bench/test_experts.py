"""Expert load from two scrapes, against numbers worked out by hand."""

from pegahpc.bench.experts import counts_of, expert_load, read_counts
from pegahpc.wire.messages import ExpertLoads, LayerExperts


def exposition(rows: dict[tuple[int, int], int], seen: dict[int, int], steps: dict[int, int]) -> str:
    lines = ["# TYPE pegahpc:expert_rows counter"]
    lines += [f'pegahpc:expert_rows_total{{layer="{layer}",expert="{e}"}} {n}' for (layer, e), n in rows.items()]
    lines += ["# TYPE pegahpc:experts_seen counter"]
    lines += [f'pegahpc:experts_seen_total{{layer="{layer}"}} {n}' for layer, n in seen.items()]
    lines += ["# TYPE pegahpc:moe_steps counter"]
    lines += [f'pegahpc:moe_steps_total{{layer="{layer}"}} {n}' for layer, n in steps.items()]
    return "\n".join(lines) + "\n"


BEFORE = exposition({(1, 0): 5, (1, 1): 5, (2, 0): 0, (2, 1): 0}, {1: 4, 2: 0}, {1: 2, 2: 0})
AFTER = exposition({(1, 0): 35, (1, 1): 15, (2, 0): 40, (2, 1): 0}, {1: 34, 2: 20}, {1: 22, 2: 20})


def test_imbalance_and_distinct_experts_are_of_the_time_between_the_scrapes() -> None:
    """Layer 1: 30 and 10 rows, so 30 / 20; 30 experts seen in 20 steps. Layer 2: all 40 rows to one, 20 in 20 steps."""
    load = expert_load(read_counts(BEFORE), read_counts(AFTER))
    assert load is not None
    assert [(each.layer, each.rows, each.imbalance, each.distinct_experts) for each in load.layers] == [
        (1, 40, 1.5, 1.5),
        (2, 40, 2.0, 1.0),
    ]
    assert (load.distinct_experts, load.imbalance, load.worst_imbalance) == (1.25, 1.75, 2.0)


def test_a_server_without_these_counters_reports_no_load() -> None:
    assert read_counts(None) is None and read_counts("# TYPE up gauge\nup 1\n") is None
    assert expert_load(None, read_counts(AFTER)) is None


def test_a_time_without_rows_has_no_load() -> None:
    assert expert_load(read_counts(AFTER), read_counts(AFTER)) is None


def test_counters_that_appear_in_between_count_from_zero() -> None:
    load = expert_load(read_counts(exposition({(1, 0): 1}, {}, {})), read_counts(AFTER))
    assert load is not None and [each.rows for each in load.layers] == [49, 40]


def test_what_ranks_tell_on_the_wire_counts_like_what_the_gateway_exposes() -> None:
    """Two ranks, two experts each, of one layer; steps are the fleet's, the newest that any rank told."""
    ranks = [
        ExpertLoads(num_steps=4, first_expert=0, layers=[LayerExperts(1, [5, 0], 3)]),
        ExpertLoads(num_steps=5, first_expert=2, layers=[LayerExperts(1, [2, 7], 6)]),
    ]
    load = expert_load({}, counts_of(ranks))
    assert load is not None
    (layer,) = load.layers
    assert (layer.rows, layer.imbalance, layer.distinct_experts) == (14, 2.0, 1.8)  # 7 over 14 / 4; 9 over 5
