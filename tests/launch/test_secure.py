"""TLS, tokens and ssh as the commands use them. The workers here do not import torch."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from launch.test_by_hand import PACES, Background, paceline, refused, script, started  # noqa: F401 (fixtures)
from paceline.advise.links import SshAccess
from paceline.serve.wire.tokens import token_for

TOKEN = "a-long-enough-secret-of-the-operator"
NEEDS_TLS = "give --tls auto, or --insecure"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """A file with the job's token."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    return file


def role_file(folder: Path, role: str, token: Path) -> Path:
    """Make a file with a token for a role, as an operator would."""
    file = folder / f"{role}.token"
    assert paceline("token", "--role", role, "--token-file", token, "--out", file).returncode == 0
    return file


def fingerprint_of(server: Background) -> tuple[str, str]:
    """Wait until a server listens. Return its address and its fingerprint."""
    found = re.match(r"Listening on (\S+:\d+), fingerprint (sha256:\w{64})\.", server.wait_for("Listening on "))
    assert found, server.lines
    return found[1], found[2]


@pytest.fixture
def fake_ssh(tmp_path: Path) -> dict[str, str]:
    """The environment with an ssh that runs the command locally, and notes its arguments."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        f'#!/bin/sh\nfor word; do echo "$word" >> {tmp_path}/words; last="$word"; done\n'
        'exec sh -c "export PACELINE_TLS_CERT= PACELINE_TLS_KEY=; $last"\n'
    )
    ssh.chmod(0o755)
    return {"PATH": f"{ssh.parent}:{os.environ['PATH']}"}


# TLS where others may listen


@pytest.mark.slow
def test_an_address_that_others_can_reach_needs_tls(script: Path, token: Path) -> None:  # noqa: F811
    serve = ("serve", "--servers", 0, "--host", "0.0.0.0", "--token-file", token)
    refused(paceline(*serve), NEEDS_TLS)
    refused(paceline("federate", "serve", "--clients", 24, *serve[3:]), NEEDS_TLS)
    refused(paceline("run", "--servers", 0, "--hosts", "a", script, 1), NEEDS_TLS)
    work = ("work", "--connect", "elsewhere:7000", "--colocate", "--token-file", token, script, 1)
    refused(paceline(*work, PACELINE_WORKER="0"), "give --tls sha256:…, or --insecure")


@pytest.mark.slow
def test_insecure_allows_any_address(script: Path, token: Path, started: list[Background]) -> None:  # noqa: F811
    server = Background(*("serve", "--servers", 0, "--host", "0.0.0.0", "--insecure", "--token-file", token))
    started.append(server)
    port = server.address().rpartition(":")[2]
    ran = paceline("work", "--connect", f"127.0.0.1:{port}", "--token-file", token, script, 3)
    assert ran.returncode == 0, ran.stderr
    assert server.ends() == 0


@pytest.mark.core
def test_tls_auto_from_the_first_command_to_the_last(
    script: Path,  # noqa: F811
    token: Path,
    tmp_path: Path,
    started: list[Background],  # noqa: F811
) -> None:
    """Worker and watcher have tokens of their roles. They know the server by its fingerprint."""
    serve = ("serve", "--servers", 0, "--workers", 2, "-p", "bsp", "--host", "0.0.0.0", "--tls", "auto")
    server = Background(*serve, "--token-file", token, TMPDIR=str(tmp_path))
    started.append(server)
    where, fingerprint = fingerprint_of(server)
    (key,) = tmp_path.glob("paceline-*/certificate.pem")
    assert key.stat().st_mode & 0o777 == 0o600 and key.parent.stat().st_mode & 0o777 == 0o700
    where = where.replace("0.0.0.0", "127.0.0.1")
    worker, watcher = role_file(tmp_path, "worker", token), role_file(tmp_path, "watch", token)
    join = ("work", "--connect", where, "--workers", 2, script, 5)
    refused(
        paceline(*join[:5], "--token-file", worker, "--tls", f"sha256:{'0' * 64}", *join[5:]), "and not sha256:000", 1
    )
    refused(paceline(*join[:5], "--token-file", watcher, "--tls", fingerprint, *join[5:]), "only for the role watch")
    watching = Background("watch", where, "--token-file", watcher, "--tls", fingerprint)
    started.append(watching)
    ran = paceline(*join[:5], "--token-file", worker, "--tls", fingerprint, *join[5:])
    assert ran.returncode == 0, ran.stderr
    assert server.ends() == 0 and watching.ends() == 0
    assert not list(tmp_path.glob("paceline-*")), "the key is gone"


@pytest.mark.slow
def test_a_kept_certificate_has_the_same_fingerprint_the_next_time(
    token: Path,
    tmp_path: Path,
    started: list[Background],  # noqa: F811
) -> None:
    seen = []
    for _ in range(2):
        started.append(Background("serve", "--servers", 0, "--tls", tmp_path / "job.pem", "--token-file", token))
        seen.append(fingerprint_of(started[-1])[1])
        started[-1].process.terminate()
        started[-1].ends()
    assert seen[0] == seen[1]
    assert (tmp_path / "job.pem").stat().st_mode & 0o777 == 0o600
    refused(paceline("serve", "--servers", 0, "--tls", "atuo"), "--tls must be auto, or the name of a .pem file")


@pytest.mark.slow
@pytest.mark.parametrize("shards", [0, 1], ids=["paced", "trained"])
def test_workers_on_other_hosts_know_the_fingerprint(
    shards: int,
    script: Path,  # noqa: F811
    tmp_path: Path,
    fake_ssh: dict[str, str],
) -> None:
    if shards:
        pytest.importorskip("torch")
        script.write_text(TRAINS)
    run = ("run", "--servers", shards, "--workers", 2, "--hosts", "one,two", "--host", "127.0.0.1", "--tls", "auto")
    ran = paceline(*run, script, 4, **fake_ssh)
    assert ran.returncode == 0, ran.stderr
    words = (tmp_path / "words").read_text()
    assert "PACELINE_TLS_FINGERPRINT=sha256:" in words
    assert "certificate.pem" not in words, "the key stays here"


TRAINS = """
import torch, paceline
model = torch.nn.Linear(2, 1)
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        session.step()
"""


@pytest.mark.slow
def test_a_shard_beside_each_worker_over_tls_auto(
    script: Path,  # noqa: F811
    tmp_path: Path,
    fake_ssh: dict[str, str],
) -> None:
    pytest.importorskip("torch")
    script.write_text(TRAINS)
    run = ("run", "--colocate", "--workers", 2, "--hosts", "one,two", "--host", "127.0.0.1", "--tls", "auto")
    ran = paceline(*run, script, **fake_ssh)
    assert ran.returncode == 0, ran.stderr
    assert "certificate.pem" not in (tmp_path / "words").read_text(), "each shard makes its own"


# Certificates that cannot work


@pytest.mark.slow
def test_an_expired_certificate_is_one_sentence(script: Path, tmp_path: Path) -> None:  # noqa: F811
    from serve.tls_files import expired

    old = expired(tmp_path, "old")
    files = ("--tls-cert", old.cert, "--tls-key", old.key, "--tls-ca", old.ca)
    for command in (("serve", "--servers", 0, *files), ("run", "--servers", 0, *files, script, 1)):
        refused(paceline(*command), "old-cert.pem expired on ")
    refused(paceline("work", "--connect", "127.0.0.1:9", *files, script, 1), "old-cert.pem expired on ")


@pytest.mark.slow
def test_a_certificate_without_a_ca_is_known_by_its_fingerprint(
    script: Path,  # noqa: F811
    tmp_path: Path,
    started: list[Background],  # noqa: F811
) -> None:
    from serve.tls_files import authority

    ours = authority(tmp_path, "ours")
    files = ("--tls-cert", ours.cert, "--tls-key", ours.key)
    ran = paceline("run", "--servers", 0, *files, script, 2)
    assert ran.returncode == 0, ran.stderr
    server = Background("serve", "--servers", 0, *files)
    started.append(server)
    where, fingerprint = fingerprint_of(server)
    refused(paceline("work", "--connect", where, *files, script, 1), "give --tls-ca, or --tls sha256:…")
    assert paceline("work", "--connect", where, "--tls", fingerprint, script, 2).returncode == 0
    assert server.ends() == 0


# Tokens


@pytest.mark.slow
def test_a_token_in_the_environment_must_be_long_enough(script: Path) -> None:  # noqa: F811
    refused(paceline("serve", "--servers", 0, PACELINE_TOKEN="aa" * 15), "PACELINE_TOKEN is too short to be safe")
    ran = paceline("work", "--connect", "127.0.0.1:9", script, 1, PACELINE_TOKEN="aa" * 15)
    refused(ran, "PACELINE_TOKEN is too short to be safe")


@pytest.mark.slow
def test_a_note_says_that_others_can_read_a_secret(token: Path, tmp_path: Path) -> None:
    role = ("token", "--role", "watch", "--token-file", token)
    assert paceline(*role).stderr == ""
    token.chmod(0o644)
    ran = paceline(*role)
    assert f"chmod 600 {token}" in ran.stderr
    assert ran.stdout.strip() == token_for("watch", TOKEN.encode()).decode()


@pytest.mark.slow
def test_new_tokens_are_different_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    for file in files:
        assert paceline("token", "--out", file).returncode == 0
        assert file.stat().st_mode & 0o777 == 0o600
    assert files[0].read_text() != files[1].read_text()
    refused(paceline("token", "--out", files[0]), "cannot be written")
    refused(paceline("token", "--role", "king", "--token-file", files[0]), "--role must be worker, watch or shard")
    refused(paceline("token", "--role", "watch"), "Give the job's own token")


@pytest.mark.slow
def test_workers_get_no_more_than_a_token_for_workers(script: Path) -> None:  # noqa: F811
    script.write_text(PACES + "print('role', bytes.fromhex(os.environ['PACELINE_TOKEN'])[:7].decode())\n")
    ran = paceline("run", "--servers", 0, "--workers", 2, script, 2)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("role worker:") == 2


# ssh


@pytest.mark.slow
def test_a_host_is_never_an_option_of_ssh(script: Path, tmp_path: Path) -> None:  # noqa: F811
    """ssh runs the ProxyCommand of its options. This ssh reads options as the real one does."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ]; do case "$1" in\n'
        '--) echo "no such host: $2" >&2; exit 255;;\n'
        '-oProxyCommand=*) sh -c "${1#-oProxyCommand=}"; exit 255;;\n-o) shift;;\nesac; shift; done\nexit 255\n'
    )
    ssh.chmod(0o755)
    path = f"{ssh.parent}:{os.environ['PATH']}"
    host = f"-oProxyCommand=touch {tmp_path}/attacked"
    ran = paceline(
        "run", "--servers", 0, "--workers", 1, "--host", "127.0.0.1", f"--hosts={host}", script, 1, PATH=path
    )
    assert "no such host: -oProxyCommand" in ran.stderr
    command, environment, _ = SshAccess().command(host, ("-c", "pass"), b"")
    probed = subprocess.run(command, env={**environment, "PATH": path}, capture_output=True, text=True, timeout=60)
    assert "no such host: -oProxyCommand" in probed.stderr
    assert not (tmp_path / "attacked").exists()
