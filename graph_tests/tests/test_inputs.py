import types

import pytest
import torch

from graph_tests.case import Case, Routing, cases_of
from graph_tests.inputs import InputError, InputMaker, pairs, reroute, routings

ROUTING = Routing(ids=1, num_experts=8, rows=0, padded=True, nan_rows=True)


def make(seed):
    return torch.full((6, 4), float(seed)), torch.arange(12).reshape(6, 2) % 8, seed


def maker(**options):
    case = Case(name="c", make_inputs=make, fn=lambda x, ids, n: x, **options)
    return InputMaker(case, case.callable(), None)


@pytest.mark.parametrize("constants", [(2,), ("n",)])
def test_constant_arguments_keep_the_first_value(constants):
    inputs = maker(constants=constants)
    assert inputs.make(5)[2] == 5
    assert inputs.make(6)[2] == 5 and float(inputs.make(6)[0][0, 0]) == 6.0


def test_constant_tensors_are_restored():
    scale = torch.tensor(3.0)
    inputs = maker(constants=(scale,))
    scale.fill_(9.0)
    inputs.make(0)
    assert float(scale) == 3.0


def test_an_unknown_constant_is_refused_in_words():
    with pytest.raises(InputError, match="'weight', but the callable's arguments are x, ids, n"):
        maker(constants=("weight",))


def test_routing_extremes_are_what_their_names_say():
    args = make(0)
    got = {name: reroute(args, ROUTING, name) for name in routings(ROUTING)}
    assert set(got) == {"balanced", "all-to-one", "reversed", "empty-expert", "duplicate", "padded", "nan-row"}
    assert got["all-to-one"][1].tolist() == [[0, 1]] * 6
    assert 7 not in got["empty-expert"][1] and 7 in got["balanced"][1]
    assert (got["duplicate"][1][:, 0] == got["duplicate"][1][:, 1]).all()
    assert got["padded"][1][1].tolist() == [-1, -1] and (got["padded"][1][0] >= 0).all()
    assert got["nan-row"][0][0].isnan().all() and not args[0].isnan().any()
    assert all(a[1].dtype == torch.int64 and a[1].shape == (6, 2) for a in got.values())


def test_shapes_that_change_with_the_seed_are_refused():
    with pytest.raises(InputError, match="seeds change values, never shapes"):
        list(pairs((torch.ones(2),), (torch.ones(3),)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fn": None}, "exactly one of fn and build"),
        ({"mode": "fast"}, "must be one of eager, compiled"),
        ({"layers": ("magic",)}, "no such layer"),
        ({"sizes": (1,), "warm_sizes": (2,)}, "are not in sizes"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Case(**{"name": "c", "make_inputs": make, "fn": make, **options})


def test_two_cases_of_one_name_are_refused():
    module = types.SimpleNamespace(__name__="m", cases=lambda: [Case("same", make, make), Case("same", make, make)])
    with pytest.raises(ValueError, match="several cases are called same"):
        cases_of(module)
