"""`trl-multinode render`: errors of its command line, and what the templates may use."""

import signal

import pytest
from check_kit import CONFIGS

from trl_multinode.render.job import read_job
from trl_multinode.render.kinds import KINDS
from trl_multinode.render.template import TEMPLATES, fill, placeholders
from trl_multinode.run.preemption import grace_after

FILE = str(CONFIGS / "4node.yaml")


def test_a_template_leaves_the_shell_alone_and_indents_values():
    text = '  @{setup}\n  echo "$X ${Y[@]} $(z) @b" @{name}  # @{name}\n@{setup}\n'
    assert fill(text, {"setup": "a\nb", "name": "n"}) == '  a\n  b\n  echo "$X ${Y[@]} $(z) @b" n  # n\na\nb\n'
    assert fill(text, {"setup": "", "name": "n"}) == '  echo "$X ${Y[@]} $(z) @b" n  # n\n'
    with pytest.raises(KeyError, match="name"):
        fill(text, {"setup": ""})


def test_every_template_belongs_to_a_kind():
    assert {path.name for path in TEMPLATES.iterdir()} == {kind.template for kind in KINDS.values()}
    used = {kind.template: placeholders((TEMPLATES / kind.template).read_text()) for kind in KINDS.values()}
    assert all({"command", "summary"} <= names and {"launch", "start"} & names for names in used.values())


def test_the_limits_leave_the_grace_of_the_package():
    job = read_job(FILE, "train.py --preemption_grace=900")
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.launcher_s)}
    assert job.grace_s == grace_after(signal.SIGTERM, 900.0, environment) == 900.0
    assert job.kill_s > job.launcher_s
