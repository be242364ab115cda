"""The registry: what it chooses, and what it says when it cannot."""

import pytest
import torch

from pegahpc.kernels import native
from pegahpc.kernels.registry import Place, backends_of, choose, ops, register, select
from pegahpc.kernels.selected import MADE, REFERENCE, Kernels, select_kernels

CPU = Place(device=torch.device("cpu"))
BFLOAT16 = Place(device=torch.device("cpu"), dtype=torch.bfloat16)


def test_the_engine_has_a_field_for_every_op() -> None:
    assert ops() == sorted(Kernels.__dataclass_fields__)


def test_every_op_has_a_reference_that_runs_everywhere() -> None:
    assert sorted(REFERENCE) == ops()
    for op, backend in REFERENCE.items():
        for place in (CPU, BFLOAT16, Place(device=torch.device("cuda:0"), row_invariant=True)):
            assert backend in backends_of(op, place)


def test_an_unknown_backend_is_answered_with_those_that_exist() -> None:
    with pytest.raises(LookupError, match=r"rms_norm: no backend 'apex'; there are \['aten', 'native', 'torch'\]"):
        choose("rms_norm", CPU, "apex")


def test_an_unknown_op_is_answered_with_the_known_ops() -> None:
    with pytest.raises(LookupError, match=r"no kernel for op 'softmax'; known ops: \['experts'"):
        choose("softmax", CPU)
    assert backends_of("softmax", CPU) == []


def test_a_backend_that_cannot_run_here_is_refused_by_name() -> None:
    with pytest.raises(LookupError, match=r"matmul_rows: backend 'mm' does not run on .*row_invariant=True"):
        choose("matmul_rows", Place(device=torch.device("cpu"), row_invariant=True), "mm")


def test_the_compiled_kernels_serve_float32_on_one_cpu_thread_only() -> None:
    if native.library() is None:
        pytest.skip("needs a C compiler")
    places = (BFLOAT16, Place(device=torch.device("cpu"), num_threads=2), Place(device=torch.device("cuda:0")))
    for op in {*MADE, "rms_norm", "latent_attention"}:
        assert "native" in backends_of(op, CPU)
        assert all("native" not in backends_of(op, place) for place in places)


def test_auto_takes_the_highest_priority_that_runs_here() -> None:
    assert choose("matmul_rows", CPU) == "even"
    assert choose("matmul_rows", Place(device=torch.device("cuda:0"))) == "mm"
    assert choose("matmul_rows", Place(device=torch.device("cuda:0"), row_invariant=True)) == "torch"
    assert choose("rms_norm", BFLOAT16) == "torch"


def test_a_backend_is_registered_once() -> None:
    with pytest.raises(KeyError, match="rms_norm: backend 'torch' is registered twice"):
        register("rms_norm", "torch")(lambda: None)


def test_selected_kernels_follow_the_pins_and_leave_the_rest_to_auto() -> None:
    kernels = select_kernels(CPU, {"matmul_rows": "torch"})
    assert kernels.matmul_rows is select("matmul_rows", CPU, "torch")
    assert kernels.rms_norm is select("rms_norm", CPU)
    with pytest.raises(LookupError, match=r"^silu_and_mul: no backend 'none'"):
        select_kernels(CPU, {"silu_and_mul": "none"})
