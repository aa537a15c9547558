"""Where a rank stands, and which GPUs its node's engines get."""

import pytest
from refusals import refusal, refused

from trl_multinode.run.gpu_variables import visible_devices
from trl_multinode.run.topology import (
    EngineDevices,
    NodeShape,
    Topology,
    assign_engines,
    by_node,
    check_engines,
    shape_of,
)


def environment(rank: int, num_nodes: int, per_node: int) -> dict[str, str]:
    """What torchrun gives to a rank."""
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": num_nodes * per_node,
        "LOCAL_RANK": rank % per_node,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node,
        "GROUP_WORLD_SIZE": num_nodes,
    }
    return {name: str(value) for name, value in numbers.items()} | {"TORCHELASTIC_RUN_ID": "none"}


def node_of(ranks: int = 7, num_nodes: int = 4) -> Topology:
    """A rank of the second node."""
    return Topology.from_environment(environment(ranks, num_nodes, ranks))


def assign(
    gpus=8, ranks=7, devices=None, engines=None, tensor_parallel=1, environ=None
) -> EngineDevices:
    topology = node_of(ranks)
    found = assign_engines(topology, gpus, devices, engines, tensor_parallel, environ or {})
    topology.assume(shape_of(topology, found))
    check_engines(topology, gpus, environ or {})
    return found


def test_every_rank_of_a_launch_knows_its_place():
    places = [Topology.from_environment(environment(rank, 2, 3)) for rank in range(6)]
    assert [t.rank for t in places] == list(range(6))
    assert [(t.node, t.local_rank) for t in places] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert {(t.world_size, t.num_nodes, t.local_world_size, t.launched) for t in places} == {
        (6, 2, 3, True)
    }
    assert [t.is_local_main for t in places] == [True, False, False] * 2
    assert [list(t.local_ranks) for t in places] == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
    assert str(places[4]) == "node 1, rank 4"


def test_plain_python_is_one_rank_on_one_node():
    assert Topology.from_environment({}) == Topology(0, 1, 0, 1, 0, 1, launched=False)


def test_nodes_are_counted_where_the_launcher_does_not_say_them():
    environ = environment(5, 2, 4)
    del environ["GROUP_RANK"], environ["GROUP_WORLD_SIZE"]
    topology = Topology.from_environment(environ)
    assert (topology.node, topology.num_nodes) == (1, 2)


def test_a_launcher_that_does_not_say_how_many_ranks_a_node_has_is_refused():
    """DeepSpeed's own, which runs where `deepspeed_multinode_launcher: standard` was forgotten."""
    with refused("LOCAL_WORLD_SIZE", "`deepspeed_multinode_launcher: standard`"):
        Topology.from_environment({"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "14"})


def test_nodes_are_taken_to_be_alike_until_the_ranks_have_told_each_other():
    """A node with 3 of 5 ranks on 2 nodes knows that they differ, and names no node of another rank."""
    topology = Topology.from_environment(environment(0, 2, 3) | {"WORLD_SIZE": "5"})
    assert topology.name_of(4) == "rank 4" and list(topology.local_ranks) == [0, 1, 2]
    topology.learn({rank: NodeShape(3 if rank < 3 else 2) for rank in range(5)})
    assert topology.name_of(4) == "rank 4 (node 1)" and topology.name_of(2) == "rank 2 (node 0)"
    assert [list(topology.ranks_of(node)) for node in range(2)] == [[0, 1, 2], [3, 4]]
    assert topology.num_devices == 5 + 2


@pytest.mark.parametrize(
    ("numbers", "text"), [([7], "7"), ([7, 7], "7"), ([7, 8, 8, 8], "7, 3 x 8"), ([1, 2], "1, 2")]
)
def test_numbers_of_nodes_are_written_once_where_they_are_equal(numbers, text):
    assert by_node(numbers) == text


@pytest.mark.parametrize(
    ("listed", "num_gpus", "names"),
    [
        (None, 2, ["0", "1"]),
        ("4,6,7", 3, ["4", "6", "7"]),
        ("4, 6,7", 2, ["4", "6"]),
        ("GPU-ab,GPU-cd", 2, None),
    ],
)
def test_gpus_are_named_as_cuda_visible_devices_names_them(listed, num_gpus, names):
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_devices(environ, num_gpus) == (names or listed.split(","))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"gpus": 8, "ranks": 7}, (("7",),)),
        ({"gpus": 8, "ranks": 6}, (("6",), ("7",))),
        ({"gpus": 8, "ranks": 6, "tensor_parallel": 2}, (("6", "7"),)),
        ({"gpus": 8, "ranks": 4, "tensor_parallel": 2}, (("4", "5"), ("6", "7"))),
        ({"gpus": 8, "ranks": 4, "engines": 2}, (("4",), ("5",))),
        ({"gpus": 8, "ranks": 4, "devices": [7, 5]}, (("7",), ("5",))),
        ({"gpus": 4, "ranks": 3, "environ": {"CUDA_VISIBLE_DEVICES": "1,3,5,7"}}, (("7",),)),
    ],
)
def test_engines_get_the_gpus_that_no_local_rank_trains_on(choice, expected):
    devices = assign(**choice)
    assert (devices.per_engine, devices.shared_with_training) == (expected, False)


def test_a_training_gpu_may_be_named_so_that_a_machine_with_one_gpu_works():
    assert assign(gpus=1, ranks=1, devices=[0]) == EngineDevices(
        (("0",),), shared_with_training=True, sender="0"
    )
    unused = assign(gpus=8, ranks=7, devices=[7, 0], engines=1)  # no engine is on GPU 0
    assert unused.per_engine == (("7",),) and not unused.shared_with_training


def test_an_engine_sees_its_own_gpus_and_behind_them_the_senders_if_it_is_to_open_memory_there():
    devices = assign(gpus=8, ranks=6, environ={"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0"})
    assert devices.sender == "7"
    assert [devices.seen_by(i) for i in range(2)] == [("1",), ("0",)]
    assert [devices.seen_by(i, with_sender=True) for i in range(2)] == [("1", "7"), ("0", "7")]
    assert assign(gpus=1, ranks=1, devices=[0]).seen_by(0, with_sender=True) == ("0",)


@pytest.mark.parametrize(("engines", "expected"), [(None, ((),)), (2, ((), ()))])
def test_engines_on_a_cpu_have_no_devices(engines, expected):
    assert assign(gpus=0, engines=engines) == EngineDevices(expected, shared_with_training=False)


@pytest.mark.parametrize(
    ("choice", "identifiers"),
    [
        ({"gpus": 8, "ranks": 8}, ("node 1", "8 GPUs", "now 32", "28", "`vllm_devices`")),
        ({"devices": [8, 7, -1]}, ("[8, -1]", "node 1", "8 GPUs", "0 to 7")),
        ({"devices": [7, 7]}, ("[7, 7]",)),
        (
            {"gpus": 8, "ranks": 5, "tensor_parallel": 2},
            ("3 GPUs", "[5, 6, 7]", "`vllm_tensor_parallel_size` 2", "`num_processes`"),
        ),
        (
            {"gpus": 8, "ranks": 6, "engines": 3},
            (
                "3 engines",
                "`vllm_tensor_parallel_size` 1",
                "3 GPUs",
                "node 1: ",
                "has 2",
                "`num_engines`",
            ),
        ),
    ],
)
def test_devices_that_cannot_be_given_are_refused_with_the_numbers_and_the_setting(
    choice, identifiers
):
    message = str(refusal(assign, **choice))
    assert [identifier for identifier in identifiers if identifier not in message] == [], message


@pytest.mark.fault("29")
@pytest.mark.parametrize("choice", [{}, {"devices": [7]}])
def test_a_hidden_gpu_is_blamed_on_the_setting_that_hid_it(choice):
    hidden = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}
    message = str(refusal(assign, gpus=7, ranks=7, environ=hidden, **choice))
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6" in message and "`gpu_ids: all`" in message
