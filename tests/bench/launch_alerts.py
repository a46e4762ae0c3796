# SPDX-License-Identifier: Apache-2.0
"""Provoke every alert of examples/deploy with real servers, and check that it ends again.

Redis, exporter and Prometheus run with the published rules, whose times are shortened.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from coordinators import Redis, Writer, await_true, short_folder
from ports import free_ports
from processes import environment
from tiers import saver

from .launch_root import ROOT, LaunchError, needed
from .setting import Figure, Setting

DEPLOY = ROOT / "examples" / "deploy"
POOL = "lustre:scratch"
PATIENCE_S = 120.0

#: Replacements in the rules' expressions. "for" is removed from all rules; promtool tests it.
SHORTER = {
    "IoshapeWritersWaitLong": {"> 1800": "> 3"},
    "IoshapeWriterHangs": {"> 3600": "> 3"},
    "IoshapeJobsMostlyWait": {"[1h]": "[40s]"},
    "IoshapeSettingsLost": {"[6h]": "[40s]"},
    "IoshapeTierWaitsLong": {"> 21600": "> 3"},
}


def shortened() -> dict[str, Any]:
    file: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text("utf-8"))
    for rule in file["groups"][0]["rules"]:
        del rule["for"]
        for long, short in SHORTER.get(rule["alert"], {}).items():
            if long not in rule["expr"]:
                raise LaunchError(f"{rule['alert']} has no {long} that could be shorter")
            rule["expr"] = rule["expr"].replace(long, short)
    return file


class Stage:
    """Redis, exporter and Prometheus, with methods that act on them."""

    def __init__(self, folder: Path, redis: Redis) -> None:
        self.redis = redis
        self.folder = folder
        self._exporter_port, self._tier_port, self._port = free_ports(3)
        self._exporter: subprocess.Popen[bytes] | None = None
        self._tier_exporter: subprocess.Popen[bytes] | None = None
        self._prometheus: subprocess.Popen[bytes] | None = None

    def _start(self, port: int, *options: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "ioshape", "exporter", "--port", str(port), *options],
            env=environment(IOSHAPE_COORDINATOR=self.redis.address),
            stderr=subprocess.DEVNULL,
        )

    def start_exporter(self) -> None:
        self._exporter = self._start(self._exporter_port)

    def stop_exporter(self) -> None:
        assert self._exporter
        self._exporter.kill()
        self._exporter.wait()

    def start(self) -> None:
        self.start_exporter()
        self._tier_exporter = self._start(self._tier_port, "--tier", str(self.folder / "fast"))
        (self.folder / "rules.yml").write_text(yaml.safe_dump(shortened()), encoding="utf-8")
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8"))
        # A slow coordinator must still answer within the timeout of a scrape, which is the
        # interval.
        config["global"] = {"scrape_interval": "4s", "evaluation_interval": "1s"}
        ports = {"ioshape": self._exporter_port, "ioshape-tier": self._tier_port}
        for scraped in config["scrape_configs"]:
            scraped["static_configs"][0]["targets"] = [f"127.0.0.1:{ports[scraped['job_name']]}"]
        file = self.folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        self._prometheus = subprocess.Popen(
            [
                needed("prometheus", "prometheus"),
                f"--config.file={file}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stderr=(self.folder / "log").open("wb"),
        )
        await_true(self._answers, "Prometheus")

    def _answers(self) -> bool:
        assert self._prometheus
        if self._prometheus.poll() is not None:
            raise LaunchError(f"Prometheus ended: {(self.folder / 'log').read_text()[-2000:]}")
        with contextlib.suppress(OSError):
            return bool(self.ask("query", query="vector(1)")["result"])
        return False

    def close(self) -> None:
        for process in (self._exporter, self._tier_exporter, self._prometheus):
            if process is not None:
                process.kill()
                process.wait()

    def ask(self, what: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def takes(self, query: str) -> bool:
        with contextlib.suppress(urllib.error.HTTPError):
            self.ask("query", query=query)
            return True
        return False

    def fires(self, name: str) -> bool:
        alerts = self.ask("alerts")["alerts"]
        return any(
            one["labels"]["alertname"] == name and one["state"] == "firing" for one in alerts
        )

    def operator(self, *words: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "ioshape", "slots", *words],
            env=environment(IOSHAPE_COORDINATOR=self.redis.address),
            check=True,
            capture_output=True,
        )

    def value(self, query: str) -> float | None:
        found = self.ask("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    def tell_redis(self, words: str) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.redis.socket))
            connection.sendall(f"{words}\r\n".encode())
            answer = connection.recv(64)
        if answer != b"+OK\r\n":
            raise LaunchError(f"{words}: {answer!r}")

    def flush(self) -> None:
        self.tell_redis("FLUSHALL")

    @contextmanager
    def writer(self, *, rank: int = 0, pool: str = POOL) -> Iterator[Writer]:
        one = Writer(self.redis.address, json.dumps({"pool": pool}), rank=rank, job="train")
        try:
            yield one
        finally:
            one.close()


def until_it_says(writer: Writer, word: str) -> None:
    for said in iter(writer.hear, ""):
        if said == word:
            return
        if said == "holds":
            raise LaunchError(f"a writer holds its slot and never says {word}")
    raise LaunchError(f"a writer ended before it said {word}")


# ---- Causes of the alerts -----------------------------------------------------------------------
# Each context manager creates the problem and, after the alert was awaited, solves it.


@contextmanager
def no_exporter(stage: Stage) -> Iterator[None]:
    stage.stop_exporter()
    yield
    stage.start_exporter()


@contextmanager
def no_redis(stage: Stage) -> Iterator[None]:
    stage.redis.kill()
    yield
    stage.redis.start()


@contextmanager
def no_right(stage: Stage) -> Iterator[None]:
    """Forbid access to the keys of one pool."""
    stage.operator("set", "lustre:closed", "--capacity", "1")
    stage.tell_redis(f"ACL SETUSER default resetkeys ~{{ios:{POOL}}}:*")
    yield
    stage.tell_redis("ACL SETUSER default allkeys")
    stage.operator("clear", "lustre:closed")


@contextmanager
def slow_redis(stage: Stage) -> Iterator[None]:
    """Stop Redis most of the time, as on a machine that swaps."""
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.is_set():
            os.kill(stage.redis.pid, signal.SIGSTOP)
            time.sleep(0.6)
            os.kill(stage.redis.pid, signal.SIGCONT)
            time.sleep(0.05)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def one_waits(stage: Stage) -> Iterator[None]:
    stage.operator("set", POOL, "--capacity", "1")
    with stage.writer() as holder:
        until_it_says(holder, "holds")
        with stage.writer(rank=1) as waiter:
            until_it_says(waiter, "waits")
            yield


@contextmanager
def one_hangs(stage: Stage) -> Iterator[None]:
    with stage.writer() as holder:
        until_it_says(holder, "holds")
        yield


@contextmanager
def all_wait(stage: Stage) -> Iterator[None]:
    """Let most jobs of a pool wait for long.

    No other test writes to this pool. A slot is counted when it ends, so one of the two writers
    ends.
    """
    pool = "lustre:project"
    stage.operator("set", pool, "--capacity", "1")
    with stage.writer(pool=pool) as holder:
        until_it_says(holder, "holds")
        with stage.writer(pool=pool, rank=1) as waiter:
            long = f'ioshape_pool_oldest_wait_seconds{{pool="{pool}"}} > 20'
            await_true(lambda: stage.value(long) is not None, "a writer that waits for 20 s")
            stage.operator("set", pool, "--capacity", "2")
            until_it_says(waiter, "holds")
            waiter.tell("release")
            yield


@contextmanager
def too_many(stage: Stage) -> Iterator[None]:
    stage.operator("set", POOL, "--capacity", "2")
    with stage.writer() as one, stage.writer(rank=1) as two:
        until_it_says(one, "holds")
        until_it_says(two, "holds")
        stage.operator("set", POOL, "--capacity", "1")
        yield


@contextmanager
def emptied(stage: Stage) -> Iterator[None]:
    stage.operator("set", POOL, "--capacity", "1")
    known = f'ioshape_pool_settings{{pool="{POOL}"}} > 0'
    await_true(lambda: stage.value(known) is not None, "a capacity of the operator's")
    stage.flush()
    with stage.writer() as writer:
        until_it_says(writer, "holds")
        yield


@contextmanager
def nobody(stage: Stage) -> Iterator[None]:
    stage.flush()
    yield
    with stage.writer() as writer:
        until_it_says(writer, "holds")


@contextmanager
def nobody_drains(stage: Stage) -> Iterator[None]:
    with saver(stage.folder) as saves:
        saves.save("a.pt")
        yield
        saves.tier.drain()


TROUBLES: dict[str, Callable[[Stage], contextlib.AbstractContextManager[None]]] = {
    "IoshapeNobodyAsks": nobody,
    "IoshapeExporterAway": no_exporter,
    "IoshapeCoordinatorAway": no_redis,
    "IoshapePoolAway": no_right,
    "IoshapeCoordinatorSlow": slow_redis,
    "IoshapeWritersWaitLong": one_waits,
    "IoshapeWriterHangs": one_hangs,
    "IoshapeTooManyWriters": too_many,
    "IoshapeSettingsLost": emptied,
    "IoshapeJobsMostlyWait": all_wait,
    "IoshapeTierWaitsLong": nobody_drains,
}


def comes_to(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def made_to_fire(stage: Stage, name: str) -> bool:
    """Return whether the alert fires with its cause and ends after it."""
    if not comes_to(lambda: not stage.fires(name)):
        return False  # the alert fires without its cause
    with TROUBLES[name](stage):
        fired = comes_to(lambda: stage.fires(name))
    return fired and comes_to(lambda: not stage.fires(name))


def queries_of_the_dashboard() -> Iterator[str]:
    board = json.loads((DEPLOY / "grafana" / "ioshape.json").read_text("utf-8"))
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$pool", ".*").replace("$__rate_interval", "1m")


def promtool() -> None:
    """Check the published rules, and run the tests beside them."""
    tool = needed("promtool", "prometheus")
    for words in (
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "rules_test.yml"],
    ):
        done = subprocess.run(
            [tool, *words],
            cwd=DEPLOY / "prometheus",
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise LaunchError(f"promtool {' '.join(words)}: {done.stdout}{done.stderr}")


def figures(setting: Setting) -> list[Figure]:
    promtool()
    rules = [rule["alert"] for rule in shortened()["groups"][0]["rules"]]
    if set(rules) != set(TROUBLES):
        raise LaunchError(f"rules and troubles differ: {sorted(set(rules) ^ set(TROUBLES))}")
    failed = []
    with short_folder() as folder:
        redis = Redis(folder)
        redis.start()
        stage = Stage(folder, redis)
        try:
            stage.start()
            for name in TROUBLES:
                fired = made_to_fire(stage, name)
                setting.say(f"{name}: {'fired and ended' if fired else 'DID NOT'}")
                failed += [] if fired else [name]
            # The queries run after the alerts, while there is a pool to answer with.
            refused = [one for one in queries_of_the_dashboard() if not stage.takes(one)]
        finally:
            stage.close()
            redis.kill()
    fired_remark = f"did not: {', '.join(failed)}" if failed else "each made to happen, and mended"
    return [
        Figure("alerts_fired", len(rules) - len(failed), ">=", len(rules), fired_remark),
        Figure("dashboard_errors", len(refused), "<=", 0, f"queries refused: {refused}"),
    ]
