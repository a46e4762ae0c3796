# SPDX-License-Identifier: Apache-2.0
"""Settings of the servers in the examples for operators."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from tree import ROOT

DEPLOY = ROOT / "examples" / "deploy"
REDIS_CONF = ROOT / "docs" / "coordinator" / "redis.conf"
#: examples with a command line for the Redis
KINDS = ("compose", "kubernetes", "systemd")


def pods() -> list[dict[str, Any]]:
    """Return the specifications of the pods for Kubernetes."""
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    manifests = [one for one in yaml.safe_load_all(text) if one]
    return [one["spec"]["template"]["spec"] for one in manifests if "template" in one["spec"]]


def composed() -> dict[str, Any]:
    """Return the contents of the file for Compose."""
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def redis_command(kind: str) -> list[str]:
    """Return the command line of the Redis in an example."""
    if kind == "compose":
        return list(composed()["services"]["redis"]["command"])
    if kind == "kubernetes":
        (command,) = (
            pod["containers"][0]["command"] for pod in pods() if "command" in pod["containers"][0]
        )
        return list(command)
    unit = (DEPLOY / "systemd" / "ioshape-coordinator.service").read_text(encoding="utf-8")
    found = re.search(r"^ExecStart=((?:.*\\\n)*.*)", unit, re.MULTILINE)
    assert found
    return [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', found[1].replace("\\\n", " "))]


def redis_options(kind: str, secrets: Path, ours: Mapping[str, object]) -> list[str]:
    """Return the options of that command line, with secrets and values of the test."""
    local = {"*": "127.0.0.1", "-::*": "-::1"}
    options = [local.get(word, word) for word in redis_command(kind)[2:]]
    for option, value in ours.items():
        if option in options:
            options[options.index(option) + 1] = str(value)
    return [str(secrets / Path(one).name) if "secrets" in one else one for one in options]
