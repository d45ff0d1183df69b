"""examples/schedulers/kubernetes.yaml fits the schema of Kubernetes and JobSet, and its parts fit each other.

kubernetes.schema.json has the fields that the file uses, and no others. Those of a JobSet are taken from the CRD of
JobSet (config/components/crd/bases in github.com/kubernetes-sigs/jobset, commit 08dfbdfd), with the values that the
Kubernetes API allows for a Job and a Pod.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.json_schema import problems
from paceline.cli import app
from paceline.serve.environment import ASKED_TO_LEAVE, address, worker_number
from paceline.serve.wire.tls import FINGERPRINT
from shell import get_command

FILE = Path(__file__).parents[2] / "examples" / "schedulers" / "kubernetes.yaml"
SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("kubernetes.schema.json").read_text())
CLAIM, JOBSET = yaml.safe_load_all(FILE.read_text())
ROLES: dict[str, Any] = {role["name"]: role["template"]["spec"] for role in JOBSET["spec"]["replicatedJobs"]}


def pod(role: str) -> Any:
    return ROLES[role]["template"]["spec"]


def container(role: str) -> Any:
    (only,) = pod(role)["containers"]
    return only


def parsed(role: str) -> dict[str, Any]:
    """Return the options of a container's command, as the command line of paceline parses them."""
    words: list[str] = container(role)["command"] + container(role)["args"]
    name, command, *arguments = words
    assert name == "paceline"
    tree: Any = get_command(app)
    chosen = tree.commands[command]
    context: Any = chosen.make_context(command, arguments)
    return dict(context.params)


def made_secrets() -> dict[str, set[str]]:
    """Return the keys of each secret that the commands at the top of the file make."""
    lines = [
        line.lstrip("# ") for line in FILE.read_text().splitlines() if line.startswith("#   kubectl create secret")
    ]
    made = {}
    for words in map(shlex.split, lines):
        made[words[4]] = {word.removeprefix("--from-file=") for word in words[5:]}
    return made


def test_the_file_fits_its_schema() -> None:
    assert list(problems(CLAIM, SCHEMAS["PersistentVolumeClaim"])) == []
    assert list(problems(JOBSET, SCHEMAS["JobSet"])) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("metadata", "name"), "Digits"),
        (("spec", "replicas"), 1),
        (("spec", "replicatedJobs", 1, "template", "spec", "completions"), "4"),
        (("spec", "replicatedJobs", 1, "template", "spec", "template", "spec", "restartPolicy"), "Always"),
        (("spec", "replicatedJobs", 1, "template", "spec", "podFailurePolicy", "rules", 0, "action"), "ignore"),
    ],
)
def test_a_mistake_breaks_the_schema(path: tuple[Any, ...], value: Any) -> None:
    wrong = copy.deepcopy(JOBSET)
    inner = wrong
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert list(problems(wrong, SCHEMAS["JobSet"]))


def test_the_coordinator_is_where_the_workers_look_for_it() -> None:
    serve, work = parsed("coordinator"), parsed("worker")
    host, port = address(work["connect"])
    assert host == f"{JOBSET['metadata']['name']}-coordinator-0-0.{JOBSET['metadata']['name']}"
    assert JOBSET["spec"]["network"]["enableDNSHostnames"], "the name of the pod is known before it runs"
    (declared,) = container("coordinator")["ports"]
    assert port == serve["port"] == declared["containerPort"]
    assert container("coordinator")["livenessProbe"]["tcpSocket"]["port"] == declared["name"]
    assert serve["host"] == "0.0.0.0"


def test_the_job_begins_with_all_workers_and_each_has_the_number_of_its_index() -> None:
    worker = ROLES["worker"]
    assert parsed("coordinator")["workers"] == worker["completions"] == worker["parallelism"]
    assert worker["completionMode"] == "Indexed"
    assert worker_number({"JOB_COMPLETION_INDEX": "3"}) == 3
    assert worker_number({"JOB_COMPLETION_INDEX": "3", "RANK": "1"}) == 1, "torchrun within a pod counts first"
    assert worker_number({"JOB_COMPLETION_INDEX": "3", "PACELINE_WORKER": "0"}) == 0


@pytest.mark.parametrize("role", ["coordinator", "worker"])
def test_every_file_of_a_command_is_in_a_volume_that_exists(role: str) -> None:
    mounted: dict[str, Any] = {}
    volumes = {volume["name"]: volume for volume in pod(role)["volumes"]}
    for mount in container(role)["volumeMounts"]:
        mounted[mount["mountPath"]] = volumes.pop(mount["name"])
    assert not volumes, "every volume is mounted"
    for name in ("token_file", "tls", "checkpoint"):
        value = parsed(role).get(name)
        if value is None:
            continue
        folder, _, file = str(value).rpartition("/")
        volume = mounted[folder]
        if "secret" in volume:
            assert file in made_secrets()[volume["secret"]["secretName"]]
            assert volume["secret"]["defaultMode"] == 0o400
        else:
            assert volume["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]


def test_workers_have_the_fingerprint_and_never_the_token_of_the_job() -> None:
    (variable,) = container("worker")["env"]
    assert variable["name"] == FINGERPRINT
    reference = variable["valueFrom"]["secretKeyRef"]
    assert reference["key"] in made_secrets()[reference["name"]]
    assert "job.token" not in made_secrets()[reference["name"]]
    assert not re.search(r"(?i)^kind: Secret", FILE.read_text(), re.MULTILINE), "secrets are not kept in the file"


def test_a_pod_that_is_taken_away_is_replaced_alone_and_continues() -> None:
    serve = parsed("coordinator")
    assert str(serve["resume"]) == "auto" and serve["checkpoint"]
    for role, job in ROLES.items():
        assert pod(role)["restartPolicy"] == "Never", "podFailurePolicy needs it"
        assert job["podReplacementPolicy"] == "Failed"
        assert pod(role)["terminationGracePeriodSeconds"] > 60
        ignored = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
        assert ignored[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    asked = [rule["onExitCodes"]["values"] for rule in ROLES["worker"]["podFailurePolicy"]["rules"][1:]]
    assert asked == [[ASKED_TO_LEAVE], [2]]
    for role, job in ROLES.items():
        named = [rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
        assert all(codes["containerName"] == container(role)["name"] for codes in named)


@pytest.mark.parametrize("role", ["coordinator", "worker"])
def test_every_container_requests_resources(role: str) -> None:
    assert {"cpu", "memory"} <= set(container(role)["resources"]["requests"])
