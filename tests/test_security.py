"""What another user, another host or bytes from nowhere can do to a run. SECURITY.md names these tests."""

import logging
import os
import random
import re
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from forks import forked
from served import Keeper, _serve
from waiting import HANG_S, until

from trl_multinode.engine.environment import engine_environment
from trl_multinode.engine.process import EngineProcess
from trl_multinode.engine.run_folder import RunFolder
from trl_multinode.errors import EngineDiedError, EngineStartError, PeerFailureError
from trl_multinode.run.endings.error_text import described
from trl_multinode.run.endings.exit_codes import is_symptom
from trl_multinode.tools import main as run_command
from trl_multinode.transports.base import SlotSettings
from trl_multinode.transports.host_memory import HostMemory, HostSlots
from trl_multinode.transports.signals import BucketSignals
from trl_multinode.wire.connection import LENGTH, Connection, connect, frame
from trl_multinode.wire.messages import (
    Await,
    CheckSlot,
    Done,
    EngineSpec,
    Generate,
    Hello,
    OpenSlots,
    Peek,
    Progress,
    Ready,
    Score,
    TensorSpec,
    UpdateWeights,
    WeightVersion,
    pack_ids,
)
from trl_multinode.wire.secret_names import is_secret_name

ROOT = Path(__file__).parents[1]
NO_MEMORY = msgspec.Raw(msgspec.msgpack.encode(HostMemory("/nowhere/a", (64, 128))))
REQUESTS = [
    Hello(request_id=1),
    Generate(
        request_id=2, prompt=b"odd", num_completions=2**40, max_tokens=-1, sampling={"n": "x"}
    ),
    Await(request_id=3, min_update=2**60),
    Score(request_id=4, prompt=pack_ids([4, 5])),
    OpenSlots(request_id=5, transport="host", memory=NO_MEMORY, sizes=(2**62,), buckets=()),
    OpenSlots(request_id=6, transport="none", memory=msgspec.Raw(b"\x01"), sizes=(), buckets=()),
    CheckSlot(request_id=7, slot=-1, num_bytes=2**60, crc=0),
    UpdateWeights(request_id=8, version=WeightVersion(-1, 2**60), first_bucket=99, in_flight=True),
    UpdateWeights(request_id=9, version=WeightVersion(1, 1), turn=-5),
    Peek(request_id=12),
]


@contextmanager
def server(tmp_path: Path) -> Iterator[tuple]:
    """The real server in a process of its own, and its socket."""
    path = tmp_path / "engine0.sock"

    def body(_: int) -> None:
        # pytest's handlers would take asyncio's lines out of the log
        logging.basicConfig(force=True)
        _serve(Keeper(), path, 0)

    with forked(body, 1, tmp_path) as (rank,):
        until(path.exists, lambda: f"the socket of the server:\n{rank.text}")
        yield rank, path


@contextmanager
def connected(path: Path) -> Iterator[Connection]:
    connection = connect(str(path), "engine 0", path)
    try:
        connection.send(Hello(request_id=1), HANG_S)
        assert isinstance(connection.receive(HANG_S), Ready)
        yield connection
    finally:
        connection.close()


def ask(connection: Connection, request):
    connection.send(request, HANG_S)
    while isinstance(reply := connection.receive(HANG_S), Progress):
        pass
    return reply


def nonsense(dice: random.Random) -> bytes:
    """Random bytes, a frame with a wrong length, flipped bits, a cut frame, or valid frames in any order."""
    frames = [frame(request) for request in dice.choices(REQUESTS, k=dice.randint(1, 6))]
    frames = [frame(REQUESTS[0])] * dice.randint(0, 1) + frames
    kind, stream = dice.randrange(5), bytearray(b"".join(frames))
    if kind == 0:
        return dice.randbytes(dice.randint(1, 300))
    if kind == 1:
        length = dice.choice([2**64 - 1, 2**63, 2**31 + 1, 2**31, 2**30, 5000, 0, 1])
        return (
            frames[0] * dice.randint(0, 1)
            + LENGTH.pack(length)
            + dice.randbytes(dice.randint(0, 9000))
        )
    if kind == 2:
        for _ in range(dice.randint(1, 8)):
            stream[dice.randrange(len(stream))] ^= 1 << dice.randrange(8)
    return bytes(stream[: dice.randrange(len(stream))] if kind == 3 else stream)


def send(path: Path, data: bytes, leave_at_once: bool) -> None:
    with socket.socket(socket.AF_UNIX) as stream, suppress(OSError):
        stream.settimeout(0.005)
        stream.connect(str(path))
        stream.sendall(data)
        if not leave_at_once:
            stream.recv(1 << 16)


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that no file backs, which pages of libraries do not change."""
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) << 10


def test_a_fuzz_of_the_socket_leaves_no_traceback_and_bounded_memory(tmp_path):
    dice, count = random.Random(7), 2000
    with server(tmp_path) as (rank, path):
        with connected(path) as connection:
            before = anonymous_bytes(rank.process.pid)
            for _ in range(count):
                send(path, nonsense(dice), dice.random() < 0.7)
            assert isinstance(ask(connection, Hello(request_id=2)), Ready)
        with connected(path):  # it still takes new ranks
            assert anonymous_bytes(rank.process.pid) - before < 64 << 20
        lines = rank.text.splitlines()
    assert not [
        line for line in lines if re.search("Traceback|Unhandled|exception was never", line)
    ], lines[:20]
    refusal = "engine 0: closed a connection"
    assert all(line.startswith(refusal) for line in lines) and count / 4 < len(lines) <= count


def test_bytes_of_a_connection_without_a_hello_are_not_kept(tmp_path):
    """The server closes the connection after the frame's length, so that only buffers of the kernel take bytes."""
    megabyte, sent = bytes(1 << 20), 0
    with server(tmp_path) as (rank, path):
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(path))
            stream.sendall(LENGTH.pack(1 << 30))
            with suppress(ConnectionError):
                while sent < 300:
                    stream.sendall(megabyte)
                    sent += 1
        assert sent <= 8
        rank.wait_for("1073741824 bytes (limit 4096)")


@contextmanager
def opened_slots(sender: Connection, folder: Path) -> Iterator[BucketSignals]:
    """Slots with one bucket of one tensor that the server has opened, and their signals."""
    slots = HostSlots([64], SlotSettings(folder=folder))
    request = OpenSlots(
        request_id=9,
        transport="host",
        memory=msgspec.Raw(msgspec.msgpack.encode(slots.open_for(0))),
        sizes=slots.sizes,
        buckets=((TensorSpec("w", "float32", (2,), 0, 8),),),
        signals=str(slots.signals.listen(folder)),
    )
    try:
        assert isinstance(ask(sender, request), Done)
        slots.signals.opened()
        yield slots.signals
    finally:
        slots.close()


def test_an_update_whose_sender_vanishes_ends_as_failed_and_the_next_one_heals(tmp_path):
    version = WeightVersion(1, 0)
    with server(tmp_path) as (_, path), connected(path) as other:
        with connected(path) as sender, opened_slots(sender, tmp_path) as signals:
            update = UpdateWeights(request_id=2, version=version, turn=signals.begin())
            sender.send(update, HANG_S)
        assert isinstance(ask(other, Await(request_id=3, min_update=1)), Done)
        refused = ask(other, Score(request_id=4, prompt=pack_ids([1, 2])))
        assert refused.error == "PeerFailureError" and "sender" in refused.message
        assert is_symptom(PeerFailureError(refused.message)), (
            "or it would hide the end of the sender's process"
        )
        with connected(path) as sender, opened_slots(sender, tmp_path) as signals:
            version, turn = WeightVersion(2, 1), signals.begin()
            signals.send(0)
            update = UpdateWeights(request_id=2, version=version, turn=turn)
            assert ask(sender, update).version == version
        # its end was no failure
        assert ask(other, Await(request_id=5, min_update=2)).version == version


@pytest.mark.real
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_by_the_folder_and_by_the_socket_alone(tmp_path):
    folder = RunFolder(0)
    path = folder.path / "engine0.sock"

    def foreign(_: int) -> list[str]:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        found = []
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as stream:
                try:
                    stream.connect(str(path))
                    found.append("connected")
                except OSError as error:
                    found.append(type(error).__name__)
            print("TRIED", len(found), flush=True)
            until((tmp_path / f"go{len(found)}").exists)
        return found

    (tmp_path / "server").mkdir()
    with forked(lambda _: _serve(Keeper(), path, 0), 1, tmp_path / "server"):
        until(path.exists)
        assert (
            stat.S_IMODE(folder.path.stat().st_mode) == 0o700
            and stat.S_IMODE(path.stat().st_mode) == 0o600
        )
        for parent in tmp_path.parents:  # the foreign user must see only that it may go on
            if parent.is_relative_to(Path(os.environ.get("TMPDIR", "/tmp"))):
                parent.chmod(parent.stat().st_mode | 0o011)
        tmp_path.chmod(0o711)
        (tmp_path / "rank0.json").touch()
        (tmp_path / "rank0.json").chmod(0o666)
        with forked(foreign, 1, tmp_path) as (rank,):
            rank.wait_for("TRIED 1")
            folder.path.chmod(0o755)
            (tmp_path / "go1").touch()
            rank.wait_for("TRIED 2")
            path.chmod(0o666)  # the control: nothing else refuses it
            (tmp_path / "go2").touch()
            (tmp_path / "go3").touch()
            assert rank.result == ["PermissionError", "PermissionError", "connected"]
    folder.remove()


@pytest.mark.fault("no_descriptor")
def test_the_folder_of_a_run_is_removed_by_a_process_without_a_descriptor(tmp_path):
    def body(_: int) -> list[bool]:
        folder, opened = RunFolder(0), []
        (folder.path / "model" / "deeper").mkdir(parents=True)
        (folder.path / "model" / "deeper" / "file").touch()
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        before = folder.path.exists()
        folder.remove()
        left = folder.path.exists()
        for number in opened:
            os.close(number)
        return [before, left]

    with forked(body, 1, tmp_path) as (rank,):
        assert rank.result == [True, False], rank.text


@pytest.mark.fault("folder_removed")
def test_a_folder_of_a_run_that_a_cleaner_removed_is_named_with_the_cure(tmp_path):
    folder = RunFolder(3)
    folder.remove()
    with pytest.raises(EngineStartError, match=rf"Node 3: {folder.path}.*TMPDIR"):
        EngineProcess(
            EngineSpec(0, str(folder.path), os.getpid(), {}, node=3), tmp_path / "log", {}
        )
    with pytest.raises(EngineDiedError, match=f"{folder.path} was removed"):
        connect(str(folder.path / "engine0.sock"), "engine 0 of node 3", tmp_path / "log")


SECRET_NAMES = (
    "HF_TOKEN hub_token --hub-token WANDB_API_KEY WANDBAPIKEY wandbApiKey DB_PASS SSHPASS MYSQL_PWD REDISCLI_AUTH "
    "AUTH_HEADER AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID MY_CREDS GPG_PASSPHRASE MYSECRETVALUE PGPASSWORD HFTOKEN "
    "GITHUB_PAT GOOGLE_APPLICATION_CREDENTIALS SENTRY_DSN ssh_private_key_path JWT TOKEN TRL_MULTINODE_SECRET "
    "TRL_MULTINODE_SECRET_FILE"
)
OTHER_NAMES = (
    "PWD OLDPWD num_key_value_heads eos_token_id pad_token max_tokens TOKENIZERS_PARALLELISM VLLM_KEYS sort_keys "
    "VLLM_ENABLE_PREGRAD_PASSES VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD pass_at_k BYPASS_CACHE tokenizer author"
)


def test_names_with_the_words_of_a_secret_are_told_from_others():
    assert [name for name in SECRET_NAMES.split() if not is_secret_name(name)] == []
    assert [name for name in OTHER_NAMES.split() if is_secret_name(name)] == []


def test_an_engine_gets_every_variable_of_vllm_but_its_key():
    """A name that looks like a secret is dropped in silence."""
    source = Path(find_spec("vllm").origin).with_name("envs.py").read_text()
    names = set(re.findall(r'"(VLLM_[A-Z0-9_]+)"', source))
    assert len(names) > 200 and {name for name in names if is_secret_name(name)} == {"VLLM_API_KEY"}


@pytest.mark.parametrize(
    "options",
    [
        ("--env", "WANDB_API_KEY=abc"), ("--env", "DB_PASS=abc"), ("--env", "REPO=https://me:pw@host/a"),
        ("--script", "train.py --hub_token abc"), ("--script", "train.py --hub_token=abc"),
        ("--script", "train.py --note hf_abcdefghijklmn"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_no_job_file_has_a_secret(options, tmp_path, capsys):
    def render(*more: str) -> None:
        run_command(["render", "slurm", str(tmp_path / "c.yaml"), "--script", "train.py", *more])

    assert run_command(["config", "2x8", "--out", str(tmp_path / "c.yaml")]) == 0
    with pytest.raises(SystemExit):
        render(*options)
    assert "secrets.env" in capsys.readouterr().err
    render(
        "--env",
        "NCCL_DEBUG=WARN",
        "--script",
        "train.py --push_to_hub --max_tokens 5 --eos_token x",
    )


def test_the_line_of_a_failed_run_has_no_token():
    error = ConnectionError("PUT https://me:word@host/path with hf_abcdefghijklmn failed")
    assert (
        described(error) == "ConnectionError: PUT https://(hidden)@host/path with (hidden) failed"
    )


def test_an_engine_gets_no_secrets_no_unpickling_and_no_calls_for_developers(monkeypatch, tmp_path):
    dropped = [
        "HF_TOKEN", "VLLM_API_KEY", "WANDB_API_KEY", "PYTHON_SECRET", "CUDA_PASSWORD", "NCCL_CREDENTIALS",
        "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_SERVER_DEV_MODE", "RANK", "GLOO_SOCKET_IFNAME_OF_TRAINERS",
        "TRL_MULTINODE_SECRET", "TRL_MULTINODE_SECRET_FILE",
    ]  # fmt: skip
    kept = [
        "VLLM_MAX_TOKENS_PER_EXPERT_FUSED_MOE",
        "VLLM_KEYS",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_DEBUG",
    ]
    for name in (*dropped, *kept):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    found = engine_environment({}, tmp_path)
    assert not found.keys() & set(dropped) and found.keys() >= set(kept)
    assert found["GLOO_SOCKET_IFNAME"] == "lo" and found["VLLM_HOST_IP"] == "127.0.0.1"


@pytest.mark.nightly
def test_ruff_refuses_pickle_in_the_package():
    code = "import marshal\nimport pickle\npickle.loads(b'')\nmarshal.loads(b'')\neval('1')\n"
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        "--stdin-filename",
        "trl_multinode/wire/x.py",
        "-",
    ]
    done = subprocess.run(command, input=code, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert {"S301", "S302", "S307"} <= set(re.findall(r"\bS\d{3}\b", done.stdout)), done.stdout


@pytest.mark.nightly
def test_no_line_of_the_package_is_exempt_from_the_rules_against_pickle():
    texts = {path: path.read_text() for path in (ROOT / "trl_multinode").rglob("*.py")}
    assert [path for path, text in texts.items() if re.search(r"noqa[^\n]*\bS[34]\d\d", text)] == []
