# SPDX-License-Identifier: Apache-2.0
"""Texts that quote foreign names and addresses: no escape reaches a terminal, no password a log."""

import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import ioshape
import ioshape.safetensors
import pytest
import torch
from command import call
from ioshape._core import terminal as _terminal
from ioshape._core.errors import Different, MismatchError, failure
from ioshape._core.log import logger
from ioshape._core.text import address_without_password, harmless, one_line, without_password
from object_store import variables
from records import flip, offset_of

SECRET = "s3cr3t"
#: Characters that set a terminal's title (7 and 8 bits), end a line, and write from right to left.
ESCAPES = "\x1b]0;pwned\x07\x9d0;pwned\x9c\r\n\u202e"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"redis://user:{SECRET}@host/0 fails", "redis://user:***@host/0 fails"),
        (f"redis://:{SECRET}@one:1,two:2", "redis://:***@one:1,two:2"),
        (f'"http://user:{SECRET}@host:9000/a?b"', '"http://user:***@host:9000/a?b"'),
        (f"https://{SECRET}@host/a", "https://***@host/a"),
        (f"s3+https://a:{SECRET}@h, redis://b:{SECRET}@h", "s3+https://a:***@h, redis://b:***@h"),
        (f"unix:///path?db=1&password={SECRET}", "unix:///path?db=1&password=***"),
        (f"https://h/a?X-Amz-Signature={SECRET}&b", "https://h/a?X-Amz-Signature=***&b"),
        ("redis://user@host", "redis://user@host"),
        ("mail a@b about http://host:1/x", "mail a@b about http://host:1/x"),
        ("s3://bucket/run", "s3://bucket/run"),
    ],
)
def test_passwords_in_addresses_are_not_shown(text: str, shown: str) -> None:
    assert without_password(text) == shown
    assert harmless(text) == shown
    assert harmless(shown) == shown


def test_a_password_may_have_spaces_where_the_text_is_an_address() -> None:
    assert address_without_password(f"redis://:a {SECRET}@host") == "redis://:***@host"


@pytest.mark.parametrize(
    "piece", ["a://a:", "a", "://", "@", "a://a@", "a:@", "\x1b", "?password="]
)
def test_the_time_grows_with_the_length_only(piece: str) -> None:
    """Check that the time is linear: with quadratic time this would take hours."""
    assert harmless(piece * 200_000)


def test_names_become_one_line_of_what_is_seen() -> None:
    assert one_line(ESCAPES).isprintable()
    assert one_line("Zürich ☃ 🚂") == "Zürich ☃ 🚂"


def test_an_error_is_harmless_whoever_raises_it(path: Path) -> None:
    error = failure(-5, f'cannot load "{ESCAPES}"', str(path), "load", remedy=f"ask {ESCAPES}")
    assert str(error).isprintable()
    secret = failure(
        -5, f"cannot reach http://u:{SECRET}@h", "", "load", remedy=f"?password={SECRET}"
    )
    assert SECRET not in str(secret)
    assert SECRET not in "".join(traceback.format_exception(secret))
    different = (Different(ESCAPES, ESCAPES, "x"),)
    for line in str(MismatchError(ESCAPES, (ESCAPES,), (ESCAPES,), different)).split("\n"):
        assert line.isprintable()


def test_log_lines_are_harmless(caplog: pytest.LogCaptureFixture) -> None:
    logger().warning("%s at redis://u:%s@h", ESCAPES, SECRET)
    logging.getLogger("ioshape").error(f"{ESCAPES} http://{SECRET}@h")
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert SECRET not in record.getMessage()
    assert len(logger().filters) == 1


def test_lines_on_stderr_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    _terminal.say(f"{ESCAPES} redis://u:{SECRET}@h")
    assert stderr.getvalue().rstrip("\n").isprintable()
    assert SECRET not in stderr.getvalue()


# ---- Names in files ------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file with a tensor of such a name; the tests damage it."""
    path = tmp_path / "a.pt"
    ioshape.save({ESCAPES: torch.ones(300_000), "b": torch.ones(3)}, path)
    return path


def _index(path: Path) -> object:
    return ioshape.open(path)[ESCAPES][0, 0, 0]


def _safetensors(path: Path) -> object:
    name = path.with_suffix(".safetensors")
    ioshape.safetensors.save_file({ESCAPES: torch.ones(3)}, name, checksums=True)
    flip(name, name.stat().st_size - 1)
    ioshape.verify(name)
    return None


def _missing_safetensors(path: Path) -> object:
    name = path.with_suffix(".safetensors")
    ioshape.safetensors.save_file({"a": torch.ones(3)}, name)
    with ioshape.safetensors.safe_open(name, framework="pt") as file:
        return file.get_tensor(ESCAPES)


def _other_shape(path: Path) -> object:
    name = path.with_suffix(".safetensors")
    ioshape.safetensors.save_file({ESCAPES: torch.ones(3)}, name)
    return ioshape.safetensors.load_file(name, into={ESCAPES: torch.ones(4)})


WAYS: dict[str, Callable[[Path], object]] = {
    "load": ioshape.load,
    "into": lambda path: ioshape.load(path, into={ESCAPES: torch.ones(300_000)}),
    "other into": lambda path: ioshape.load(path, into={ESCAPES: torch.ones(2)}),
    "only": lambda path: ioshape.load(path, only=[ESCAPES]),
    "verify": ioshape.verify,
    "index": _index,
    "safetensors": _safetensors,
    "missing in safetensors": _missing_safetensors,
    "other shape in safetensors": _other_shape,
}


@pytest.mark.parametrize("way", WAYS)
def test_no_name_in_a_file_reaches_the_terminal_as_it_is(way: str, path: Path) -> None:
    flip(path, offset_of(path, "data/0") + 1000)
    with pytest.raises(Exception, match=r".") as caught, warnings.catch_warnings(record=True):
        WAYS[way](path)
    for line in str(caught.value).split("\n"):
        assert line.isprintable(), line


def test_the_name_of_a_path_does_not_either(tmp_path: Path) -> None:
    for name in (ESCAPES, "\udcff\udc9b"):
        path = tmp_path / name
        path.write_bytes(b"no checkpoint" * 10)
        for call_ in (ioshape.verify, ioshape.inspect):  # load() leaves such a file to torch
            with pytest.raises(ioshape.StorageError) as caught:
                call_(path)
            assert str(caught.value).isprintable()
            assert caught.value.path == str(path)  # programs get the path unchanged


# ---- The command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [(), ("--debug",)])
def test_no_command_prints_the_password_of_an_object_store(
    debug: tuple[str, ...], tmp_path: Path
) -> None:
    endpoint = f"http://user:{SECRET}@127.0.0.1:1"
    env = variables(endpoint, tmp_path) | {"AWS_MAX_ATTEMPTS": "1"}
    done = call(*debug, "ls", "s3://bucket/run", env=env)
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert bool(debug) == ("Traceback" in done.stderr)


def test_a_traceback_of_a_program_does_not_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ioshape import s3  # noqa: PLC0415

    endpoint = f"http://user:{SECRET}@127.0.0.1:1"
    for name, value in (variables(endpoint, tmp_path) | {"AWS_MAX_ATTEMPTS": "1"}).items():
        monkeypatch.setenv(name, value)
    for given in (None, endpoint, f"http://user:{SECRET}@[bad"):
        with pytest.raises((OSError, ValueError)) as caught:
            s3.checkpoints("s3://bucket/run", endpoint=given)
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        assert SECRET not in repr(caught.value) + str(getattr(caught.value, "filename", ""))


def test_debug_prints_no_escapes(path: Path) -> None:
    flip(path, offset_of(path, "data/0") + 1000)
    named = path.with_name(f"{ESCAPES}.pt")
    path.rename(named)
    done = call("--debug", "extract", named, "--rank", "0")
    assert done.returncode == 1
    assert done.stderr
    for line in done.stderr.split("\n"):
        assert line.isprintable()
