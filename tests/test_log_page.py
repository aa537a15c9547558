"""docs/log.md names each metric of TRL that a run logs; tests/reporting/test_step_metrics.py has this library's."""

import inspect
import re

import transformers
from metric_names import PAGE, documented, documented_of_trl, general, of_transformers, of_trl, without_reading
from trl import GRPOTrainer

LOG_HISTORY = {"epoch"}  # transformers adds it to every log, outside the method that collects the others


def test_the_page_names_what_trl_and_transformers_log_and_nothing_else():
    trls = of_trl(inspect.getsource(inspect.getmodule(GRPOTrainer)))
    theirs = of_transformers(inspect.getsource(transformers.Trainer._maybe_log_save_evaluate))
    assert len(trls) > 30 and theirs == {"loss", "grad_norm", "learning_rate"}
    assert documented_of_trl() == trls | theirs | LOG_HISTORY


def test_a_name_of_trls_code_is_found():
    source = 'self._metrics[mode]["a/b"].append(1)\nself._metrics["train"]["c"].append(1)\n'
    assert of_trl(source + 'self._metrics[mode][f"rewards/{name}/mean"].append(x)') == {
        "a/b",
        "c",
        "rewards/<name>/mean",
    }


def test_every_metric_has_a_reading():
    assert without_reading() == []


def test_no_metric_has_two_rows():
    assert not documented() & documented_of_trl()


def test_the_questions_use_names_of_the_tables():
    (part,) = [part for part in PAGE.read_text().split("\n## ") if part.startswith("Read a run by its log\n")]
    rows = [line.split(" | ")[1] for line in part.splitlines() if line.startswith("| ") and "`" in line]
    names = {general(name) for row in rows for name in re.findall(r"`([\w<>/]+)`", row)}
    assert len(names) > 15 and names <= documented() | documented_of_trl()
