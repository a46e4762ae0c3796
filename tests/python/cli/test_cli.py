# SPDX-License-Identifier: Apache-2.0
"""The command line as users see it: output, streams and exit codes."""

import json
import os
import re
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from command import IOSHAPE, call, fail, on_terminal, succeed
from processes import environment

COMMANDS = [
    "run",
    "inspect",
    "verify",
    "diff",
    "ls",
    "extract",
    "prune",
    "upload",
    "download",
    "drain",
    "doctor",
    "bench",
    "trace",
    "slots",
    "top",
    "exporter",
    "settings",
]

# ---- The program ---------------------------------------------------------------------------------


def test_version() -> None:
    assert succeed(call("--version")) == f"ioshape {ioshape.__version__}\n"


def imports_of(*arguments: str | Path) -> set[str]:
    """Return the modules that a call of the command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ioshape", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.slow
def test_commands_import_only_what_they_need(model: Path) -> None:
    """Check that these commands import neither torch, which takes seconds, nor other slow modules.

    Importing rich takes half as long as working on a small file.
    """
    for arguments in (
        ["--version"],
        ["--help"],
        ["run", "--help"],
        ["inspect", model],
        ["verify", model],
        ["slots", "status", "--help"],
        ["top", "--help"],
        ["exporter", "--help"],
        ["drain", "--help"],
        ["settings"],
    ):
        imports = imports_of(*arguments)
        assert "ioshape._cli" in imports
        assert not imports & {"torch", "rich", "rich.console", "rich.progress", "numpy"}, arguments


def test_importing_the_command_imports_no_click() -> None:
    code = "import ioshape._cli, sys; print('click' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


def test_help_lists_every_command() -> None:
    text = succeed(call("--help"))
    listed = re.findall(r"^  (\w+) +\S", text.partition("Commands:")[2], re.MULTILINE)
    assert listed == COMMANDS
    assert "ioshape run train.py" in text
    assert succeed(call("-h")) == text


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow
def test_every_command_has_help_with_examples(command: str) -> None:
    text = succeed(call(command, "--help"))
    assert text.startswith(f"Usage: ioshape {command} ")
    assert re.search(rf"^  .*\bioshape {command}\b", text.partition("\n")[2], re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80
    assert succeed(call(command, "-h")) == text


def test_no_command_shows_help_and_fails() -> None:
    done = call()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == succeed(call("--help"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["--frobnicate"],
        ["verify"],
        ["inspect", "--json"],
        ["bench", "--size", "much"],
        ["bench", "--size", "1K"],
        ["bench", "--rounds", "0"],
        ["settings", "engine"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    fail(call(*arguments), 2)


def test_mistyped_options_get_a_suggestion() -> None:
    assert "--json" in fail(call("ls", "--jsn", "."), 2)


def test_debug_shows_where_an_error_came_from() -> None:
    assert "Traceback" not in fail(call("slots", "status", "pool", env={"IOSHAPE_ENGINE": "steam"}))
    done = call("--debug", "slots", "status", "pool", env={"IOSHAPE_ENGINE": "steam"})
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert "config.py" in done.stderr


@pytest.mark.slow
def test_output_that_nobody_reads_is_no_error(tmp_path: Path) -> None:
    state = {f"layer{i}": torch.ones(1) for i in range(5000)}
    ioshape.save(state, tmp_path / "model.pt")
    done = subprocess.run(
        ["bash", "-c", f"{IOSHAPE} inspect model.pt | head -n 1; echo ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[1:] == ["141"]
    assert not done.stderr


def test_a_full_disk_below_stdout_is_an_error(model: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [IOSHAPE, "inspect", model],
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "ioshape: [Errno 28] No space left on device\n")


# ---- Files ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    weight = torch.arange(500_000, dtype=torch.float32)
    return {
        "model": {
            "weight": weight.view(1000, 500),
            "view": weight[7:19],
            "flags": torch.ones(3) > 0,
        },
        "optimizer": [{"step": torch.tensor(3), "half": torch.ones(2, 3, dtype=torch.bfloat16)}],
        "epoch": 4,
    }


@pytest.fixture(scope="module")
def model(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ours") / "model.pt"
    ioshape.save(state, path)
    return path


@pytest.fixture(scope="module")
def theirs(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "model.pt"
    torch.save(state, path)
    return path


NAMES = ["model.weight", "model.view", "model.flags", "optimizer[0].step", "optimizer[0].half"]


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors in the order of NAMES."""
    return [*state["model"].values(), *state["optimizer"][0].values()]


@pytest.mark.parametrize("kind", ["model", "theirs"])
def test_inspect_tells_where_each_tensor_lies(
    kind: str, state: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Check that the bytes at the reported offsets are those of the tensors."""
    path: Path = request.getfixturevalue(kind)
    (found,) = json.loads(succeed(call("inspect", "--json", path)))
    content = path.read_bytes()
    assert (found["path"], found["file_bytes"]) == (str(path), len(content))
    assert found["problem"] is None
    assert [tensor["name"] for tensor in found["tensors"]] == NAMES
    for tensor, told in zip(tensors_of(state), found["tensors"], strict=True):
        at = told["file_offset"]
        values = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        assert content[at : at + told["bytes"]] == values
        assert f"torch.{told['dtype']}" == str(tensor.dtype)
        assert (tuple(told["shape"]), tuple(told["stride"])) == (tensor.shape, tensor.stride())
        assert told["location"] == "cpu"
    weight, view, flags, *_ = found["tensors"]
    assert weight["record"] == view["record"] != flags["record"]
    assert found["tensor_bytes"] == sum(tensor.nbytes for tensor in tensors_of(state))
    records = {record["name"]: record for record in found["records"]}
    assert records[weight["record"]]["bytes"] == 2_000_000
    assert found["record_bytes"] == sum(record["bytes"] for record in found["records"])


def test_inspect_prints_a_line_for_each_tensor(model: Path) -> None:
    lines = succeed(call("inspect", model)).splitlines()
    (weight,) = (line.split() for line in lines if line.startswith("model.weight"))
    name, dtype, shape, n_bytes, record, offset = weight
    assert (name, dtype, shape, n_bytes) == ("model.weight", "float32", "1000x500", "2000000")
    assert record.startswith("data/")
    assert int(offset) % 4096 == 0
    (step,) = (line.split() for line in lines if line.startswith("optimizer[0].step"))
    assert step[1:4] == ["int64", "scalar", "8"]
    assert lines[-1].startswith("5 tensors of 1.91 MiB in ")
    assert not [line for line in lines if line.startswith("data.pkl")]


def test_inspect_tells_the_checksums_of_records(model: Path) -> None:
    (found,) = json.loads(succeed(call("inspect", "--json", model)))
    (pickle,) = (one for one in found["records"] if one["name"] == "data.pkl")
    at, length = pickle["file_offset"], pickle["bytes"]
    assert f"{zlib.crc32(model.read_bytes()[at : at + length]):08x}" == pickle["crc32"]


def test_inspect_of_several_files_goes_on_after_a_bad_one(
    model: Path, theirs: Path, tmp_path: Path
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a checkpoint")
    done = call("inspect", tmp_path / "none.pt", model, text, theirs, tmp_path)
    assert done.returncode == 1
    assert str(model) in done.stdout
    assert str(theirs) in done.stdout
    assert done.stderr.count("\n") == 3
    listed = json.loads(call("inspect", "--json", tmp_path / "none.pt", model).stdout)
    assert [sorted(one)[:1] for one in listed] == [["error"], ["file_bytes"]]


def test_inspect_tells_what_another_tool_changed(model: Path, tmp_path: Path) -> None:
    """Check that an index which no longer fits the file is ignored."""
    changed = tmp_path / "changed.pt"
    with zipfile.ZipFile(model) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            if name.endswith(("data.pkl", ".ioshape/index")):
                new.writestr(name, old.read(name))
    (found,) = json.loads(succeed(call("inspect", "--json", changed)))
    assert [record["name"] for record in found["records"]] == ["data.pkl", ".ioshape/index"]
    # The storages are missing, and the output shows it.
    assert [tensor["name"] for tensor in found["tensors"]] == NAMES
    assert {tensor["file_offset"] for tensor in found["tensors"]} == {None}
    line = next(one for one in call("inspect", changed).stdout.splitlines() if NAMES[0] in one)
    assert line.split() == [NAMES[0], "float32", "1000x500", "2000000", "data/0", "-"]


def test_names_in_a_file_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "odd\x1b[7;35m.pt"
    ioshape.save({"red\x1b[7;35m\nline\u202e": torch.ones(1), "[bold]é": torch.ones(1)}, path)
    for out in (
        succeed(call("inspect", path)),
        succeed(call("verify", path)),
        on_terminal("inspect", path)[1],
        on_terminal("verify", path)[1],
    ):
        assert "\x1b[7;35m" not in out
        assert "\u202e" not in out
        assert r"odd\x1b[7;35m.pt" in out
    assert "\x1b" not in call("verify", f"{path}.none").stdout
    out = succeed(call("inspect", path))
    assert r"red\x1b[7;35m\nline\u202e" in out
    assert "[bold]é" in out
    assert "[bold]é" in on_terminal("inspect", path)[1]


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    path = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.pt"))
    ioshape.save({"é日": torch.ones(1)}, path)
    env = environment(PYTHONIOENCODING="latin-1")
    done = subprocess.run([IOSHAPE, "inspect", path], env=env, capture_output=True, check=True)
    out = done.stdout.decode("latin-1")
    assert r"caf\udce9.pt: " in out
    assert "\n" + r"é\u65e5" in out
    assert "caf" in succeed(call("verify", path))


def test_a_terminal_gets_the_lines_of_a_pipe_with_bold_titles(model: Path) -> None:
    shown = on_terminal("inspect", model, width=40)[1].replace("\r\n", "\n")
    assert re.search(r"^\x1b\[1mtensor .*\x1b\[0m$", shown, re.MULTILINE)
    plain = succeed(call("inspect", model))
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == plain
    assert "\x1b" not in plain


def damage(path: Path, copy: Path, at: int) -> Path:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    copy.write_bytes(content)
    return copy


def offset_of(path: Path, name: str) -> int:
    (found,) = json.loads(succeed(call("inspect", "--json", path)))
    offset: int = next(one["file_offset"] for one in found["tensors"] if one["name"] == name)
    return offset


def test_verify(model: Path, theirs: Path) -> None:
    size = "1.91 MiB"
    assert succeed(call("verify", model)) == f"{model}: ok, {size}\n"
    assert succeed(call("verify", theirs, model)) == f"{theirs}: ok, {size}\n{model}: ok, {size}\n"
    assert not succeed(call("verify", "--quiet", model, theirs))
    assert not succeed(call("verify", "-q", model))


@pytest.mark.parametrize("kind", ["model", "theirs"])
def test_verify_names_the_damage(
    kind: str, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(kind)
    bad = damage(path, tmp_path / "bad.pt", offset_of(path, "model.weight") + 1_500_000)
    for options in ([], ["--quiet"]):
        done = call("verify", *options, model, bad, model)
        assert (done.returncode, done.stderr) == (1, "")
        lines = [line for line in done.stdout.splitlines() if "ok," not in line]
        assert len(done.stdout.splitlines()) == (1 if options else 3)
    (outcome,) = json.loads(call("verify", "--json", bad).stdout)
    assert (outcome["path"], outcome["state"]) == (str(bad), "damaged")
    assert [outcome["error"]] == lines


@pytest.mark.parametrize("kind", ["model", "theirs"])
def test_a_quick_verify_checks_the_structure(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(kind)
    bad = damage(path, tmp_path / "bad.pt", offset_of(path, "model.weight") + 1_500_000)
    (quick,) = json.loads(succeed(call("verify", "--json", "--quick", bad)))
    assert (quick["state"], quick["quick"]) == ("ok", True)
    ioshape.verify(bad, quick=True)
    with pytest.raises(ioshape.DamagedError):
        ioshape.verify(bad)
    cut = tmp_path / "cut.pt"
    cut.write_bytes(path.read_bytes()[:-100])
    assert call("verify", "--quick", cut).returncode == 1


def test_a_quick_verify_of_a_checkpoint(tmp_path: Path) -> None:
    ioshape.save_group({"a": torch.ones(1 << 20)}, tmp_path, 1)
    (file,) = (tmp_path / "step-0000000001").glob("*.pt")
    damage(file, file, file.stat().st_size // 2)
    newest = ioshape.latest(tmp_path)
    assert newest is not None
    told: list[ioshape.types.Progress] = []
    newest.verify(quick=True)
    with pytest.raises(ioshape.DamagedError):
        newest.verify(progress=told.append)
    assert told
    succeed(call("verify", "--quick", tmp_path))
    os.truncate(file, 100)
    assert call("verify", "--quick", tmp_path / "step-0000000001").returncode == 1


def test_verify_of_what_cannot_be_read(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.pt").write_bytes(model.read_bytes()[:-100])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_bytes(b"words " * 100)
    names = ["cut.pt", "empty.pt", "text.pt", "none.pt", "."]
    done = call("verify", *names, model, folder=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    *lines, last = done.stdout.splitlines()
    assert last == f"{model}: ok, 1.91 MiB"
    outcomes = json.loads(call("verify", "--json", *names, model, folder=tmp_path).stdout)
    assert [outcome["path"] for outcome in outcomes] == [*names, str(model)]
    assert [outcome["state"] for outcome in outcomes][3:] == ["unreadable", "unreadable", "ok"]
    assert [outcome["error"] for outcome in outcomes] == [*lines, None]
    assert outcomes[-1]["bytes"] == model.stat().st_size


def test_verify_of_a_file_without_checksums_does_not_say_ok(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(1000)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    done = call("verify", path)
    assert done.returncode == 1
    (outcome,) = json.loads(call("verify", "--json", path).stdout)
    assert outcome["state"] == "without checksums"


def test_verify_shows_a_bar_on_a_terminal_and_leaves_only_the_line(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    ioshape.save({"a": torch.ones(16 << 20)}, path)
    code, seen = on_terminal("verify", path)
    assert code == 0
    assert "━" in seen
    assert seen.endswith(f"{path}: ok, 64.0 MiB\r\n")
    # The terminal line of the bar is erased before the result appears.
    assert "\x1b[2K" in seen.rpartition("━")[2]
    for option in ("--quiet", "--json"):
        assert "━" not in on_terminal("verify", option, path)[1]


# ---- Settings ------------------------------------------------------------------------------------


def test_settings() -> None:
    given = {"IOSHAPE_ENGINE": "threads", "IOSHAPE_STAGING_BYTES": "64M", "IOSHAPE_DURABLE": "off"}
    lines = {line.split()[0]: line for line in succeed(call("settings", env=given)).splitlines()}
    expected = {f"IOSHAPE_{name.upper()}" for name in ioshape.settings()}
    assert lines.keys() == {"variable", *expected}
    assert lines["IOSHAPE_ENGINE"].split()[1:3] == ["threads", "variable"]
    assert lines["IOSHAPE_DURABLE"].split()[1:3] == ["no", "variable"]
    assert lines["IOSHAPE_FULL"].split()[1:3] == ["fail", "default"]
    found = json.loads(succeed(call("settings", "--json", env=given)))
    assert found.keys() == ioshape.settings().keys()
    assert (found["engine"]["value"], found["engine"]["from"]) == ("threads", "IOSHAPE_ENGINE")
    assert (found["full"]["value"], found["full"]["default"]) == (None, "fail")
    # A table for 80 columns wraps long texts.
    assert "\x1b[1m" in on_terminal("settings", width=80)[1]


BAD = {
    "IOSHAPE_SLOTS": "many",
    "IOSHAPE_DURABLE": "maybe",
    "IOSHAPE_MODE": "all",
    "IOSHAPE_LAYOUT": "stripes=8",
    "IOSHAPE_COORDINATOR": "redis://host:notaport",
    "IOSHAPE_ENGIN": "threads",
}


@pytest.mark.parametrize("variable", BAD)
@pytest.mark.parametrize("command", ["settings", "run"])
def test_a_variable_that_cannot_be_used_is_told_before_anything_begins(
    tmp_path: Path, command: str, variable: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it has begun')")
    arguments = [command] if command == "settings" else [command, str(script)]
    done = call(*arguments, env={variable: BAD[variable]})
    assert done.returncode == 2
    assert "it has begun" not in done.stderr
    # A misspelled name is reported with the nearest setting.
    assert ("IOSHAPE_ENGINE" in done.stderr) == (variable == "IOSHAPE_ENGIN")


@pytest.mark.wording
@pytest.mark.parametrize("variable", BAD)
def test_a_variable_that_cannot_be_used_is_named(variable: str) -> None:
    assert variable in call("settings", env={variable: BAD[variable]}).stderr


@pytest.mark.wording
def test_verify_says_which_tensor_of_which_file_is_damaged(model: Path, tmp_path: Path) -> None:
    bad = damage(model, tmp_path / "bad.pt", offset_of(model, "model.weight") + 1_500_000)
    said = call("verify", bad).stdout
    assert str(bad) in said
    assert "'model.weight'" in said


# ---- Completion ----------------------------------------------------------------------------------


def complete(shell: str, words: str, number: int) -> list[str]:
    """Return the answer to a shell's completion request."""
    asked = {
        "_IOSHAPE_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(number),
    }
    return succeed(call(env=asked)).split("\n")


def test_completion_in_bash(tmp_path: Path) -> None:
    """Check a bash that is set up as the documentation says."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "ioshape").symlink_to(IOSHAPE)
    text = """
eval "$(_IOSHAPE_COMPLETE=bash_source ioshape)"
COMP_WORDS=(ioshape ver) COMP_CWORD=1
_ioshape_completion ioshape; echo "${COMPREPLY[@]}"
COMPREPLY=() COMP_WORDS=(ioshape verify --quie) COMP_CWORD=2
_ioshape_completion ioshape; echo "${COMPREPLY[@]}"
complete -p ioshape
"""
    path = f"{bin_folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", text],
        env=environment(PATH=path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[:2] == ["verify", "--quiet"]
    assert "_ioshape_completion ioshape" in done.stdout
    assert not done.stderr


def test_completion_offers_commands_options_and_files() -> None:
    assert "plain,inspect" in complete("bash", "ioshape i", 1)
    assert set(complete("bash", "ioshape ", 1)) >= {f"plain,{name}" for name in COMMANDS}
    assert "plain,--json" in complete("bash", "ioshape inspect --", 2)
    assert complete("bash", "ioshape verify mod", 2)[0].startswith("file,")
    assert complete("bash", "ioshape bench scr", 2)[0].startswith("dir,")
