# SPDX-License-Identifier: Apache-2.0
"""configure(), environment variables and keywords: their precedence, and the values they refuse."""

import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import ioshape
import pytest
from checkpoints import Gate, checkpoint, left_clean, number_in, wait_until
from ioshape._core import config
from processes import environment

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _left_clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for setting in config.SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    with left_clean():
        yield
        # Undo the variables first: the saves that left_clean() awaits must find the original
        # settings.
        monkeypatch.undo()


# For each setting: a value for configure(), a text for the variable, and how ioshape reads both.
VALUES: dict[str, tuple[Any, str, Any, Any]] = {
    "engine": ("threads", "buffered", "threads", "buffered"),
    "direct": ("off", "prefer", "off", "prefer"),
    "staging_bytes": ("64M", "1G", 64 << 20, 1 << 30),
    "coordinator": ("open", "local", "open", "local"),
    "password_file": (Path("/a/b"), "/c/d", "/a/b", "/c/d"),
    "pool": ("lustre:scratch", "nfs:server:/home", "lustre:scratch", "nfs:server:/home"),
    "job": ("mine", "4711", "mine", "4711"),
    "share": (200, "50", 200, 50),
    "slots": (4, "8", 4, 8),
    "unreachable": ("wait", "fail", "wait", "fail"),
    "rate": ("500M", "1G", 500 << 20, 1 << 30),
    "layout": ("directory", "stripe_count=8", "directory", "stripe_count=8"),
    "full": ("skip", "fail", "skip", "fail"),
    "examine": ("fail", "jump=warn,constant=off", "fail", "jump=warn,constant=off"),
    "mode": ("node", "rank0", "node", "rank0"),
    "deadline_ms": (1000, "3600000", 1000, 3_600_000),
    "parity": ("1/4", "2/6", "1/4", "2/6"),
    "durable": (False, "1", False, True),
    "tier": (Path("/local/nvme"), "/tmp", "/local/nvme", "/tmp"),
    "trace": (Path("/a/b"), "reports", "/a/b", "reports"),
}


def test_every_setting_is_tested() -> None:
    assert list(VALUES) == list(config.SETTINGS)


@pytest.mark.parametrize("name", VALUES)
def test_the_variable_wins_over_configure_and_that_over_the_default(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given, text, configured, from_variable = VALUES[name]
    variable = f"IOSHAPE_{name.upper()}"
    assert ioshape.settings()[name] == (None, "default")
    ioshape.configure(**{name: given})
    assert ioshape.settings()[name] == (configured, "configure()")
    monkeypatch.setenv(variable, text)
    assert ioshape.settings()[name] == (from_variable, variable)
    monkeypatch.setenv(variable, "")  # an empty variable counts as unset
    assert ioshape.settings()[name] == (configured, "configure()")
    assert len(ioshape.settings()) == len(VALUES)


# ---- Effects of settings -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["threads", "buffered"])
@pytest.mark.parametrize("how", ["configure", "variable", "both"])
def test_the_engine_is_the_one_that_was_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: Literal["threads", "buffered"],
    how: str,
) -> None:
    if how != "variable":
        ioshape.configure(engine=engine)
    if how == "both":
        ioshape.configure(engine="buffered" if engine == "threads" else "threads")
    if how != "configure":
        monkeypatch.setenv("IOSHAPE_ENGINE", engine)
        ioshape.configure()  # configure() reads the variables again
    report = ioshape.save(checkpoint(1, 8 * MIB), tmp_path / "model.pt")
    assert report.engine == engine


def test_the_page_cache_is_used_if_asked_for(tmp_path: Path) -> None:
    default = ioshape.save(checkpoint(1, 8 * MIB), tmp_path / "model.pt")
    ioshape.configure(direct="off")
    assert not ioshape.save(checkpoint(1, 8 * MIB), tmp_path / "model.pt").direct
    ioshape.configure(direct="prefer")
    again = ioshape.save(checkpoint(1, 8 * MIB), tmp_path / "model.pt")
    assert again.direct == default.direct


def test_staging_memory_has_the_limit_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ioshape.configure(staging_bytes="32M")
    ioshape.staging.reserve(32 * MIB)
    with pytest.raises(OSError, match="32"):
        ioshape.staging.reserve(33 * MIB)
    monkeypatch.setenv("IOSHAPE_STAGING_BYTES", "48M")
    ioshape.configure()
    ioshape.staging.reserve(48 * MIB)
    with pytest.raises(OSError, match="48"):
        ioshape.staging.reserve(49 * MIB)
    ioshape.staging.trim()


def _syncs(save: Callable[[], ioshape.Report]) -> bool:
    """Return whether a save calls fsync: the report has a sync time only if it does."""
    return save().sync_s > 0


# Keyword, variable and configure(), in the order of their precedence.
PRECEDENCE = [
    (keyword, variable, configured)
    for keyword in (None, True, False)
    for variable in (None, "1", "0")
    for configured in (None, True, False)
]


@pytest.mark.parametrize(("keyword", "variable", "configured"), PRECEDENCE)
def test_durable_comes_from_the_nearest(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keyword: bool | None,
    variable: str | None,
    configured: bool | None,
) -> None:
    path = tmp_path / "model.pt"
    if variable is not None:
        monkeypatch.setenv("IOSHAPE_DURABLE", variable)
    ioshape.configure(durable=configured)
    expected = [True, configured, variable and variable == "1", keyword]
    wanted = next(value for value in reversed(expected) if value is not None)

    assert _syncs(lambda: ioshape.save(checkpoint(1), path, durable=keyword)) == wanted
    assert (
        _syncs(lambda: ioshape.save_async(checkpoint(1), path, durable=keyword).result()) == wanted
    )
    assert number_in(path) == 1


def test_what_is_left_out_stays_as_it_is() -> None:
    ioshape.configure(slots=3, durable=False)
    ioshape.configure(staging_bytes="64M", slots=None)
    assert ioshape.settings()["slots"] == (3, "configure()")
    assert ioshape.settings()["durable"] == (False, "configure()")
    assert ioshape.settings()["staging_bytes"] == (64 * MIB, "configure()")


def test_saves_under_way_go_on_with_the_settings_they_began_with(tmp_path: Path) -> None:
    gate = Gate()
    ioshape.configure(engine="threads")
    first = ioshape.save_async(checkpoint(1, 8 * MIB), tmp_path / "first.pt", progress=gate)
    gate.await_save()
    ioshape.configure(engine="buffered")
    second = ioshape.save(checkpoint(2, 8 * MIB), tmp_path / "second.pt")
    assert second.engine == "buffered"
    assert not first.done()
    gate.open()
    assert first.result().engine == "threads"
    assert [number_in(tmp_path / name) for name in ("first.pt", "second.pt")] == [1, 2]


@pytest.mark.slow
def test_settings_may_change_while_others_save(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def save(thread: int) -> None:
        try:
            for number in range(10):
                state = checkpoint(number, 3 * MIB)
                ioshape.save_async(state, tmp_path / f"{thread}.pt", durable=False)
                ioshape.save(state, tmp_path / f"{thread}.pt", durable=False)
                assert ioshape.load(tmp_path / f"{thread}.pt")["number"] == number
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    number = 0
    while any(thread.is_alive() for thread in threads):
        number = number % 20 + 1
        ioshape.configure(slots=number, engine=("threads", "buffered")[number % 2])
    for thread in threads:
        thread.join()
    assert failures == []
    assert [number_in(tmp_path / f"{i}.pt") for i in range(4)] == [9] * 4


# ---- Values that are refused ---------------------------------------------------------------------

BAD_VALUES: dict[str, list[Any]] = {
    "engine": ["nil", "URING", "", 1],
    "direct": ["on", "yes", True],
    "staging_bytes": [0, -1, "1M", "lots", 1 << 80, 0.5],
    "coordinator": [
        "",
        "redis",
        "redis://",
        "http://host",
        "local:relative",
        "opened",
        1,
        "open\n",
    ],
    "password_file": ["", 1, "a\nb"],
    "pool": ["", "a b", "a{b}", "a\nb", "é", "x" * 128, 1],
    "job": ["", "a b", "a\nb", "é", "x" * 64, 4711],
    "share": [0, 1001, -1, "half", 1.5, True],
    "slots": [0, 65537, -1, "all", True],
    "unreachable": ["", "retry", 1],
    "rate": [0, -1, "500MB", "fast", 1.5, True],
    "layout": ["", 8, "stripe_count=8\n", "x" * 1024],
    "full": ["", "stop", 1],
    "examine": [
        *("", 1, "nonfinite", "nonfinite=stop", "x" * 128),
        *({}, {"nonfinite": "stop"}, {"nan": "fail"}, {"jump": True}, {1: "off"}),
    ],
    "mode": ["", "all", "rank1", 1],
    "deadline_ms": [0, 999, 3_600_001, "1s", True],
    "parity": ["", "1", "1/3", "2/2", 1, True],
    "durable": ["maybe", 2, 0.5, []],
    "tier": ["", 1, "a\nb"],
    "trace": ["", 1, "a\nb"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values]
)
def test_bad_values_are_refused_at_once(name: str, value: Any) -> None:
    """Check that configure() refuses a bad value itself: the next save may be hours away."""
    before = ioshape.settings()
    good = {"engine": "threads", "slots": 3}
    with pytest.raises(ValueError):  # noqa: PT011 - test_bad_variables_are_named looks what it says
        ioshape.configure(**{**good, name: value})
    assert ioshape.settings() == before  # one bad value refuses the whole call


@pytest.mark.wording
def test_what_cannot_be_used_is_refused_where_it_is_set(tmp_path: Path) -> None:
    """Check that the C library's own checks of addresses and layouts run at once."""
    refused: list[tuple[dict[str, Any], str]] = [
        ({"layout": "stripes=8"}, "layout"),
        ({"examine": "jump"}, "examine"),
        ({"coordinator": "redis://host:notaport"}, "coordinator"),
        ({"engine": "buffered", "direct": "require"}, "the buffered engine"),
    ]
    for bad, name in refused:
        with pytest.raises(ValueError, match=f"^{name}"):
            ioshape.configure(**bad)
    assert {source for _, source in ioshape.settings().values()} == {"default"}
    # ioshape reads the password file when it connects to the coordinator. Without the coordinator
    # saves continue.
    ioshape.configure(coordinator="redis://host", password_file=tmp_path / "password")
    ioshape.configure(coordinator="local")
    ioshape.save(checkpoint(1), tmp_path / "model.pt")


@pytest.mark.wording
def test_the_password_in_a_bad_address_is_not_repeated() -> None:
    with pytest.raises(ValueError, match=r"^coordinator") as caught:
        ioshape.configure(coordinator="redis://user:s3cret@host:notaport")
    assert "s3cret" not in str(caught.value)


def test_a_switch_that_is_an_argument_takes_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    no: Any = "no"
    assert ioshape.save(checkpoint(1), path, durable=no).sync_s == 0
    maybe: Any = "maybe"
    with pytest.raises(ValueError, match=r"^durable cannot be 'maybe'"):
        ioshape.save(checkpoint(2), path, durable=maybe)
    assert number_in(path) == 1


def test_rules_may_be_a_mapping() -> None:
    ioshape.configure(examine={"nonfinite": "fail", "jump": "off"})
    assert ioshape.settings()["examine"] == ("nonfinite=fail,jump=off", "configure()")


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="speed"):
        ioshape.configure(speed="high")


RETIRED = """
import warnings, ioshape
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        ioshape.configure(calibrate="off", slots=3)
print([str(one.message) for one in caught], ioshape.settings()["slots"][0])
"""


@pytest.mark.wording
def test_a_retired_setting_warns_once_and_does_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RETIRED],
        env=environment(IOSHAPE_CALIBRATE="never"),
        capture_output=True,
        text=True,
        check=True,
    )
    why = "does nothing any more: ioshape chooses engines by filesystem"
    assert done.stdout == f"['configure(calibrate=...) {why}; leave it out'] 3\n"
    assert done.stderr.count(f"IOSHAPE_CALIBRATE {why}; unset it") == 1
    assert "calibrate" not in ioshape.settings()


def test_a_retired_variable_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IOSHAPE_CALIBRATE", "off")
    assert config.mistakes() == []


BAD_TEXTS = {
    "engine": ["nil", "URING"],
    "direct": ["on"],
    "staging_bytes": ["1M", "0", "x"],
    "coordinator": ["redis", "http://host", "redis://host:notaport"],
    "layout": ["stripes=8"],
    "pool": ["a b", "é", "a{b}"],
    "job": ["a b"],
    "share": ["0", "1001", "x"],
    "slots": ["0", "65537", "x"],
    "unreachable": ["retry"],
    "rate": ["0", "500MB", "x"],
    "full": ["stop"],
    "examine": ["skip", "jump=warn,,"],
    "mode": ["all"],
    "durable": ["maybe", "2"],
}


@pytest.mark.wording
@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in BAD_TEXTS.items() for text in texts]
)
def test_bad_variables_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    ioshape.save(checkpoint(1), tmp_path / "model.pt")
    variable = f"IOSHAPE_{name.upper()}"
    monkeypatch.setenv(variable, text)
    config.reset()
    actions: list[Any] = [
        ioshape.configure,
        lambda: ioshape.save(checkpoint(2), tmp_path / "model.pt"),
        lambda: ioshape.save_async(checkpoint(2), tmp_path / "model.pt"),
        lambda: ioshape.load(tmp_path / "model.pt"),
    ]
    for action in actions:
        with pytest.raises(ValueError, match=f"^{variable}"):
            action()
    monkeypatch.delenv(variable)
    assert number_in(tmp_path / "model.pt") == 1


@pytest.mark.parametrize("name", ["durable", "slots", "engine"])
def test_settings_say_what_is_wrong_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    variable = f"IOSHAPE_{name.upper()}"
    monkeypatch.setenv(variable, "whatever")
    with pytest.raises(ValueError, match=f"{variable} cannot be 'whatever'; it takes "):
        ioshape.settings()


@pytest.mark.parametrize(
    ("value", "n_bytes"),
    [("64K", 1 << 16), ("1m", 1 << 20), (" 2M ", 2 << 20), ("131072", 1 << 17), (1 << 18, 1 << 18)],
)
def test_sizes_are_understood(value: Any, n_bytes: int) -> None:
    ioshape.configure(rate=value)
    assert ioshape.settings()["rate"] == (n_bytes, "configure()")


@pytest.mark.parametrize("word", ["1", "yes", "true", "on", True])
def test_switches_are_understood(word: Any) -> None:
    ioshape.configure(durable=word)
    assert ioshape.settings()["durable"] == (True, "configure()")


# ---- The log -------------------------------------------------------------------------------------


def _lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "ioshape" and record.levelno == level
    ]


def test_the_log_has_a_line_for_each_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="ioshape")
    for i in range(3):
        ioshape.save(checkpoint(i), tmp_path / f"{i}.pt")
    ioshape.save_async(checkpoint(3), tmp_path / "3.pt").wait()
    lines = [line for line in _lines(caplog, logging.DEBUG) if " engine" in line]
    for i in range(4):
        assert sum(f"{i}.pt" in line for line in lines) == 1, lines


def test_the_log_has_failures_in_the_background(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="ioshape")
    handle = ioshape.save_async(checkpoint(1), tmp_path / "missing" / "model.pt")
    wait_until(handle.done, "the failure")
    assert handle.exception() is not None
    ioshape.save(checkpoint(1), tmp_path / "model.pt")
    assert [record.levelno for record in caplog.records if record.name == "ioshape"] == [
        logging.ERROR
    ]
    assert "missing" in _lines(caplog, logging.ERROR)[0]


@pytest.mark.slow
def test_the_log_tells_of_what_the_dead_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="ioshape")
    ioshape.save(checkpoint(1), tmp_path / "model.pt")
    # A killed process of this machine leaves a temporary file whose lock is free.
    killed = subprocess.run(
        (
            sys.executable,
            "-c",
            "import os, sys, torch, ioshape\n"
            "def die(progress):\n"
            "    if progress.phase == 'write': os.kill(os.getpid(), 9)\n"
            "ioshape.save({'a': torch.ones(1 << 20)}, sys.argv[1], progress=die)\n",
            str(tmp_path / "model.pt"),
        ),
        env=environment(),
        check=False,
    )
    assert killed.returncode == -9
    left = next(path.name for path in tmp_path.iterdir() if path.name.startswith("."))
    ioshape.configure()  # each context looks through a directory once
    ioshape.save(checkpoint(2), tmp_path / "model.pt")
    assert [line for line in _lines(caplog, logging.WARNING) if left in line]
    assert not (tmp_path / left).exists()


# Python reports an exception of the log handler on stderr, and pytest turns that into a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_log_handler_that_fails_harms_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())
            raise ValueError("a handler's own mistake")

    logger = logging.getLogger("ioshape")
    handler = Failing()
    logger.addHandler(handler)
    caplog.set_level(logging.DEBUG, logger="ioshape")
    try:
        ioshape.save(checkpoint(1), tmp_path / "model.pt")
        ioshape.save_async(checkpoint(2), tmp_path / "model.pt").wait()
        wait_until(lambda: sum(" engine" in line for line in seen) == 2, "both lines")
    finally:
        logger.removeHandler(handler)
    assert number_in(tmp_path / "model.pt") == 2


# ---- The cost of an import -----------------------------------------------------------------------


def _modules_after(statements: str) -> set[str]:
    code = f"import sys\n{statements}\nprint(*sys.modules)"
    output = subprocess.run(
        (sys.executable, "-c", code),
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return set(output.split())


# Modules that take longer to import than all modules of ioshape.
COSTLY = {"torch", "numpy", "asyncio", "logging", "click", "rich", "socket", "inspect", "cffi"}


@pytest.mark.parametrize(
    "statements",
    [
        "import ioshape",
        "import ioshape; dir(ioshape)",
        "import ioshape; ioshape.__version__",
        "import ioshape; ioshape.configure(engine='threads'); ioshape.settings()",
    ],
)
def test_importing_costs_next_to_nothing(statements: str) -> None:
    bare = _modules_after("")
    added = _modules_after(statements) - bare
    # The module dataclasses imports "inspect".
    assert not added & COSTLY - ({"inspect"} if "configure" in statements else set())
    if statements == "import ioshape":
        # A signal handler may interrupt the first use. It must find this module imported.
        assert {name for name in added if name.startswith("ioshape.")} == {
            "ioshape._core",
            "ioshape._core.descriptors",
        }


@pytest.mark.parametrize("call", ["job()", "inspect(path)", "verify(path)", "trim()"])
def test_what_needs_no_torch_imports_none(tmp_path: Path, call: str) -> None:
    path = tmp_path / "model.pt"
    ioshape.save(checkpoint(1), path)
    added = _modules_after(f"import ioshape; path = {str(path)!r}; ioshape.{call}")
    assert not added & {"torch", "numpy", "asyncio", "click", "rich"}


def test_every_public_name_is_there() -> None:
    for name in ioshape.__all__:
        assert getattr(ioshape, name) is not None
    assert set(ioshape.__all__) <= set(dir(ioshape))
    assert ioshape.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="module 'ioshape' has no attribute 'sava'"):
        # mypy must report this misspelled name. Otherwise the ignore is unused, and mypy fails.
        ioshape.sava  # type: ignore[attr-defined]  # noqa: B018


def test_public_names_say_that_they_are_of_the_package() -> None:
    """Check that names do not contain their file's name, which may change: pickles have them."""
    for name in ioshape.__all__:
        public = getattr(ioshape, name)
        if name != "__version__":
            assert public.__module__ == "ioshape", name
            assert pickle.loads(pickle.dumps(public)) is public
    for module in (ioshape.errors, ioshape.staging, ioshape.types):
        for name in module.__all__:
            public = getattr(module, name)
            if module is not ioshape.staging and name not in ioshape.__all__:
                assert public.__module__ == module.__name__, name
            assert pickle.loads(pickle.dumps(public)) is public


def test_old_names_are_there_for_one_more_version() -> None:
    for name, home in ioshape._MOVED.items():
        now = ioshape._RENAMED.get(name, name)
        public = f"{now};" if home.startswith("_") else f"{home}.{now};"
        with pytest.warns(DeprecationWarning, match=f"is now ioshape.{public}") as told:
            old = getattr(ioshape, name)
        assert old is getattr(import_module(f"ioshape.{home}"), now)
        (warning,) = told
        assert warning.filename == __file__
        # A pickle of version 0.2 contains the old name.
        with pytest.warns(DeprecationWarning, match=name):
            assert pickle.loads(f"cioshape\n{name}\n.".encode()) is old
    with pytest.raises(AttributeError, match=r"use ioshape.probe\(path\).pool"):
        ioshape.pool_name  # type: ignore[attr-defined]  # noqa: B018
