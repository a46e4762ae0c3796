# SPDX-License-Identifier: Apache-2.0
"""Test the files for operators in examples/deploy.

tests/bench.sh launch checks the manifests with the schemas of Kubernetes and CycloneDX.
"""

import contextlib
import json
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from command import IOSHAPE, call, succeed
from coordinators import TIMEOUT_S, await_true, short_folder
from deployed import DEPLOY, KINDS, REDIS_CONF, composed, pods, redis_command, redis_options
from ports import free_port
from processes import environment
from records import names_in
from tiers import Saver, saver
from tree import ROOT, program

RUNBOOK = ROOT / "docs" / "runbook.md"
SEVERITIES = {"critical", "warning", "info"}


def rules() -> list[dict[str, Any]]:
    text = (DEPLOY / "prometheus" / "rules.yml").read_text(encoding="utf-8")
    (group,) = yaml.safe_load(text)["groups"]
    return list(group["rules"])


# ---- Alerts -------------------------------------------------------------------------------------


def test_each_alert_has_a_severity_and_its_part_of_the_runbook() -> None:
    page = RUNBOOK.read_text(encoding="utf-8")
    told = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert told == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["labels"]["severity"] in SEVERITIES
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"].endswith(f"/runbook/#{rule['alert'].lower()}")
    parts = re.split(r"^## \w+$", page, flags=re.MULTILINE)[1:]
    assert all("\n1. " in part for part in parts)


def test_an_alert_says_when_there_is_nothing_to_look_at() -> None:
    """Check the rule for a missing metric: other rules never fire without one."""
    assert [rule["alert"] for rule in rules() if "absent(ioshape_up" in rule["expr"]]


def test_each_alert_is_in_the_tests_of_promtool() -> None:
    text = (DEPLOY / "prometheus" / "rules_test.yml").read_text(encoding="utf-8")
    for rule in rules():
        assert re.search(rf"alertname(?:: |=\"){rule['alert']}\b", text), rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
@pytest.mark.parametrize(
    "words", [("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")]
)
def test_promtool_takes_the_rules_and_their_tests(words: tuple[str, ...]) -> None:
    command = ["promtool", *words]
    folder = DEPLOY / "prometheus"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_runbook_names_commands_that_there_are() -> None:
    page = RUNBOOK.read_text(encoding="utf-8")
    reference = (ROOT / "docs" / "cli-reference.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`ioshape ((?:slots )?[a-z]+)", page))
    assert {"top", "slots set", "slots kick"} <= named
    for command in named:
        assert f"## ioshape {command}\n" in reference, command


# ---- The dashboard ------------------------------------------------------------------------------


def test_the_dashboard_is_whole() -> None:
    board = json.loads((DEPLOY / "grafana" / "ioshape.json").read_text(encoding="utf-8"))
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "pool"}
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["expr"] for target in panel["targets"])
    for a, b in combinations((panel["gridPos"] for panel in panels), 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (a, b)


# ---- Containers ---------------------------------------------------------------------------------


def test_pods_ask_for_what_they_need_are_probed_and_can_do_little() -> None:
    assert len(pods()) == 2
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert container["resources"]["limits"]["memory"]
        assert {"readinessProbe", "livenessProbe"} <= set(container)
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {one["name"] for one in pod["volumes"]} | {"data"}
        assert any("secret" in volume for volume in pod["volumes"])


def test_the_services_of_compose_can_do_little_and_use_what_is_declared() -> None:
    file = composed()
    for name, service in file["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["mem_limit"], name
        assert set(service.get("secrets", ())) <= set(file["secrets"]), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in file["volumes"] or (DEPLOY / source).exists(), volume
    assert (ROOT / file["services"]["exporter"]["build"]["dockerfile"]).is_file()


def test_no_secret_is_in_a_file_that_is_given_away() -> None:
    for path in (path for path in DEPLOY.rglob("*") if path.is_file()):
        text = path.read_text(encoding="utf-8")
        assert "PRIVATE KEY" not in text
        assert not re.search(r"rediss?://[^@\s]*:[^@\s]*@", text), path


# ---- The Redis of Compose, Kubernetes and systemd -----------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_each_address_of_the_redis_is_an_argument(kind: str) -> None:
    """Check that addresses are separate arguments. Redis 6.2 does not split them at spaces."""
    command = redis_command(kind)
    at = command.index("--bind") + 1
    assert command[at : at + 3] == ["*", "-::*", "--port"]
    assert not [word for word in command if " " in word]


@contextlib.contextmanager
def started(kind: str, place: Path) -> Iterator[int]:
    """Start the Redis with folders and a port of the test, and yield the port."""
    secrets = place / "secrets"
    subprocess.run(
        [DEPLOY / "secrets.sh", secrets, "localhost", "127.0.0.1"], check=True, capture_output=True
    )
    port = free_port()
    ours = {"--tls-port": port, "--dir": place, "--supervised": "no"}
    server = subprocess.Popen(
        [program("redis-server"), REDIS_CONF, *redis_options(kind, secrets, ours)],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        server.terminate()
        server.wait(TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_redis_that_is_started_speaks_tls_and_knows_its_users(kind: str) -> None:
    """Run the real command line with a real server. test_slots_cli tests the ACL."""
    with short_folder() as place, started(kind, place) as port:
        secrets = place / "secrets"

        def ask(*words: str, user: str = "", tls: bool = True) -> str:
            known = ["--tls", "--cacert", str(secrets / "ca.crt")] if tls else []
            name = "admin-password" if user == "admin" else "password"
            password = (secrets / name).read_text(encoding="utf-8").strip()
            login = ["--user", user, "--pass", password, "--no-auth-warning"] if user else []
            done = subprocess.run(
                [program("redis-cli"), "-h", "127.0.0.1", "-p", str(port), *known, *login, *words],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            return done.stdout + done.stderr

        # The probes rely on this answer, too.
        await_true(lambda: "NOAUTH" in ask("ping"), "redis-server with TLS")
        assert "PONG" not in ask("ping", tls=False)
        assert ask("ping", user="admin").strip() == "PONG"
        assert ask("hset", "{ios:pool}:x", "a", "b", user="ioshape").strip() == "1"
        assert "NOPERM" in ask("hset", "other", "a", "b", user="ioshape")
        assert "NOPERM" in ask("flushall", user="ioshape")
        assert ask("config", "get", "appendonly", user="admin").split() == ["appendonly", "yes"]


def test_secrets_are_made_once_and_for_their_owner(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make: list[str | Path] = [DEPLOY / "secrets.sh", folder, "redis.cluster", "10.1.2.3", "fd00::1"]
    subprocess.run(make, check=True, capture_output=True)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    private = ["admin-password", "password", "server.crt", "server.key", "users.acl"]
    assert modes == {"ca.crt": 0o644, **dict.fromkeys(private, 0o600)}

    def openssl(*words: str | Path) -> str:
        command: list[str | Path] = [program("openssl"), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    shown = openssl("x509", "-in", folder / "server.crt", "-noout", "-text")
    assert "DNS:redis.cluster, IP Address:10.1.2.3, IP Address:FD00:0:0:0:0:0:0:1" in shown
    openssl("verify", "-CAfile", folder / "ca.crt", folder / "server.crt")
    assert "CHANGE" not in (folder / "users.acl").read_text(encoding="utf-8")
    before = (folder / "password").read_text(encoding="utf-8")
    again = subprocess.run(make, check=False, capture_output=True, text=True)
    assert again.returncode == 1
    assert str(folder) in again.stderr
    assert (folder / "password").read_text(encoding="utf-8") == before
    assert not [path for path in tmp_path.iterdir() if path != folder]


def test_secrets_are_not_in_a_command_line(tmp_path: Path) -> None:
    """Trace the script by bash -x: other users can read the command lines of its programs.

    The folder has a trailing slash, as after completion by a shell.
    """
    folder = tmp_path / "secrets"
    script: list[str | Path] = ["bash", "-x", DEPLOY / "secrets.sh", f"{folder}/", "redis.cluster"]
    done = subprocess.run(script, check=True, capture_output=True, text=True)
    users = (folder / "users.acl").read_text(encoding="utf-8")
    assert "openssl rand" in done.stderr
    for name in ("password", "admin-password"):
        secret = (folder / name).read_text(encoding="utf-8").strip()
        assert f" >{secret} " in users
        assert secret not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["secrets"]


# ---- systemd ------------------------------------------------------------------------------------

#: Exposure in tenths. A service on the network can hardly have less than 13. The drain must write
#: wherever its user may.
EXPOSURES = {"ioshape-coordinator": 13, "ioshape-exporter": 13, "ioshape-drain@": 20}


def analyze(*words: str | Path) -> str:
    done = subprocess.run(
        [program("systemd-analyze"), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXPOSURES)
def test_a_unit_can_do_little(name: str) -> None:
    unit = DEPLOY / "systemd" / f"{name}.service"
    how = ("security", "--offline=true", "--no-pager", f"--threshold={EXPOSURES[name]}")
    assert "Overall exposure level" in analyze(*how, unit)


# ---- Drains of a tier ---------------------------------------------------------------------------


def test_the_timer_starts_the_drain_of_the_same_user(tmp_path: Path) -> None:
    """Check that timer and service belong together, and that systemd accepts both."""
    for kind in ("service", "timer"):
        text = (DEPLOY / "systemd" / f"ioshape-drain@.{kind}").read_text(encoding="utf-8")
        text = text.replace("/usr/bin/ioshape", str(IOSHAPE))  # systemd looks for the program
        text = re.sub("^Documentation=.*$", "", text, flags=re.MULTILINE)
        (tmp_path / f"ioshape-drain@.{kind}").write_text(text)
    for name in names_in(tmp_path):
        assert analyze("verify", "--recursive-errors=one", tmp_path / name) == ""


def test_the_service_drains(tmp_path: Path) -> None:
    """Run the command line of the unit."""
    unit = (DEPLOY / "systemd" / "ioshape-drain@.service").read_text(encoding="utf-8")
    found = re.search(r"^ExecStart=/usr/bin/ioshape (.*)$", unit, re.MULTILINE)
    assert found
    with saver(tmp_path) as saves:
        path = saves.save("model.pt")
        words = [str(saves.fast) if one == "/local/nvme" else one for one in found[1].split()]
        assert succeed(call(*words)).startswith(f"{path}: drained")


def epilog(saves: Saver, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the epilog as slurmd does."""
    account = pwd.getpwuid(os.geteuid())
    variables = {
        "SLURM_JOB_UID": str(account.pw_uid),
        "SLURM_JOB_USER": account.pw_name,
        "TIER": str(saves.fast),
        "IOSHAPE": str(IOSHAPE),
    }
    return subprocess.run(
        [ROOT / "examples" / "slurm_epilog.sh"],
        env=environment(**(variables | more)),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="slurmd runs epilogs as root")
def test_the_epilog_of_slurm_drains_as_the_user_and_never_fails(tmp_path: Path) -> None:
    with saver(tmp_path) as saves:
        path = saves.save("model.pt")
        # this user has saved nothing here
        assert epilog(saves, SLURM_JOB_UID="4711").returncode == 0
        assert not path.exists()
        assert epilog(saves, IOSHAPE="/bin/false").returncode == 0
        assert epilog(saves).returncode == 0
        assert path.read_bytes() == b"saved"


def test_the_tier_of_kubernetes_is_drained_before_it_goes() -> None:
    text = (ROOT / "examples" / "kubernetes_tier.yaml").read_text(encoding="utf-8")
    manifests = list(yaml.safe_load_all(text))
    by_kind = {one["kind"]: one["spec"] for one in manifests}
    volume, claim = by_kind["PersistentVolume"], manifests[-2]["spec"]
    assert claim["volumeName"] == manifests[-3]["metadata"]["name"]
    assert claim["storageClassName"] == volume["storageClassName"]
    for kind in ("Job", "Deployment"):
        pod = by_kind[kind]["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounts == {"tier": "/tier", "checkpoints": "/checkpoints"}
        assert set(mounts) == {one["name"] for one in pod["volumes"]}
        # otherwise the drain would look in another folder
        assert pod["securityContext"]["runAsUser"] == 1000
    (training,) = by_kind["Job"]["template"]["spec"]["containers"]
    ended = training["lifecycle"]["preStop"]["exec"]["command"]
    drains = by_kind["Deployment"]["template"]["spec"]["containers"][0]["command"]
    assert (ended, drains[:3]) == (["ioshape", "drain", "/tier"], ended)
