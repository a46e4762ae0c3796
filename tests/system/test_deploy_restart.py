# SPDX-License-Identifier: Apache-2.0
"""Test that an operator's settings survive a restart of Redis with each recommended configuration.

Redis replays its log as the user "default". If this user has no rights, Redis drops scripts that
write more than once (redis #14541, valkey #3983).
"""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command import call, succeed
from coordinators import TIMEOUT_S, await_true, short_folder, writers
from deployed import DEPLOY, KINDS, REDIS_CONF, redis_options
from ports import free_ports
from tree import program

POOL = "lustre:scratch"
_ASKED = json.dumps({"pool": POOL, "nbytes": 5000})


class Recommended:
    """A redis-server with a recommended configuration. The test sets only folders and ports."""

    def __init__(self, kind: str, place: Path) -> None:
        self._port, tls_port = free_ports(2)
        self._place = place
        self._log = place / "log"
        self._process: subprocess.Popen[bytes] | None = None
        secrets = place / "secrets"
        subprocess.run(
            [DEPLOY / "secrets.sh", secrets, "localhost"], check=True, stdout=subprocess.DEVNULL
        )
        self._passwords = {
            user: secrets / name
            for user, name in (("ioshape", "password"), ("admin", "admin-password"))
        }
        places = {"aclfile": secrets / "users.acl", "dir": place, "bind": "127.0.0.1"}
        text = REDIS_CONF.read_text(encoding="utf-8")
        config = place / "redis.conf"
        if kind == "plain":
            for word, value in {**places, "port": self._port}.items():
                text, found = re.subn(rf"^{word} .*$", f"{word} {value}", text, flags=re.MULTILINE)
                assert found == 1, word
        config.write_text(text, encoding="utf-8")
        self._command = [program("redis-server"), str(config)]
        if kind != "plain":
            # The plain port is needed beside the TLS port, because some clients here have no TLS.
            ours = {"--port": self._port, "--tls-port": tls_port, "--supervised": "no"}
            self._command += redis_options(kind, secrets, {**ours, "--dir": place})

    def start(self) -> None:
        """Start the server, and wait until it has read its log."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log)
        await_true(lambda: "loading:0" in self.info(), "redis-server")

    def info(self) -> str:
        """Return what the server reports about its log to the administrator."""
        password = self._passwords["admin"].read_text(encoding="utf-8").strip()
        login = ["--user", "admin", "--pass", password, "--no-auth-warning"]
        done = subprocess.run(
            [program("redis-cli"), "-p", str(self._port), *login, "info", "persistence"],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout

    def restart(self, end: str) -> None:
        """End the server once its buffer is in the log, and start it again."""
        assert self._process
        await_true(lambda: "aof_buffer_length:0" in self.info(), "an empty buffer of the log")
        getattr(self._process, end)()
        self._process.wait(TIMEOUT_S)
        self.start()

    def close(self) -> None:
        """Kill the server."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        """Return the output of the server."""
        return self._log.read_text(encoding="utf-8")

    def variables(self) -> dict[str, str]:
        """Return the environment of a node's users."""
        return {
            "IOSHAPE_COORDINATOR": f"redis://ioshape@127.0.0.1:{self._port}",
            "IOSHAPE_PASSWORD_FILE": str(self._passwords["ioshape"]),
        }

    def ask(self, *words: str) -> Any:
        """Return the JSON that the command prints."""
        return json.loads(succeed(call("slots", *words, "--json", env=self.variables())))


@contextmanager
def recommended(kind: str) -> Iterator[Recommended]:
    """Yield a running server, which ends with the test."""
    with short_folder() as place:
        server = Recommended(kind, place)
        try:
            server.start()
            yield server
        finally:
            server.close()


def kept(server: Recommended) -> dict[str, Any]:
    """Return all that must survive."""
    (pool,) = server.ask("status", POOL)
    names = ("capacity", "capacity_by", "pool_bytes_per_s", "job_bytes_per_s", "express", "limits")
    used = ("changed_s", "grants", "written_bytes", "jobs")
    return {name: pool[name] for name in names + used}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_what_was_set_survives_restarts(kind: str) -> None:
    with recommended(kind) as server, writers() as make:
        for words in (
            "--capacity 8 --express 3",
            "--rate 20G --job-rate 5G",
            "--job 4711 --share 0.5 --rate 1G",
            "--user ann --rate 2G",
        ):
            succeed(call("slots", "set", POOL, *words.split(), env=server.variables()))
        writer = make(server.variables()["IOSHAPE_COORDINATOR"], _ASKED, **server.variables())
        # In its first seconds a server lets requests wait for holders that it may have forgotten.
        said = writer.hear()
        assert (writer.hear() if said == "waits" else said) == "holds"
        writer.tell("pace 5000")
        writer.tell("release")
        assert writer.hear() == "released"
        before = kept(server)
        assert [limit["job"] + limit["user"] for limit in before["limits"]] == ["4711", "ann"]
        assert (before["capacity"], before["express"], before["grants"]) == (8, 3, 1)
        for end in ("terminate", "kill"):
            server.restart(end)
            assert kept(server) == before, end
        assert "CRITICAL" not in server.log()
