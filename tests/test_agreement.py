"""Ranks that were given different things are told apart before a model loads, and what may differ is quiet."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from forks import forked
from peft import LoraConfig
from store_host import RANKS, StoreHost, topology_of
from torch.distributed import HashStore
from trl import RLOOConfig

from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode import GRPOConfig, must_agree
from trl_multinode.errors import ConfigurationError
from trl_multinode.run.facts import Disagreement, Facts, disagreements
from trl_multinode.run.meeting import Meeting
from trl_multinode.run.store import connect_store
from trl_multinode.run.topology import NodeShape, Topology
from trl_multinode.run.values import flat, shown, text_of
from trl_multinode.trainers import MultiNodeDistillationConfig, MultiNodeRLOOConfig

ROWS = [{"prompt": f"{i} + {i} =", "answer": 2 * i} for i in range(40)]


class Host:
    """The agreement of a `NodeHost`, with a real meeting."""

    def __init__(self, rank: int, store: StoreHost, topology: Topology | None = None):
        self.topology = topology or topology_of(rank)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        self._meeting = Meeting(self.topology, connect_store(self.topology, 0))
        self.agreement = self
        self.rank = SimpleNamespace(check_engines=lambda: None)

    def compare(self, facts: Facts) -> list[Disagreement]:
        return disagreements(self._meeting, facts)


def compared(
    tmp_path: Path, store: StoreHost, given: Callable[[int], tuple[Any, dict]]
) -> list[list[str]]:
    """Return the error's text, or nothing, and the warnings of each rank, which is `given` a config and arguments."""

    def body(rank: int) -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("trl_multinode").addHandler(handler)
        args, call = given(rank)
        try:
            must_agree.check_agreement(Host(rank, store), args, call)
        except ConfigurationError as error:
            return [str(error), *said]
        return ["", *said]

    with forked(body, RANKS, tmp_path) as ranks:
        return [rank.result for rank in ranks]


def test_nodes_that_differ_are_no_disagreement_and_each_rank_learns_all_of_them(tmp_path, store):
    """Three ranks and one engine on node 0, one rank and none on node 1."""
    shapes = [NodeShape(3, 1, 1), NodeShape(1, 0, 0)]

    def body(rank: int) -> list[str]:
        node = int(rank == 3)
        place = Topology(rank, 4, rank % 3, shapes[node].ranks, node, 2, launched=False)
        place.assume(shapes[node])
        must_agree.check_agreement(Host(rank, store, place), config(), call())
        return [*map(str, place.nodes), place.name_of(3), place.name_of(2)]

    with forked(body, RANKS, tmp_path) as ranks:
        found = [rank.result for rank in ranks]
    assert found == [[*map(str, shapes), "rank 3 (node 1)", "rank 2 (node 0)"]] * 4


def config(kind: type = GRPOConfig, **values: Any) -> Any:
    return kind(**{"output_dir": "run", "use_cpu": True, "bf16": False, "report_to": []} | values)


def call(**values: Any) -> dict[str, Any]:
    data, lora = Dataset.from_list(ROWS), LoraConfig(r=8)
    given = {
        "model": MODEL,
        "reward_funcs": [len],
        "processing_class": TOKENIZER,
        "train_dataset": data,
    }
    return given | {"peft_config": lora} | values


MODEL, TOKENIZER = tiny_qwen2(), tiny_tokenizer()


def last(rank: int) -> bool:
    return rank == RANKS - 1


def changed_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    return tokenizer


def changed_model():
    model = tiny_qwen2()
    model.config.rope_theta = 5.0
    model.config.hidden_act = "gelu"
    return model


def other_rows(row: int, **values: Any) -> Dataset:
    rows = [dict(one) for one in ROWS]
    rows[row] |= values
    return Dataset.from_list(rows)


# what only the last rank has: config, call -> what the error names
DIFFERENT: dict[str, tuple[dict, Callable[[], dict], list[str]]] = {
    "learning rate": ({"learning_rate": 3e-4}, dict, ["(1e-06 on ranks 0, 1, 2", "0.0003 on rank 3"]),
    "seed": ({"seed": 7}, dict, ["`seed`", "7 on rank 3 of node 1"]),
    "a part of a dict": ({"lr_scheduler_kwargs": {"b": 2}}, dict, ["`lr_scheduler_kwargs`", "nothing on ranks"]),
    "output_dir": ({"output_dir": "run2"}, dict, ["`output_dir`", "/run2 on rank 3"]),
    "ours": ({"max_staleness": 1}, dict, ["`max_staleness`", "1 on rank 3"]),
    "a setting of the node": ({"num_engines": 2}, dict, ["`num_engines`", "null on rank 2", "2 on rank 3"]),
    "dtype": ({"engine_kwargs": {"dtype": "float16"}}, dict, ["`dtype` in `engine_kwargs` (", "float16 on rank 3"]),
    "model": ({}, lambda: {"model": changed_model()}, ["model config.hidden_act", "gelu on rank 3"]),
    "template": ({}, lambda: {"processing_class": changed_tokenizer()}, ["chat template", "messages"]),
    "adapter": ({}, lambda: {"peft_config": LoraConfig(r=4)}, ["adapter default.r (8 on ranks 0, 1, 2", "4 on"]),
    "an adapter": ({}, lambda: {"peft_config": None}, ["adapter default.", "nothing on rank 3"]),
    "rewards": ({}, lambda: {"reward_funcs": [len, max]}, ["`reward_funcs`", "max"]),
    "tools": ({}, lambda: {"tools": [abs]}, ["`tools`", "abs"]),
    "fewer rows": ({}, lambda: {"train_dataset": Dataset.from_list(ROWS[:12])}, ["`train_dataset`.rows (40", "12 on"]),
    "columns": ({}, lambda: {"train_dataset": Dataset.from_list(ROWS).remove_columns("answer")}, ["columns"]),
    "one row": ({}, lambda: {"train_dataset": other_rows(17, answer=5)}, ["row 17 of `train_dataset`", '"answer": 5']),
    "an evaluation": ({}, lambda: {"eval_dataset": {"a": Dataset.from_list(ROWS)}}, ["`eval_dataset"]),
    "a token in a dict": (
        {"engine_kwargs": {"hf_token": "precious"}}, dict, ["`engine_kwargs`.hf_token", "(hidden, "],
    ),
    "a list": ({}, lambda: {"train_dataset": ROWS[::-1]}, ["`train_dataset`"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_named_with_values_ranks_and_nodes_on_every_rank(tmp_path, store, name):
    values, more, named = DIFFERENT[name]

    def given(rank: int) -> tuple[Any, dict]:
        return (config(**values), call(**more())) if last(rank) else (config(), call())

    found = compared(tmp_path, store, given)
    texts = {text for text, *_ in found}
    assert len(texts) == 1, "every rank has the same error"
    (text,) = texts
    assert all(part in text for part in named), text
    assert "precious" not in text


def test_an_order_that_differs_by_process_names_rows(tmp_path, store):
    """The case of a shuffle without a seed: each node has the same rows in another order."""

    def given(rank: int) -> tuple[Any, dict]:
        data = Dataset.from_list(ROWS)
        return config(), call(train_dataset=data.shuffle(seed=rank // 2))

    found = compared(tmp_path, store, given)
    assert len({text for text, *_ in found}) == 1
    assert found[0][0].count("of `train_dataset`") >= 2 and "ranks 2, 3 of node 1" in found[0][0]


@dataclass
class OwnConfig(GRPOConfig):
    host_name: str = ""
    judge_api_key: str = ""


class Unprintable:
    def __init__(self, rank: int):
        self.rank = rank


@dataclass
class Judge:
    url: str

    def __call__(self, completions, **_):
        return [0.0] * len(completions)


def used_tokenizer(rank: int):
    tokenizer = tiny_tokenizer()
    if rank == 0:
        tokenizer(["a b", "a"], truncation=True, padding=True, max_length=2)
    return tokenizer


def nested_model(rank: int):
    model = tiny_qwen2()
    model.config.vision_config = {"_name_or_path": f"/copy{rank // 2}", "depth": 2}
    return model


def mapped_over_an_object(rank: int) -> Dataset:
    state = Unprintable(rank)
    return Dataset.from_list(ROWS).map(lambda row: row | {"seen": state is not None})


def with_random_transform(rank: int) -> Dataset:
    data = mapped_over_an_object(rank)
    data.set_transform(
        lambda batch: {name: values[::-1] if rank else values for name, values in batch.items()}
    )
    return data


# rank -> values of the config, values of the call; nothing of it is an error
QUIET: dict[str, Callable[[int], tuple[dict, dict]]] = {
    "nothing": lambda rank: ({}, {}),
    "report_to and names": lambda rank: ({"report_to": [] if rank else ["tensorboard"], "run_name": f"{rank}"}, {}),
    "bars and workers": lambda rank: ({"disable_tqdm": rank > 0, "dataloader_num_workers": rank}, {}),
    "settings of the node": lambda rank: (
        {"num_engines": 1 + rank // 2, "engine_kwargs": {"max_num_seqs": 1 + rank // 2}}, {},
    ),
    "a device of its own": lambda rank: ({"model_init_kwargs": {"device_map": {"": rank}, "dtype": "float32"}}, {}),
    "a reward with its node's URL": lambda rank: ({}, {"reward_funcs": [Judge(f"http://host{rank // 2}")]}),
    "only rank 0 tokenized the dataset": lambda rank: ({}, {"processing_class": used_tokenizer(rank)}),
    "a nested config of another copy": lambda rank: ({}, {"model": nested_model(rank)}),
    "own folders": lambda rank: ({"save_on_each_node": True, "output_dir": f"run{rank // 2}"}, {}),
    "a map over an object": lambda rank: ({}, {"train_dataset": mapped_over_an_object(rank)}),
    "a random transform": lambda rank: ({}, {"train_dataset": with_random_transform(rank)}),
    "no dataset of several": lambda rank: ({}, {"eval_dataset": {}}),
    "a stream": lambda rank: ({}, {"train_dataset": Dataset.from_list(ROWS).to_iterable_dataset()}),
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
def test_what_may_differ_is_quiet(tmp_path, store, name):
    def given(rank: int) -> tuple[Any, dict]:
        values, more = QUIET[name](rank)
        return config(**values), call(**more)

    assert compared(tmp_path, store, given) == [[""]] * RANKS


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_copies_of_model_and_tokenizer_at_other_paths_are_compared_by_content(
    tmp_path, store, template
):
    for node in range(2):
        MODEL.save_pretrained(tmp_path / f"copy{node}")
        TOKENIZER.save_pretrained(tmp_path / f"copy{node}")
    copies = [str(tmp_path / f"copy{node}") for node in range(2)]

    def given(rank: int) -> tuple[Any, dict]:
        return config(), call(model=copies[rank // 2], processing_class=None)

    if template is None:
        assert compared(tmp_path, store, given) == [[""]] * RANKS
    else:
        (Path(copies[1]) / "chat_template.jinja").write_text(template)
        assert all(
            "tokenizer file chat_template.jinja" in text
            for text, *_ in compared(tmp_path, store, given)
        )


def test_a_field_of_the_users_own_class_and_a_patch_version_are_a_line_of_rank_0(
    tmp_path, store, monkeypatch
):
    versions = must_agree.local_versions()

    def given(rank: int) -> tuple[Any, dict]:
        if last(rank):
            monkeypatch.setattr(must_agree, "local_versions", lambda: versions | {"peft": "0.1"})
        return config(OwnConfig, host_name=f"host{rank}", judge_api_key=f"precious{rank}"), call()

    first, *others = compared(tmp_path, store, given)
    assert others == [[""]] * (RANKS - 1)
    assert first[0] == "" and "`host_name`" in first[1] and "version of peft" in first[1], first
    assert "`judge_api_key` ((hidden, " in first[1] and "precious" not in first[1]


def test_row_28_a_library_that_must_be_the_same_is_not(tmp_path, store, monkeypatch):
    versions = must_agree.local_versions()

    def given(rank: int) -> tuple[Any, dict]:
        if rank // 2:
            monkeypatch.setattr(must_agree, "local_versions", lambda: versions | {"vllm": "0.30.0"})
        return config(), call()

    found = compared(tmp_path, store, given)
    assert len({text for text, *_ in found}) == 1 and "version of vllm" in found[0][0], found
    assert "0.30 on ranks 2, 3 of node 1" in found[0][0]


def test_arguments_and_checkpoint_are_compared_again_when_training_begins(tmp_path, store):
    def body(rank: int) -> list[str]:
        host, texts = Host(rank, store), []
        for changes, resume in (
            ({}, None),
            ({"learning_rate": rank / 10}, None),
            ({}, f"checkpoint-{rank // 2}"),
        ):
            args = config()
            for name, value in changes.items():
                setattr(args, name, value)
            try:
                must_agree.check_training(host, args, resume)
                texts.append("")
            except ConfigurationError as error:
                texts.append(str(error))
        must_agree.check_training(
            host, config(save_on_each_node=True), f"run{rank // 2}/checkpoint-1"
        )
        return texts

    with forked(body, RANKS, tmp_path) as ranks:
        for quiet, changed, resumed in (rank.result for rank in ranks):
            assert quiet == "" and "`learning_rate`" in changed
            assert (
                "`resume_from_checkpoint` of `train`" in resumed
                and "checkpoint-1 on ranks 2, 3" in resumed
            )


def test_a_fact_that_one_rank_of_a_node_lacks_is_named_by_all(tmp_path, store):
    def body(rank: int) -> list[str]:
        host = Host(rank, store)
        facts = Facts(host.topology)
        for number in range(300):
            facts.add(f"fact {number}", number, by_node=number % 2 == 0)
        if rank == 2:
            del facts.texts["node1/", "fact 8"]
        return [str(one) for one in host.agreement.compare(facts)]

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.result for rank in ranks] == [
            ["fact 8 (nothing on rank 2 of node 1, 8 on rank 3 of node 1)"]
        ] * RANKS


@pytest.mark.parametrize("which", ["MAY_DIFFER", "MAY_DIFFER_BY_NODE"])
def test_every_exception_is_a_field(which):
    kinds = (GRPOConfig, MultiNodeRLOOConfig, MultiNodeDistillationConfig, RLOOConfig)
    known = {one.name for kind in kinds for one in fields(kind)}
    assert getattr(must_agree, which) <= known
    assert not must_agree.MAY_DIFFER & must_agree.MAY_DIFFER_BY_NODE


def test_texts_are_equal_exactly_if_the_values_are():
    assert text_of({"b": {2, 1}, "a": (1.0, None)}) == text_of({"a": [1.0, None], "b": {1, 2}})
    assert text_of(Unprintable(1)) == text_of(Unprintable(2)) == '"Unprintable"'
    assert text_of(float("nan")) == text_of(float("nan")) and text_of(1) != text_of(1.0)
    assert text_of(SimpleNamespace) == '"SimpleNamespace"' and text_of(len) == '"len"'
    assert text_of(b"ab") != text_of(b"ac")
    assert dict(flat("a", {"b": {"c": 1}, "d": []})) == {"a.b.c": "1", "a.d": "[]"}
    long = json.dumps(["x" * 500])
    assert shown(long) != shown(long + "y") and len(shown(long)) < 250


def test_a_single_process_compares_nothing():
    topology = Topology(0, 1, 0, 1, 0, 1, launched=False)
    assert disagreements(Meeting(topology, HashStore()), Facts(topology)) == []
