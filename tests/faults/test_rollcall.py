"""Faults before a launch: `trl-multinode launch` names what keeps the nodes from meeting, on every node."""

import asyncio
import json
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
import yaml
from forks import Rank, forked
from torch.distributed import TCPStore
from waiting import HANG_S, until

from multinode_kit.launch_files import free_port
from multinode_kit.namespaces import Namespaces, enter_node, namespaces_available
from trl_multinode.run.endings.exit_codes import CONFIGURATION, PEER_LOST
from trl_multinode.tools.check import check
from trl_multinode.tools.launch import meeting, node_flags, rollcall
from trl_multinode.tools.launch.attendance import Hello, Verdict, host_id
from trl_multinode.tools.launch.child import run_command
from trl_multinode.tools.launch.command import main
from trl_multinode.tools.launch.meeting import Place
from trl_multinode.tools.launch.rollcall import call
from trl_multinode.wire.supervisor import is_running

VERSIONS = {"torch": "2.13.0", "trl": "1.16.0", "vllm": "0.31.0", "peft": "0.21.2"}
A = Hello(rank=0, host="a", host_id="A", pid=10, nodes=2, processes=[7], gpus=8, versions=VERSIONS)
B = Hello(rank=1, host="b", host_id="B", pid=11, nodes=2, processes=[7], gpus=8, versions=VERSIONS)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(rollcall, "STRANGER_S", 1.0)
    for module in (rollcall, meeting):
        monkeypatch.setattr(module, "RETRY_S", 0.1)
    monkeypatch.setattr(rollcall, "QUIET_S", 0.0)
    for name in [
        name for name in os.environ if name.startswith(("PET_", "SLURM_", "TRL_MULTINODE_"))
    ]:
        monkeypatch.delenv(name)


@pytest.fixture
def place() -> Place:
    return Place(
        "127.0.0.1", free_port(), timeout_s=HANG_S, every_s=1.0, settle_s=0.3, linger_s=0.2
    )


def changed(hello: Hello, **values) -> Hello:
    return Hello(**{name: getattr(hello, name) for name in Hello.__struct_fields__} | values)


def meet(place: Place, *hellos: Hello) -> list[Verdict]:
    """All nodes in one process, each with its own connections. The first one holds the roll-call."""

    async def all_of_them() -> list[Verdict]:
        first = asyncio.create_task(call(place, hellos[0]))
        # a node whose roll-call has failed listens no more
        held = asyncio.create_task(until_held(place))
        await asyncio.wait({first, held}, return_when=asyncio.FIRST_COMPLETED)
        held.cancel()
        return await asyncio.gather(first, *(call(place, hello) for hello in hellos[1:]))

    return asyncio.run(all_of_them())


async def until_held(place: Place) -> None:
    """Wait until a node of this process, or another program of it, listens on the port."""
    process = psutil.Process()
    while not any(
        one.status == "LISTEN" and one.laddr.port == place.port
        for one in process.net_connections("tcp")
    ):
        await asyncio.sleep(0.01)


def error(place: Place, *hellos: Hello) -> tuple[int, str]:
    """Code and only line of a roll-call that fails in the same way on all nodes."""
    verdicts = meet(place, *hellos)
    assert len({(one.code, *one.lines) for one in verdicts}) == 1, verdicts
    return verdicts[0].code, verdicts[0].lines[0]


# ---- all are here


def test_the_launcher_has_the_port_as_soon_as_the_roll_call_is_over(tmp_path, place):
    """The store of torchrun, on the port of the roll-call, right after it and on every node."""

    def node(rank: int) -> list:
        verdict = asyncio.run(
            call(place, changed((A, B)[rank], host_id=host_id(), pid=os.getpid()))
        )
        store = TCPStore(
            "127.0.0.1", place.port, 2, is_master=rank == 0, timeout=timedelta(seconds=HANG_S)
        )
        store.set(f"here/{rank}", "")
        store.wait(["here/0", "here/1"])
        store.add("left", 1)
        while rank == 0 and store.add("left", 0) < 2:
            time.sleep(0.01)
        return [verdict.code, verdict.lines]

    with forked(node, 2, tmp_path) as nodes:
        (code, lines), other = (one.result for one in nodes)
        assert code == 0 and other == [code, lines]
        assert re.match(r"2 of 2 nodes here after \d+ s: 0 \(a\) 8 GPUs, 1 \(b\) 8 GPUs$", lines[0])
        assert (
            lines[1] == "versions on all nodes: torch 2.13.0, trl 1.16.0, vllm 0.31.0, peft 0.21.2"
        )


def test_nodes_with_other_numbers_of_ranks_meet_if_all_have_the_same_table(place):
    first, *others = meet(place, *(changed(hello, processes=[7, 6, 8]) for hello in THREE))
    assert others == [first] * 2 and first.code == 0
    assert not any("processes" in line for line in first.lines)


@pytest.mark.nightly
def test_a_roll_call_of_64_nodes_has_one_verdict(place):
    hellos = [
        changed(B, rank=rank, nodes=64, host=f"host{rank}", host_id=f"{rank}") for rank in range(64)
    ]
    verdicts = meet(place, *hellos)
    assert {(one.code, *one.lines) for one in verdicts} == {(0, *verdicts[0].lines)}
    assert (
        "64 of 64 nodes here after" in verdicts[0].lines[0]
        and "and 48 more" in verdicts[0].lines[0]
    )


@pytest.mark.nightly
def test_a_strangers_bytes_do_not_disturb_it(place, capsys):
    """Random bytes, an endless line, a message of another kind, a silent connection, many connections."""
    noise = [
        secrets.token_bytes(3000),
        b"x" * 1_000_000,
        b'{"type":"Verdict","code":0,"lines":[]}\n',
        b"",
    ]
    noise += [b'{"type":"Hello","rank":"one"}\n', b"GET / HTTP/1.1\r\n\r\n"] + [b"\n"] * 100
    kept = []

    def disturb() -> None:
        for data in noise:
            stranger = socket.create_connection(("127.0.0.1", place.port))
            kept.append(stranger)
            with suppress(OSError):  # it was closed
                stranger.sendall(data)

    async def nodes() -> list[Verdict]:
        first = asyncio.create_task(call(place, A))
        await until_held(place)
        await asyncio.to_thread(disturb)
        return await asyncio.gather(first, call(place, B))

    assert [one.code for one in asyncio.run(nodes())] == [0, 0]
    assert "Traceback" not in capsys.readouterr().err
    for stranger in kept:
        stranger.close()


# ---- rows of the fault table


def test_row_25_a_node_that_never_starts_is_named_every_interval_and_at_the_limit(place, capsys):
    often = replace(place, every_s=0.2, timeout_s=3.0)

    async def nodes() -> list[Verdict]:
        first = asyncio.create_task(call(often, changed(A, nodes=3)))
        await until_held(place)
        # it hears from the other one
        patient = call(replace(often, timeout_s=HANG_S), changed(B, nodes=3))
        return await asyncio.gather(first, patient)

    ((code, line),) = {(one.code, *one.lines) for one in asyncio.run(nodes())}
    assert (
        code == PEER_LOST and "machine_rank 2; " in line and " 3 s " in line and "--timeout" in line
    )
    shown = re.findall(
        r"roll-call: 2 of 3 nodes here after [\d]+ s: .*machine_rank 2$",
        capsys.readouterr().out,
        re.M,
    )
    assert len(shown) >= 4  # twice in each of the two nodes, at least


def test_row_25_a_node_whose_node_0_never_starts_ends_too(place, capsys):
    elsewhere = replace(place, address="127.0.0.2", timeout_s=2.0)
    verdict = asyncio.run(call(elsewhere, changed(B, rank=1, nodes=3)))
    assert verdict.code == PEER_LOST and "machine_rank 0, 2" in verdict.lines[0]


@pytest.mark.nightly
def test_row_25_a_node_that_left_is_missing_again(place, capsys):
    async def nodes() -> list[Verdict]:
        first = asyncio.create_task(call(replace(place, timeout_s=4.0), changed(A, nodes=3)))
        await until_held(place)
        leaving = asyncio.create_task(call(replace(place, timeout_s=1.0), changed(B, nodes=3)))
        return await asyncio.gather(first, leaving)

    first, leaving = asyncio.run(nodes())
    assert (
        "machine_rank 1, 2" in first.lines[0]
        and " 1 s " in leaving.lines[0]
        and "--timeout" in leaving.lines[0]
    )
    assert "node 1 (b) has left the roll-call" in capsys.readouterr().out


THREE_A, THREE_B = changed(A, nodes=3), changed(B, nodes=3)
TABLES = ([7, 6, 8], [7, 6, 8], [7, 8, 6])
THREE = (THREE_A, THREE_B, changed(THREE_B, rank=2, host="c", host_id="C"))
MISFITS = {
    "a doubled rank": (
        [THREE_A, THREE_B, changed(THREE_B, host="c", host_id="C")],
        r"machine_rank 1 .* b \(pid 11\) and c \(pid 11\); .* (0, )?2\.",
    ),
    "two nodes of rank 0, one at another address": (
        [A, changed(A, host="b", host_id="B", pid=11)],
        r"machine_rank 0 .* a \(pid 10\) and b \(pid 11\); .* 1\b",
    ),
    "a rank out of range": ([A, changed(B, rank=2)], r"machine_rank 2 of b \(pid 11\) .* 0 to 1\b"),
    "another number of processes": (
        [A, changed(B, processes=[6])],
        r"processes per node .* 7 on node 0 \(a\), 6 on node 1 \(b\)\..* --ranks 7,6 ",
    ),
    "another number before all are here": (
        [changed(A, nodes=3), changed(B, rank=2, nodes=3, processes=[6])],
        r"7 on node 0 \(a\), 6 on node 2 \(b\)\..* --ranks 7,\?,6 ",
    ),
    "other numbers of the nodes": (
        [changed(hello, processes=ranks) for hello, ranks in zip(THREE, TABLES, strict=True)],
        r"processes per node .* 7,6,8 on nodes 0 \(a\), 1 \(b\), 7,8,6 on node 2 \(c\)\.(?!.*--ranks)",
    ),
    "numbers of the nodes on one of them only": (
        [changed(A, processes=[7, 6]), changed(B, processes=[6])],
        r"processes per node .* 7,6 on node 0 \(a\), 6 on node 1 \(b\)\.(?!.*--ranks)",
    ),
    "a problem of its own check": (
        [A, changed(B, problems=["`zero_stage` is 1: write 3"])],
        r"node 1 \(b\) .*: `zero_stage` is 1: write 3",
    ),
    "another minor version": (
        [A, changed(B, versions={**VERSIONS, "vllm": "0.30.2"})],
        r"vllm: 0\.31\.0 on node 0 \(a\), 0\.30\.2 on node 1 \(b\)",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_rows_24_26_28_a_node_that_does_not_fit_is_named_on_every_node(place, misfit):
    hellos, named = MISFITS[misfit]
    code, line = error(place, *hellos)
    assert code == CONFIGURATION and re.search(named, line), line


@pytest.mark.real
@pytest.mark.nightly
def test_row_24_swapped_ranks_are_named_on_both_hosts(tmp_path):
    """Two hosts with addresses of their own: the one of rank 0 is not the one of main_process_ip."""
    if reason := namespaces_available():
        pytest.skip(reason)
    (temporary := tmp_path / "tmp").mkdir()
    hosts = Namespaces(f"tmn-{secrets.token_hex(3)}", 2)
    try:
        place = Place(
            hosts.address(0), 29511, timeout_s=HANG_S, every_s=1.0, settle_s=0.3, linger_s=0.2
        )

        def node(host: int) -> list:
            enter_node(hosts.namespace(host), hosts.mounts(host, temporary))
            hello = changed((A, B)[host], rank=1 - host, host_id=host_id())
            verdict = asyncio.run(call(place, hello))
            return [verdict.code, verdict.lines]

        with forked(node, 2, tmp_path) as nodes:
            found = [one.result for one in nodes]
        assert found[0] == found[1] and found[0][0] == CONFIGURATION
        what = f"machine_rank 0 is that of b, but main_process_ip {place.address} is a, which has machine_rank 1"
        assert what in found[0][1][0]
    finally:
        hosts.close()


def test_row_28_any_other_difference_is_a_warning(place):
    other = changed(B, versions={**VERSIONS, "peft": "0.22.0", "torch": "2.13.1+cu128"}, gpus=7)
    first, second = meet(place, A, other)
    assert first == second and first.code == 0
    assert [line for line in first.lines if line.startswith("warning")] == [
        "warning: GPUs differ: 8 on node 0 (a), 7 on node 1 (b)",
        "warning: torch: 2.13.0 on node 0 (a), 2.13.1+cu128 on node 1 (b)",
        "warning: peft: 0.21.2 on node 0 (a), 0.22.0 on node 1 (b)",
    ]


def test_row_27_the_owner_of_a_taken_port_is_named_on_its_node_and_all_nodes_end(
    place, monkeypatch
):
    for module in (rollcall, meeting):
        monkeypatch.setattr(module, "CONNECT_S", 0.5)
    with socket.create_server(("", place.port)):  # it takes connections and never answers
        first, second = meet(place, A, changed(B, host_id="B"))
    assert (first.code, second.code) == (CONFIGURATION, CONFIGURATION)
    assert f"port {place.port} is taken on this node by pid {os.getpid()} (`" in first.lines[0]
    assert "pass another --main_process_port" in second.lines[0]


@pytest.mark.nightly
def test_row_27_a_port_taken_on_another_address_of_the_host_is_named(place):
    with socket.create_server(("127.0.0.2", place.port)):
        verdict = asyncio.run(call(place, A))
    assert (
        verdict.code == CONFIGURATION
        and f"is taken on this node by pid {os.getpid()}" in verdict.lines[0]
    )


def test_row_27_the_check_alone_names_the_owner_too(config, place):
    with socket.create_server(("", place.port)):
        _, problems = check(config, ["--machine_rank", "0"])
        (problem,) = problems
        assert f"port {place.port} is taken on this node by pid {os.getpid()} (`" in problem.what
        assert check(config, ["--machine_rank", "1"])[1] == []
    assert check(config, ["--machine_rank", "0"])[1] == []


def test_dns_a_name_that_does_not_resolve_is_named_on_every_node(place, capsys):
    code, line = error(replace(place, address="no-such-host.invalid", timeout_s=2.0), A, B)
    assert (
        code == CONFIGURATION
        and "this node cannot resolve main_process_ip no-such-host.invalid (" in line
    )
    assert (
        capsys.readouterr().out.count("cannot resolve main_process_ip no-such-host.invalid (") >= 4
    )


# ---- the command


@pytest.mark.parametrize("limit", ["0", "-1", "soon", "inf", "nan"])
def test_a_limit_is_a_number_of_seconds(config, limit, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([config, "--timeout", limit, "--machine_rank", "0", "train.py"])
    assert stopped.value.code == 2 and f"got {limit}, expected seconds" in capsys.readouterr().err


@pytest.fixture
def config(tmp_path, place):
    path = tmp_path / "config.yaml"
    zero = {
        "deepspeed_multinode_launcher": "standard",
        "zero_stage": 3,
        "zero3_save_16bit_model": True,
    }
    keys = {
        "num_machines": 2,
        "num_processes": 4,
        "main_process_ip": "127.0.0.1",
        "main_process_port": place.port,
    }
    file = {
        "distributed_type": "DEEPSPEED",
        "use_cpu": True,
        "mixed_precision": "no",
        "deepspeed_config": zero,
    }
    path.write_text(yaml.safe_dump(keys | file))
    return str(path)


@pytest.fixture
def launch(tmp_path, config, monkeypatch):
    """Launches node K with shell text in the place of `accelerate launch`."""
    (tmp_path / "train.py").touch()

    def run(rank: int, instead: str, *flags: str) -> int:
        stand_in = tmp_path / f"bin{rank}" / "accelerate"
        stand_in.parent.mkdir()
        stand_in.write_text(f"#!/bin/sh\n{instead}\n")
        stand_in.chmod(0o755)
        monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
        return main([config, "--timeout", str(HANG_S), *flags, str(tmp_path / "train.py"), "--a b"])

    return run


def test_every_node_launches_after_the_roll_call_and_ends_with_the_code_of_the_run(
    tmp_path, config, launch
):
    """Node 0 takes its rank from SLURM's variables, whose address gives way to that of the file."""

    def node(rank: int) -> int:
        ending = json.dumps({"code": 5 + rank, "cause": "engine 0 of node 1 ended"})
        instead = (
            f"""printf '<%s>' "$@"; echo; echo '{ending}' > $TRL_MULTINODE_ENDING_FILE; exit 1"""
        )
        os.environ |= {"SLURM_NODEID": str(rank), "SLURM_STEP_NODELIST": "elsewhere"}
        return launch(rank, instead, *([] if rank == 0 else ["--machine_rank=1"]))

    with forked(node, 2, tmp_path) as nodes:
        assert [one.result for one in nodes] == [5, 6]
        for one, rank in zip(nodes, ("<--machine_rank><0>", "<--machine_rank=1>"), strict=True):
            said = f"<launch><--config_file><{config}>{rank}<{tmp_path}/train.py><--a b>"
            assert one.text.index("2 of 2 nodes here") < one.text.index(said)
        assert "the run ended with exit code 6: engine 0 of node 1 ended" in nodes[1].text


def test_each_node_gives_accelerate_its_own_number(tmp_path, config, launch):
    """The words are the same on both nodes, but for their ranks."""

    def node(rank: int) -> int:
        words = ["--machine_rank", str(rank), "--ranks", "2,1", "--debug"]
        return launch(rank, """printf '<%s>' "$@"; echo""", *words)

    with forked(node, 2, tmp_path) as nodes:
        assert [one.result for one in nodes] == [0, 0]
        for rank, one in enumerate(nodes):
            flags = f"<--machine_rank><{rank}><--debug><--num_processes><{2 * (2 - rank)}>"
            said = f"<launch><--config_file><{config}>{flags}<{tmp_path}/train.py><--a b>"
            assert said in one.text, one.text


def test_nodes_that_slurm_gave_begin_without_the_one_that_it_did_not(tmp_path, config, launch):
    """Of three nodes two are here, so the roll-call waits for no third one."""
    file = yaml.safe_load(open(config).read()) | {"num_machines": 3, "num_processes": 6}
    open(config, "w").write(yaml.safe_dump(file))

    def node(rank: int) -> int:
        os.environ |= {
            "SLURM_NODEID": str(rank),
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NODELIST": "elsewhere",
        }
        return launch(rank, """printf '<%s>' "$@"; echo""", "--min_nodes", "2")

    with forked(node, 2, tmp_path) as nodes:
        assert [one.result for one in nodes] == [0, 0], nodes[0].text
        for rank, one in enumerate(nodes):
            flags = f"<--machine_rank><{rank}><--num_machines><2><--num_processes><4>"
            said = f"<launch><--config_file><{config}>{flags}<{tmp_path}/train.py><--a b>"
            assert one.text.index("2 of 2 nodes here") < one.text.index(said)


def test_no_node_launches_after_a_failed_roll_call(tmp_path, launch):
    """Node 1 has a version of its own, which a folder of its path shows."""
    distribution = tmp_path / "other" / "trl-0.9.0.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.9.0\n")

    def node(rank: int) -> int:
        if rank == 1:
            sys.path.insert(0, str(distribution.parent))
        return launch(rank, "echo star''ted", "--machine_rank", str(rank))

    with forked(node, 2, tmp_path) as nodes:
        assert [one.result for one in nodes] == [CONFIGURATION, CONFIGURATION]
        assert all(
            re.search(r"error: trl: [\d.]+ on node 0 \(.*\), 0.9.0 on node 1 \(", one.text)
            for one in nodes
        )
        assert not any("started" in one.text for one in nodes)


def test_a_node_without_a_visible_gpu_tells_all_nodes_before_the_launch(
    config, launch, monkeypatch, capsys
):
    """One node is enough here: with several, the others get its problem in the roll-call."""
    file = yaml.safe_load(open(config).read()) | {"num_machines": 1, "num_processes": 2}
    del file["use_cpu"]
    open(config, "w").write(yaml.safe_dump(file))
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "void")
    assert launch(0, "echo star''ted") == CONFIGURATION
    out = capsys.readouterr().out
    assert "NVIDIA_VISIBLE_DEVICES='void'" in out and "started" not in out


def test_a_node_that_no_scheduler_names_is_asked_for_its_rank_and_address(
    tmp_path, config, capsys, monkeypatch
):
    for name in node_flags.SOURCES:
        monkeypatch.delenv(name, raising=False)
    assert main([config, str(tmp_path / "train.py")]) == CONFIGURATION
    assert "--machine_rank K" in capsys.readouterr().out


SHELL = "trap 'echo got TERM; exit 9' TERM; trap 'echo got INT; exit 8' INT; echo ready; while :; do sleep 0.1; done"


@pytest.fixture
def started(tmp_path):
    """Starts a command below a process that does what `check` does after a roll-call; kills what is left."""
    running = []

    def start(*command: str, **environ: str) -> Rank:
        def body(_: int) -> None:
            os.setsid()
            tempfile.tempdir = str(tmp_path)
            os.environ.update(environ)
            sys.exit(run_command(command))

        running.append(Rank(body, 0, tmp_path))
        return running[-1]

    yield start
    for one in running:
        with suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.join()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 9), (signal.SIGINT, 8)])
def test_a_signal_to_the_check_alone_reaches_the_command_once(started, number, code):
    run = started("sh", "-c", SHELL.replace("exit", "sleep 1; exit"))
    run.wait_for("ready")
    os.kill(run.process.pid, number)
    assert run.wait() == code and run.text.split("\n")[1:-1] == [f"got {number.name[3:]}"]


@pytest.mark.nightly
def test_a_signal_to_all_processes_of_a_job_is_not_forwarded_a_second_time(started):
    """A scheduler signals every process; torchrun takes a second SIGTERM as the order to stop waiting."""
    count = "n=0; trap 'n=$((n+1))' TERM; echo ready; for i in 1 2 3 4 5 6 7 8 9; do sleep 0.3; done; echo $n"
    run = started("sh", "-c", count)
    run.wait_for("ready")
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.wait() == 0 and run.text.splitlines()[-1] == "1"


@pytest.mark.real
@pytest.mark.nightly
def test_the_preempt_signal_reaches_the_ranks_and_not_a_launcher_without_a_handler(started):
    rank = "import signal, sys, time; stop = lambda *_: (print('rank', flush=True), sys.exit(0))"
    rank = (
        f"{rank}; signal.signal(signal.SIGUSR1, stop); print('ready', flush=True); time.sleep(600)"
    )
    launcher = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {rank!r}]).returncode + 7)"
    run = started(sys.executable, "-c", launcher, TRL_MULTINODE_PREEMPT_SIGNAL="USR1")
    run.wait_for("ready")
    os.kill(run.process.pid, signal.SIGUSR1)
    assert run.wait() == 7 and run.text.splitlines() == ["ready", "rank"]


@pytest.mark.fault("suspended")
def test_a_job_that_is_suspended_and_resumed_gets_no_signal(started, tmp_path):
    """`scontrol suspend`. `sigtimedwait` of Python 3.11 returned a SIGHUP that nobody had sent."""
    got = "".join(
        f"trap 'echo got {name}' {name}; " for name in ("TERM", "INT", "HUP", "USR1", "USR2")
    )
    run = started(
        "sh",
        "-c",
        f"{got} echo ready; while [ ! -e $0 ]; do sleep 0.05; done; echo end",
        str(tmp_path / "end"),
    )
    run.wait_for("ready")
    for _ in range(5):
        os.killpg(run.process.pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.killpg(run.process.pid, signal.SIGCONT)
        time.sleep(0.3)
    (tmp_path / "end").touch()
    assert run.wait() == 0 and run.text.splitlines() == ["ready", "end"]


def test_no_command_outlives_a_check_that_is_killed(started):
    run = started("sh", "-c", "echo $$ started; exec sleep 600")
    run.wait_for("started")
    pid = int(run.text.split()[0])
    run.process.kill()
    run.process.join()
    until(lambda: not is_running(pid), "the command to end")


def ended(code: int, **more: object) -> str:
    """Return shell words that leave the ending file of a run."""
    return (
        f"echo '{json.dumps({'code': code, 'cause': 'a'} | more)}' > $TRL_MULTINODE_ENDING_FILE; "
    )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("echo x > $TRL_MULTINODE_ENDING_FILE", 0),
        # a command that failed after a run that ended well has failed
        (ended(0) + "exit 2", 2), (ended(0) + "kill -11 $$", 139), (ended(0) + "exit 0", 0),
        (ended(6) + "exit 0", 6), (ended(6) + "exit 1", 6),
        # a job file starts a run that ends with 143 again, which may not replace the checkpoint
        (ended(143, continues=True, checkpoint="c") + "exit 1", 143),
        (ended(143, continues=False, checkpoint="c") + "exit 1", 1),
        (ended(143, continues=False, checkpoint=None) + "exit 1", 143),
        (ended(143, continues=None, checkpoint="c") + "exit 1", 143),
    ],
)  # fmt: skip
def test_the_code_is_that_of_the_ending_or_of_the_command(started, text, code):
    assert started("sh", "-c", text).wait() == code


@pytest.mark.nightly
def test_a_command_that_does_not_exist_ends_with_127(started):
    assert started("no-such-command").wait() == 127
