"""Links are measured on this machine, over ssh, and in a lab."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import threading
from pathlib import Path

import pytest

from lab.labs import built
from paceline.advise import links
from paceline.lab.namespaces import Lab
from paceline.launch.link_probe import call, serve
from paceline.launch.processes import JobError


@pytest.mark.alone
def test_a_link_on_this_machine() -> None:
    token = secrets.token_bytes(16)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener, token), daemon=True)
        thread.start()
        address = ("127.0.0.1", listener.getsockname()[1])
        with socket.create_connection(address) as stranger:
            stranger.sendall(bytes(16))
            assert stranger.recv(1) == b"", "a caller without the token gets no answer"
        (link,) = call([address], token, 0.1)
        thread.join(5)
    assert link.up > 1e6
    assert link.down > 1e6
    assert 0 < link.latency < 0.1


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.slow
def test_hosts_are_measured_over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ssh of this test runs the command on this machine and records it."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$4 $5" >> {tmp_path}/commands\nexec sh -c "$5"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(links, "SECONDS", 0.1)
    found = asyncio.run(links.measure_links(links.SshAccess(), links.HERE, ["127.0.0.1", "me@localhost"]))
    assert len(found.workers) == 2
    assert min(found.server, *found.workers) > 1e6
    commands = (tmp_path / "commands").read_text()
    assert "me@localhost" in commands
    assert not re.search(r"[0-9a-f]{32}", commands), "no command line contains the token"


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho 'ssh: no route to nowhere.' >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(JobError, match=r"^The link of nowhere could not be measured: ssh: no route to nowhere\.$"):
        asyncio.run(links.measure_links(links.SshAccess(), links.HERE, ["nowhere"]))


@built
@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.slow
def test_the_measured_links_of_a_lab_have_the_rates_they_were_built_with() -> None:
    rates = {"server0": 25e6, "worker0": 25e6, "worker1": 5e6, "worker2": 25e6}
    with Lab(rates) as lab:
        found = asyncio.run(links.measure_links(links.LabAccess(lab), "server0", ["worker0", "worker1", "worker2"]))
    assert found.server == pytest.approx(25e6, rel=0.08)
    assert found.workers == pytest.approx((25e6, 5e6, 25e6), rel=0.08)
    assert found.latency < 0.01
