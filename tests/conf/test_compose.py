"""conf/ against the schema: what Hydra composes becomes a FleetConfig, and a wrong key does not."""

import pytest

from pegahpc.config import ConfigError, compose_fleet


def test_the_default_is_the_shipped_model_on_two_trays_of_two_ranks() -> None:
    fleet = compose_fleet([])
    assert (fleet.topology.num_trays, fleet.topology.ranks_per_tray, fleet.topology.ep_size) == (2, 2, 4)
    assert fleet.model.name == "tiny-moe" and fleet.model.max_model_len == 512
    assert fleet.engine.page_tokens == 16


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8, 16, 32, 64])
def test_each_topology_has_as_many_ranks_as_its_name_says(ep_size: int) -> None:
    assert compose_fleet([f"topology=ep{ep_size}"]).topology.world_size == ep_size


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.num_expert=4", "num_expert"),
        ("topology=ep3", "topology/ep3"),
        ("topology.num_trays=3", r"topology.ep_size: 4 is not num_trays \* ranks_per_tray = 3 \* 2 = 6"),
        ("topology.role=decode", "topology.role: 'decode' is none of mixed"),
        ("engine.page_tokens=48", "engine.page_tokens: 48 is not a power of two"),
        ("engine.page_tokens=many", "engine.page_tokens: Value 'many'.* could not be converted"),
        ("engine.dispatcher=smoke", "engine.dispatcher: 'smoke' is none of"),
        ("fleet.name=../up", "fleet.name: '../up' must be"),
        ("gateway.port=70000", "gateway.port: 70000 is not in 0..65535"),
        ("gateway.affinity_load_bound=-1", "gateway.affinity_load_bound: -1 is below 0"),
        ("gateway.cors_origins=[https://a.org/]", "gateway.cors_origins: 'https://a.org/' is no origin; write scheme:"),
        ("model=checkpoint", "model.path: "),
        ("+gateway.prt=3", r"gateway.prt: keys are neither added \(\+\) nor removed"),
        ("++gateway.prt=3", "gateway.prt: keys are neither added"),
        ("~gateway.port", "gateway.port: keys are neither added"),
    ],
)
def test_a_bad_value_is_refused_by_its_key(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compose_fleet([override])


def test_the_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGAHPC_HOME", "/somewhere/else")
    assert str(compose_fleet(["fleet.name=a"]).folder) == "/somewhere/else/fleets/a"


def test_of_a_group_without_such_an_option_the_options_are_named_and_no_paths() -> None:
    with pytest.raises(ConfigError) as refused:
        compose_fleet(["topology=ep3"])
    said = str(refused.value)
    assert "topology/ep3" in said and "ep16" in said and "provider" not in said and "search path" not in said
