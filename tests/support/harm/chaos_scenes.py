# SPDX-License-Identifier: Apache-2.0
"""Scenes: harm that can happen to clients of a pool and to its coordinator.

Each scene is a function of a seed and a number of rounds, and returns the findings of
chaos_judge.py. The seed determines what is done and when, but not how the system reacts.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from chaos import Client, Proxy, Scene, client_program, now, scene
from chaos_judge import MS, Verdict
from coordinators import Redis, await_true, short_folder
from nodes import networks
from processes import environment

SHORT_LEASE_MS = 900
#: half of it is longer than the longest pause between attempts to connect (1 s) and a look (250 ms)
LONG_LEASE_MS = 3000

AOF = ("appendonly yes", "appendfsync everysec", 'save ""')
NOTHING = ('save ""',)


@contextmanager
def a_server(*lines: str) -> Iterator[Redis]:
    """Run a server, and kill it at the end."""
    with short_folder() as folder:
        server = Redis(folder, lines)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def a_coordinator(kind: str) -> Iterator[str]:
    """Yield the address of a coordinator of this kind."""
    if kind == "local":
        with short_folder() as folder:
            yield f"local:{folder}"
    else:
        with a_server(*NOTHING) as server:
            yield server.address


# ---- Kills of clients ----------------------------------------------------------------------------


def clients_die(kind: str, seed: int, rounds: int) -> Verdict:
    """Kill holders and waiters at random times, and start them again."""
    with (
        a_coordinator(kind) as address,
        scene(seed, address, lease_ms=SHORT_LEASE_MS, capacity=3) as here,
    ):
        here.add_takers(10)
        for _ in range(rounds):
            here.pause(0.2)
            victim = here.random.choice(here.clients)
            victim.kill()
            victim.start()
        return here.finish()


def _turns_got(log: Path) -> list[tuple[int, str]]:
    told = []
    for line in log.read_text(encoding="utf-8").splitlines():
        words = line.split(maxsplit=3)
        if words[2] == "got":
            told.append((int(words[0]), words[1]))
    return told


def _holder_of(here: Scene) -> Client | None:
    """Return the client that has the only slot, by the log."""
    holder = ""
    for line in here.log.read_text(encoding="utf-8").splitlines():
        _, name, event, *_ = line.split(maxsplit=3)
        if event == "got":
            holder = name
        elif event in {"release", "lost"} and holder == name:
            holder = ""
    return next((one for one in here.clients if one.name == holder), None)


def slots_of_the_dead(kind: str, seed: int, rounds: int) -> Verdict:
    """Measure how soon the slot of a killed holder goes to the next client: `reclaims`."""
    lease_ms = SHORT_LEASE_MS
    with (
        a_coordinator(kind) as address,
        scene(seed, address, lease_ms=lease_ms, capacity=1) as here,
    ):
        # Holders keep the slot until they are killed, so it is never free for a moment.
        here.add(3, "turns", "100000000", "1", "large")
        for _ in range(rounds):
            await_true(lambda: _holder_of(here) is not None, "a holder")
            here.pause(0.5 if kind == "redis" else 0.05)
            victim = _holder_of(here)
            if victim is None:
                continue
            victim.kill()
            died = here.harm.deaths[victim.name]
            await_true(lambda at=died: bool(_turns_got(here.log)[-1][0] > at), "the next holder")  # type: ignore[misc]
            took_ms = (min(at for at, _ in _turns_got(here.log) if at > died) - died) / MS
            bound_ms = lease_ms + lease_ms / 3
            here.verdict.reclaims.append(took_ms / bound_ms if kind == "redis" else took_ms)
            victim.start()
        for client in here.clients:
            client.kill()
            client.process = None
        here.clients.clear()
        return here.finish()


# ---- Kills of Redis ------------------------------------------------------------------------------


def redis_dies(keeps: bool, seed: int, rounds: int, *, busy: bool = True) -> Verdict:
    """Kill Redis and start it again, with its file or without, empty it, or remove its scripts.

    If clients are not busy, there are times when none holds a slot.
    """
    lease_ms = LONG_LEASE_MS if busy else SHORT_LEASE_MS
    with (
        a_server(*(AOF if keeps else NOTHING)) as server,
        scene(seed, server.address, lease_ms=lease_ms, capacity=3) as here,
    ):
        if busy:
            here.add_takers(10, hold_ms=100)
        else:
            here.add_takers(2, hold_ms=4)
        for _ in range(rounds):
            # Some harm comes before the last one is over, some after.
            here.pause(here.random.choice((0.3, lease_ms / 1000)))
            hurt_redis(here, server)
        return here.finish()


def hurt_redis(here: Scene, server: Redis) -> None:
    """Kill Redis and start it again, or empty it, or remove its scripts."""
    what = here.random.choices(("kill", "flushall", "script flush"), (6, 1, 1))[0]
    begin = now()
    if what == "kill":
        server.kill()
        time.sleep(here.random.choice((0, 0, 0.1, 0.3, here.random.uniform(0, 2.5))))
        server.start()
        here.lived_through(begin)
        here.harm.counts["kills_of_redis"] += 1
    elif what == "flushall":
        server.ask("FLUSHALL")
        here.lived_through(begin)
        here.harm.counts["flushes"] += 1
    else:
        server.ask("SCRIPT", "FLUSH")
        here.harm.counts["script_flushes"] += 1


# ---- Stops ---------------------------------------------------------------------------------------


def clients_stop(kind: str, seed: int, rounds: int) -> Verdict:
    """Stop clients for less and for more than a lease, and continue them."""
    lease_ms = SHORT_LEASE_MS
    with (
        a_coordinator(kind) as address,
        scene(seed, address, lease_ms=lease_ms, capacity=3) as here,
    ):
        here.add_takers(10)
        wakes: dict[Client, float] = {}
        done = 0
        while done < rounds or wakes:
            here.pause(0.1)
            for client in [one for one, at in wakes.items() if time.monotonic() >= at]:
                client.go_on()
                del wakes[client]
            awake = [one for one in here.clients if one not in wakes]
            if done < rounds and len(wakes) < 5:
                client = here.random.choice(awake)
                client.stop()
                for_s = here.random.choice((0.3, 0.8, 1.2, 2.0)) * lease_ms / 1000
                wakes[client] = time.monotonic() + for_s
                done += 1
        return here.finish()


def redis_stops(seed: int, rounds: int) -> Verdict:
    """Stop Redis for less and for more than a lease, and continue it."""
    lease_ms = SHORT_LEASE_MS
    with (
        a_server(*NOTHING) as server,
        scene(seed, server.address, lease_ms=lease_ms, capacity=3) as here,
    ):
        here.add_takers(10)
        for _ in range(rounds):
            here.pause(0.5)
            server.signal(signal.SIGSTOP)
            time.sleep(here.random.choice((0.1, 0.5, 0.9, 1.3, 2.0, 3.0)) * lease_ms / 1000)
            server.signal(signal.SIGCONT)
            here.harm.counts["stops_of_redis"] += 1
        return here.finish()


# ---- Refusals ------------------------------------------------------------------------------------


def _rights() -> list[str]:
    """Return the permissions of the documented Redis user."""
    from tree import ROOT  # noqa: PLC0415

    text = (ROOT / "docs" / "coordinator" / "users.acl").read_text(encoding="utf-8")
    line = next(one for one in text.splitlines() if one.startswith("user ioshape "))
    return [word for word in line.split()[2:] if not word.startswith((">", "#", "<"))]


def redis_refuses(seed: int, rounds: int) -> Verdict:
    """Delete the Redis user, reduce its permissions or fill the memory, and undo it."""
    with a_server(*NOTHING) as server:

        def allow() -> None:
            server.ask("ACL", "SETUSER", "ioshape", "reset", *_rights(), ">secret")
            server.ask("CONFIG", "SET", "maxmemory", "0")

        def refuse(how: str) -> None:
            if how == "full":
                server.ask("CONFIG", "SET", "maxmemory", "1")
            elif how == "deleted":
                server.ask("ACL", "DELUSER", "ioshape")
            else:
                server.ask("ACL", "SETUSER", "ioshape", how)

        allow()
        address = f"redis://ioshape@127.0.0.1:{server.port}"
        more = {"IOSHAPE_PASSWORD": "secret"}
        with scene(seed, address, lease_ms=SHORT_LEASE_MS, capacity=3, **more) as here:
            here.add_takers(10)
            for _ in range(rounds):
                here.pause(0.5)
                ways = (
                    "full",
                    "full",
                    "deleted",
                    "off",
                    "-evalsha",
                    "-blpop",
                    "-zadd",
                    "resetpass",
                )
                refuse(here.random.choice(ways))
                here.pause(2 * SHORT_LEASE_MS / 1000)
                allow()
                here.harm.counts["refusals"] += 1
            return here.finish()


# ---- Failovers -----------------------------------------------------------------------------------


class Watched:
    """A master, two replicas, and three sentinels that watch them."""

    DOWN_AFTER_MS = 300

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        # A former master that does not know it yet has no replicas. It must refuse writes then.
        lines = [*AOF, "min-replicas-to-write 1", "min-replicas-max-lag 2"]
        lines += ["repl-diskless-sync-delay 0"]  # else a new master has no replicas for seconds
        self.servers = [Redis(folder / f"r{number}", lines) for number in range(3)]
        first = self.servers[0]
        for server in self.servers:
            server.start(*([] if server is first else ["--replicaof", f"127.0.0.1 {first.port}"]))
            stack.callback(server.kill)
        lines = [
            f"sentinel monitor chaos 127.0.0.1 {first.port} 2",
            f"sentinel down-after-milliseconds chaos {self.DOWN_AFTER_MS}",
            "sentinel failover-timeout chaos 1000",
            "sentinel parallel-syncs chaos 2",
        ]
        self.sentinels = [Redis(folder / f"s{number}", lines, sentinel=True) for number in range(3)]
        for sentinel in self.sentinels:
            sentinel.start()
            stack.callback(sentinel.kill)
            with suppress(OSError):  # before 7.0 they look every 10 s, and all takes longer
                sentinel.ask("SENTINEL", "DEBUG", "info-period", 300, "publish-period", 300)
        await_true(self.settled, "sentinels know each other and the replicas")

    @property
    def address(self) -> str:
        """The address for clients."""
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)
        return f"sentinel://{hosts}/chaos"

    def master(self) -> Redis:
        """Return the master that the first sentinel reports."""
        told = self.sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "chaos")
        assert isinstance(told, list)
        return next(one for one in self.servers if one.port == int(str(told[1])))

    def settled(self) -> bool:
        """Return whether all sentinels agree, know each other, and see two replicas that are up to
        date.
        """
        with suppress(OSError, TypeError):
            masters = []
            for sentinel in self.sentinels:
                told = sentinel.ask("SENTINEL", "MASTER", "chaos")
                assert isinstance(told, list)
                facts = dict(zip(told[::2], told[1::2], strict=True))
                masters.append(facts["port"])
                if facts["flags"] != "master" or facts["num-other-sentinels"] != "2":
                    return False
                told = sentinel.ask("SENTINEL", "REPLICAS", "chaos")
                assert isinstance(told, list)
                if len(told) < 2:
                    return False
                for one in told:
                    assert isinstance(one, list)
                    facts = dict(zip(one[::2], one[1::2], strict=True))
                    if facts["flags"] != "slave" or facts["master-link-status"] != "ok":
                        return False
            if len(set(masters)) != 1:
                return False
            role = self.master().ask("INFO", "replication")
            assert isinstance(role, str)
            return "role:master" in role and role.count("state=online") == 2
        return False


def master_fails(seed: int, rounds: int) -> Verdict:
    """Kill the master so that a replica replaces it, or make the sentinels fail over."""
    with ExitStack() as stack:
        watched = Watched(stack.enter_context(short_folder()), stack)
        here = stack.enter_context(scene(seed, watched.address, lease_ms=LONG_LEASE_MS, capacity=3))
        here.add_takers(10, hold_ms=100)
        for number in range(rounds):
            await_true(watched.settled, "all replicas follow the master")
            here.pause(0.5)
            old = watched.master()
            begin = now()
            if number % 10 == 5:
                with suppress(OSError):  # refused shortly after another failover
                    watched.sentinels[0].ask("SENTINEL", "FAILOVER", "chaos")
            else:
                old.kill()
                here.harm.counts["kills_of_redis"] += 1
            await_true(lambda gone=old: watched.master() is not gone, "another master")  # type: ignore[misc]
            here.harm.counts["failovers"] += 1
            here.pause(0.5)
            if not old.socket.exists():
                old.start("--replicaof", f"127.0.0.1 {watched.master().port}")
            await_true(watched.settled, "all replicas follow the new master")
            here.lived_through(begin)
        return here.finish()


# ---- The network ---------------------------------------------------------------------------------


def link_is_cut(seed: int, rounds: int) -> Verdict:
    """Cut the link of half of the clients, while the others go on. May raise NotPermitted."""
    with ExitStack() as stack:
        network = stack.enter_context(networks(2))
        here_ip = network.address(0)
        folder = stack.enter_context(short_folder())
        server = Redis(folder, NOTHING, prefix=network.prefix(0), bind=here_ip)
        server.start()
        stack.callback(server.kill)
        here = stack.enter_context(scene(seed, server.address, lease_ms=SHORT_LEASE_MS, capacity=3))
        here.add_takers(5)
        far = f"redis://{here_ip}:{server.port}"
        for number in range(5):
            here.add(
                1,
                *("turns", "300", str(1 + (number == 4)), "mixed"),
                prefix=network.prefix(1),
                IOSHAPE_COORDINATOR=far,
            )
        for _ in range(rounds):
            here.pause(1.0)
            network.cut(0)
            time.sleep(here.random.choice((0.1, 0.5, 1.0, 1.5, 3.0, 3.0)) * SHORT_LEASE_MS / 1000)
            network.reconnect(0)
            here.harm.counts["partitions"] += 1
        return here.finish()


def line_is_bad(seed: int, rounds: int) -> Verdict:
    """Let half of the clients use a proxy that delays, swallows and cuts data and falls silent."""
    with (
        a_server(*NOTHING) as server,
        scene(seed, server.address, lease_ms=SHORT_LEASE_MS, capacity=3) as here,
    ):
        proxy = Proxy(here.folder / "proxy", server.socket, seed)
        try:
            here.add_takers(5)
            here.add_takers(5, hold_ms=300, IOSHAPE_COORDINATOR=proxy.address)
            for _ in range(rounds):
                here.pause(0.5)
                proxy.mode = here.random.choice(Proxy.MODES)
                here.pause(2 * SHORT_LEASE_MS / 1000)
                proxy.mode = "pass"
                here.harm.counts["bad_lines"] += 1
            return here.finish()
        finally:
            proxy.close()


# ---- Saves ---------------------------------------------------------------------------------------

SAVERS = 16


def _check_files(here: Scene, folder: Path) -> None:
    files = []
    with TemporaryDirectory(dir=here.folder) as kept:
        for path in folder.glob("*.pt"):
            # Clients go on saving meanwhile.
            files.append(Path(kept) / path.name)
            while not files[-1].exists():
                assert path.exists(), path
                with suppress(FileNotFoundError):  # a file that is being replaced cannot be linked
                    os.link(path, files[-1])
        done = subprocess.run(
            [client_program(), "check", *map(str, files)],
            env=environment(IOSHAPE_COORDINATOR="open"),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        here.verdict.failed_saves.append(f"{done.returncode}: {done.stdout}{done.stderr}")
    here.verdict.counts["files_checked"] += len(files)


def saves_go_on(kind: str, seed: int, rounds: int) -> Verdict:
    """Let 16 processes save real files while they and their coordinator are harmed."""
    with ExitStack() as stack:
        server = stack.enter_context(a_server(*NOTHING)) if kind == "redis" else None
        address = server.address if server else f"local:{stack.enter_context(short_folder())}"
        here = stack.enter_context(scene(seed, address, lease_ms=SHORT_LEASE_MS, capacity=2))
        folder = stack.enter_context(short_folder())
        more = {"IOSHAPE_STAGING_BYTES": str(16 << 20)}
        # Files too large for the small-file bypass.
        here.add(SAVERS, "saves", str(folder / "rank-{}.pt"), str(1 << 20), "100", **more)
        harms: list[Callable[[], None]] = [
            lambda: _kill_one(here),
            lambda: _kill_one(here),
            lambda: _stop_some(here),
        ]
        if server:
            harms += [lambda: hurt_redis(here, server), lambda: _stop_redis(here, server)]
        for number in range(rounds):
            here.pause(0.3)
            here.random.choice(harms)()
            if number % 10 == 9:
                _check_files(here, folder)
        verdict = here.finish()
        _check_files(here, folder)
        left = [path.name for path in folder.iterdir() if path.suffix != ".pt"]
        here.verdict.counts["temporary_files_left"] += len(left)
        return verdict


def _kill_one(here: Scene) -> None:
    victim = here.random.choice(here.clients)
    victim.kill()
    victim.start()


def _stop_some(here: Scene) -> None:
    chosen = here.random.sample(here.clients, 3)
    for client in chosen:
        client.stop()
    time.sleep(here.random.choice((0.5, 1.5)) * here.lease_ms / 1000)
    for client in chosen:
        client.go_on()


def _stop_redis(here: Scene, server: Redis) -> None:
    server.signal(signal.SIGSTOP)
    time.sleep(here.random.choice((0.5, 1.5, 3.0)) * here.lease_ms / 1000)
    server.signal(signal.SIGCONT)
    here.harm.counts["stops_of_redis"] += 1


# ---- All scenes ----------------------------------------------------------------------------------

SCENES: dict[str, Callable[[int, int], Verdict]] = {
    "clients_die_redis": lambda seed, rounds: clients_die("redis", seed, rounds),
    "clients_die_local": lambda seed, rounds: clients_die("local", seed, rounds),
    "slots_of_the_dead_redis": lambda seed, rounds: slots_of_the_dead("redis", seed, rounds),
    "slots_of_the_dead_local": lambda seed, rounds: slots_of_the_dead("local", seed, rounds),
    "redis_dies_with_file": lambda seed, rounds: redis_dies(True, seed, rounds),
    "redis_dies_without": lambda seed, rounds: redis_dies(False, seed, rounds),
    "redis_dies_at_rest": lambda seed, rounds: redis_dies(False, seed, rounds, busy=False),
    "clients_stop_redis": lambda seed, rounds: clients_stop("redis", seed, rounds),
    "clients_stop_local": lambda seed, rounds: clients_stop("local", seed, rounds),
    "redis_stops": redis_stops,
    "redis_refuses": redis_refuses,
    "master_fails": master_fails,
    "link_is_cut": link_is_cut,
    "line_is_bad": line_is_bad,
    "saves_go_on_redis": lambda seed, rounds: saves_go_on("redis", seed, rounds),
    "saves_go_on_local": lambda seed, rounds: saves_go_on("local", seed, rounds),
}
