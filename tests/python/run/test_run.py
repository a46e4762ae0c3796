# SPDX-License-Identifier: Apache-2.0
"""`ioshape run`: unmodified scripts save through ioshape, and see no other difference.

Each test compares what a script sees with what it sees under plain Python.
"""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from processes import TIMEOUT_S
from records import is_ours

COMMAND = Path(sysconfig.get_path("scripts")) / "ioshape"
AS_COMMAND = [str(COMMAND), "run"]
AS_MODULE = [sys.executable, "-m", "ioshape", "run"]

Done = subprocess.CompletedProcess[str]

SAVE = """
import torch
torch.save({"a": torch.ones(3)}, "model.pt")
"""


def variables(**more: str) -> dict[str, str]:
    """Return the environment of this process without variables that change Python.

    IOSHAPE_DURABLE makes small files durable like large ones, so that their content tells who wrote
    them. test_small.py tests the default.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "IOSHAPE_DURABLE": "1", **more}


def run(
    command: Sequence[str | Path],
    folder: Path,
    env: Mapping[str, str] | None = None,
    text: str | None = None,
) -> Done:
    return subprocess.run(
        command,
        cwd=folder,
        env=variables() if env is None else env,
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def run_script(folder: Path, text: str, *arguments: str) -> Done:
    script(folder, text)
    return run([*AS_COMMAND, "script.py", *arguments], folder)


def succeed(done: Done) -> str:
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


# ---- What a script sees --------------------------------------------------------------------------

LOOK = """
import json, os, sys, __main__
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path,
    "name": __name__,
    "file": __file__,
    "globals": sorted(globals()),
    "main": __main__.__dict__ is globals(),
    "spec": repr(__spec__ and __spec__.name),
    "package": __package__,
    "loader": type(__loader__).__name__,
    "flags": list(sys.flags),
    "warnings": sys.warnoptions,
    "xoptions": sys._xoptions,
    "executable": sys.executable,
    "unbuffered": sys.stdout.write_through,
    "modules": sorted(set(sys.modules) - {"_ioshape_hook", "sitecustomize"}),
    "stdin": sys.stdin.read(),
}))
"""


def look(command: Sequence[str], folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(succeed(run(command, folder, text="input")))
    return found


@pytest.mark.parametrize("ours", [AS_COMMAND, AS_MODULE], ids=["command", "module"])
def test_a_script_sees_what_it_sees_under_python(ours: list[str], tmp_path: Path) -> None:
    script(tmp_path, LOOK, "sub/script.py")
    arguments = ["sub/script.py", "--lr", "1", "--help", "-m", "", "--no-load", "a b"]
    seen = look([*ours, *arguments], tmp_path)
    assert seen == look([sys.executable, *arguments], tmp_path)
    assert seen["argv"] == arguments
    assert seen["path"][0] == str(tmp_path / "sub")  # type: ignore[index]


@pytest.mark.parametrize("ours", [AS_COMMAND, AS_MODULE], ids=["command", "module"])
def test_a_module_sees_what_it_sees_under_python(ours: list[str], tmp_path: Path) -> None:
    script(tmp_path, LOOK, "package/train.py")
    arguments = ["-m", "package.train", "--lr", "1", "-m", "--version"]
    assert look([*ours, *arguments], tmp_path) == look([sys.executable, *arguments], tmp_path)


def test_folders_archives_and_stdin_run_as_well(tmp_path: Path) -> None:
    script(tmp_path, LOOK, "folder/__main__.py")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    for name in ("folder", "app.pyz"):
        seen = look([*AS_COMMAND, name, "x"], tmp_path)
        assert seen == look([sys.executable, name, "x"], tmp_path)
    told = run([*AS_COMMAND, "-", "x"], tmp_path, text="import sys; print(sys.argv)")
    assert succeed(told) == "['-', 'x']\n"


@pytest.mark.parametrize(
    "options",
    [
        ["-u"],
        ["-uB"],
        ["-OO"],
        ["-X", "dev"],
        ["-Xutf8", "-bb"],
        ["-W", "error::UserWarning"],
        ["-BWignore", "-q"],
        ["--check-hash-based-pycs", "always", "-u"],
        ["-P"] if sys.version_info >= (3, 11) else ["-s"],
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_options_of_python_are_the_scripts(options: list[str], tmp_path: Path) -> None:
    script(tmp_path, LOOK)
    plain = look([sys.executable, *options, "script.py"], tmp_path)
    for module in (["-m", "ioshape"], ["-mioshape"]):
        ours = [sys.executable, *options, *module, "run", "script.py"]
        assert look(ours, tmp_path) == plain


def test_an_option_may_stand_in_one_word_with_the_module(tmp_path: Path) -> None:
    script(tmp_path, LOOK)
    plain = look([sys.executable, "-u", "script.py"], tmp_path)
    assert plain["unbuffered"]
    assert look([sys.executable, "-um", "ioshape", "run", "script.py"], tmp_path) == plain


@pytest.mark.parametrize("option", ["-E", "-I", "-S"])
def test_options_that_would_leave_us_out_are_refused(option: str, tmp_path: Path) -> None:
    script(tmp_path, SAVE)
    # -S leaves out site-packages, too. Its users set PYTHONPATH themselves.
    paths = os.pathsep.join(path for path in sys.path if path)
    done = run(
        [sys.executable, option, "-m", "ioshape", "run", "script.py"],
        tmp_path,
        variables(PYTHONPATH=paths),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ioshape: Python's options -E, -I and -S ignore PYTHONPATH")
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a word')",
        "raise SystemExit",
        "import os; os._exit(7)",
        "def f():\n    1 / 0\nf()",
        "import nothing_of_this_name",
        "this is no Python",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os; os.abort()",
    ],
)
@pytest.mark.slow
def test_the_end_is_the_scripts_own(text: str, tmp_path: Path) -> None:
    """Check the exit code, the signal and the exact traceback."""
    script(tmp_path, text)
    plain = run([sys.executable, "script.py"], tmp_path)
    for ours in (AS_COMMAND, AS_MODULE):
        done = run([*ours, "script.py"], tmp_path)
        assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
        assert done.stderr == plain.stderr


def test_it_is_the_same_process(tmp_path: Path) -> None:
    """Check that the script keeps the command's process id: launchers signal it and wait for it."""
    script(tmp_path, "import os; print(os.getpid())")
    with subprocess.Popen(
        [*AS_COMMAND, "script.py"], cwd=tmp_path, env=variables(), stdout=subprocess.PIPE, text=True
    ) as process:
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert int(out) == process.pid


def test_ctrl_c_is_the_scripts(tmp_path: Path) -> None:
    script(
        tmp_path,
        "import time\n"
        "try:\n    print('begun', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('heard')\n",
    )
    with subprocess.Popen(
        [*AS_COMMAND, "script.py"], cwd=tmp_path, env=variables(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (0, "heard\n")


def test_a_script_without_torch_imports_neither_torch_nor_us(tmp_path: Path) -> None:
    """Check the imports themselves: the comparison above would pass if both runs had them."""
    out = succeed(
        run_script(
            tmp_path,
            "import sys\n"
            "print([name for name in ('torch', 'ioshape', 'cffi', 'click', 'rich', 'numpy') "
            "if name in sys.modules])",
        )
    )
    assert out == "[]\n"


# ---- Saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "imports",
    [
        # The helper module saves for the script, as libraries do. Libraries look up the module this
        # way to find out whether it is installed.
        "import importlib.util, threading\ndef f():\n    global save\n"
        "    importlib.util.find_spec('torch')\n    from helper import save\n"
        "t = threading.Thread(target=f); t.start(); t.join()",
        *(
            pytest.param(imports, marks=pytest.mark.long)
            for imports in (
                "from torch import save",
                "from torch.serialization import save",
                "import torch.serialization; save = torch.serialization.save",
                "import torch.nn, torch; save = torch.save",
                "from importlib import import_module; save = import_module('torch').save",
                # The script uses both packages, and torch is imported while ioshape is.
                "from ioshape import save_async\nfrom torch import save",
            )
        ),
    ],
)
@pytest.mark.slow
def test_every_way_to_get_at_save(imports: str, tmp_path: Path) -> None:
    script(tmp_path, "from torch import save as keep\ndef save(*a): keep(*a)\n", "helper.py")
    succeed(run_script(tmp_path, f"{imports}\nimport torch\nsave(torch.ones(2), 'model.pt')\n"))
    assert is_ours(tmp_path / "model.pt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "import ioshape.dcp",
        pytest.param("import ioshape.safetensors", marks=pytest.mark.long),
        pytest.param("import ioshape.lightning", marks=pytest.mark.long),
        pytest.param("import ioshape.torch_checkpointing", marks=pytest.mark.long),
        pytest.param(
            "import ioshape\nwith ioshape.patched(safetensors=True, dcp=True): pass",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_script_may_begin_with_a_part_of_ours(first: str, tmp_path: Path) -> None:
    """Check imports of a followed package while ioshape itself is only half imported."""
    text = f"""
{first}
import torch
import torch.distributed.checkpoint as dcp
import ioshape.dcp
import safetensors.torch
torch.save({{"a": torch.ones(3)}}, "model.pt")
safetensors.torch.save_file({{"a": torch.ones(3)}}, "model.safetensors")
assert isinstance(dcp.FileSystemWriter("x"), ioshape.dcp.Writer)
"""
    script(tmp_path, text)
    done = run([*AS_COMMAND, "script.py"], tmp_path, variables(IOSHAPE_TRACE=str(tmp_path / "t")))
    succeed(done)
    assert "does not handle" not in done.stderr
    assert "not replaced" not in done.stderr
    told = "".join(path.read_text() for path in (tmp_path / "t").iterdir())
    assert '"model.pt"' in told
    assert '"model.safetensors"' in told


DAMAGE_AND_LOAD = """
import torch
torch.save({"layer": {"weight": torch.arange(1e6)}}, "model.pt")
data = bytearray(open("model.pt", "rb").read())
at = data.index(torch.arange(1e6).numpy().tobytes()[4000:4100])
data[at] ^= 1
open("model.pt", "wb").write(data)
try:
    print("loaded", torch.load("model.pt")["layer"]["weight"][:2].tolist())
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_script_saves_and_loads_through_us(tmp_path: Path) -> None:
    """Check a load that only our index can refuse with the name of the tensor."""
    out = succeed(run_script(tmp_path, DAMAGE_AND_LOAD))
    assert out.startswith("DamagedError ")
    assert "'layer.weight'" in out


@pytest.mark.slow
def test_no_load_leaves_loading_to_torch(tmp_path: Path) -> None:
    text = """
import torch.distributed.checkpoint as dcp
print(type(dcp.FileSystemWriter("b")).__name__, type(dcp.FileSystemReader("b")).__name__)
"""
    script(tmp_path, DAMAGE_AND_LOAD + text)
    out = succeed(run([*AS_COMMAND, "--no-load", "script.py"], tmp_path))
    assert "DamagedError" not in out
    assert out.startswith("loaded [0.0, 1.0]")
    assert out.endswith("\nWriter FileSystemReader\n")
    assert is_ours_in_name(tmp_path / "model.pt")


def is_ours_in_name(path: Path) -> bool:
    """Return whether a file, which may be damaged, has our index."""
    return b"/.ioshape/index" in path.read_bytes()


@pytest.mark.slow
def test_torch_is_the_module_that_it_was(tmp_path: Path) -> None:
    """Check that torch's loader, its spec and the traceback of its errors are unchanged.

    Only one finder stays in sys.meta_path: it waits for frameworks.
    """
    text = """
import inspect, importlib.machinery, sys, torch, torch.serialization
print(type(torch.__loader__) is importlib.machinery.SourceFileLoader)
print(torch.__spec__.loader is torch.__loader__, vars(torch.__loader__).keys())
print(len(inspect.getsource(torch)) > 1000)
print(len([finder for finder in sys.meta_path if "ioshape" not in repr(finder)]))
print(inspect.signature(torch.save), torch.save.__name__, torch.save.__doc__[:40])
torch.nothing
"""
    script(tmp_path, text)
    plain = run([sys.executable, "script.py"], tmp_path)
    done = run([*AS_COMMAND, "script.py"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, plain.stdout, plain.stderr)
    assert "has no attribute 'nothing'" in plain.stderr
    assert plain.stdout.startswith("True\nTrue dict_keys(['name', 'path'])\nTrue\n")


# ---- Children ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["spawn", pytest.param("forkserver", marks=pytest.mark.long), "fork"]
)
@pytest.mark.slow
def test_processes_of_multiprocessing_save_through_us(method: str, tmp_path: Path) -> None:
    text = f"""
import multiprocessing

def work(name):
    import torch
    torch.save(torch.ones(3), name)

if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        pool.apply(work, ["model.pt"])
"""
    succeed(run_script(tmp_path, text))
    assert is_ours(tmp_path / "model.pt")


@pytest.mark.slow
def test_programs_that_the_script_starts_save_through_us(tmp_path: Path) -> None:
    """Check a program that starts through a shell, in another folder, with options of Python."""
    script(tmp_path, SAVE, "below/train.py")
    text = f"""
import subprocess
subprocess.run(["sh", "-c", "cd below && exec {sys.executable} -X dev -W ignore train.py"])
"""
    succeed(run_script(tmp_path, text))
    assert is_ours(tmp_path / "below" / "model.pt")


def test_a_child_can_be_left_alone(tmp_path: Path) -> None:
    """Check that a torch that cannot be ours is reported by a child only without the variable."""
    script(tmp_path, "", "torch.py")
    text = """
import os, subprocess, sys
for more in ({"IOSHAPE_RUN": "0"}, {}):
    subprocess.run([sys.executable, "-c", "import torch"], env={**os.environ, **more})
    print("ended", file=sys.stderr, flush=True)
"""
    told = run_script(tmp_path, text).stderr
    assert told.startswith("ended\nioshape: torch.save was not replaced in process ")


@pytest.mark.slow
def test_it_can_be_run_below_itself(tmp_path: Path) -> None:
    text = SAVE + "import os; print(os.environ['PYTHONPATH'])\n"
    script(tmp_path, text, "package/train.py")
    text = f"import subprocess; subprocess.run({[*AS_MODULE, '-m', 'package.train']!r})"
    out = succeed(run_script(tmp_path, text))
    assert is_ours(tmp_path / "model.pt")
    assert os.pathsep not in out  # our folder is in PYTHONPATH once


@pytest.mark.parametrize(
    "launcher",
    ["torchrun -m ioshape run", pytest.param("ioshape run -m torchrun", marks=pytest.mark.long)],
)
@pytest.mark.slow
def test_torchrun(launcher: str, tmp_path: Path) -> None:
    text = """
import sys, ioshape, torch, torch.distributed
jobs = [ioshape.job()]
torch.distributed.init_process_group("gloo")
jobs.append(ioshape.job())
rank = torch.distributed.get_rank()
total = torch.ones(1)
torch.distributed.all_reduce(total)
torch.save(total, f"rank{rank}.pt")
with open(f"rank{rank}.txt", "w") as file:
    print(sys.argv, *((*job[:4], job.source) for job in jobs), total.item(), file=file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
sys.exit(5)
"""
    script(tmp_path, text, "train.py")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if launcher.startswith("torchrun"):
        command = [sys.executable, "-m", *torchrun, "-m", "ioshape", "run"]
    else:
        command = [*AS_COMMAND, "-m", *torchrun]
    done = run([*command, "train.py", "--lr", "1"], tmp_path, variables(OMP_NUM_THREADS="1"))
    assert done.returncode == 1
    assert "exitcode  : 5" in done.stderr
    for rank in (0, 1):
        jobs = [(rank, 2, rank, 2, source) for source in ("torchrun", "torch.distributed")]
        told = (tmp_path / f"rank{rank}.txt").read_text()
        assert told == f"['train.py', '--lr', '1'] {jobs[0]} {jobs[1]} 2.0\n"
        assert is_ours(tmp_path / f"rank{rank}.pt")


@pytest.mark.slow
def test_a_lost_checkpoint_shows_in_the_exit_status(tmp_path: Path) -> None:
    text = "import ioshape; ioshape.save_async([], 'missing/model.pt')"
    assert run_script(tmp_path, text).returncode == os.EX_IOERR


# ---- sitecustomize, PYTHONPATH and broken installations ------------------------------------------


def test_a_hidden_sitecustomize_has_its_turn(tmp_path: Path) -> None:
    """Check that ioshape has its turn, too: it reports a torch that it cannot replace."""
    script(tmp_path, "", "torch.py")
    hidden = script(tmp_path, "import sys\nsys.was_here = __file__\n", "site/sitecustomize.py")
    script(
        tmp_path,
        "import sys, sitecustomize, torch\n"
        "print(sys.was_here, sitecustomize.__file__, sys.path[1])",
    )
    env = variables(PYTHONPATH=str(hidden.parent))
    done = run([*AS_COMMAND, "script.py"], tmp_path, env)
    assert done.stdout.split() == [str(hidden), str(hidden), str(hidden.parent)]
    assert done.stderr.startswith("ioshape: torch.save was not replaced in process ")


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('from the hidden one')",
        "import nothing_of_this_name",
        "raise ImportError('without a name')",
        "no Python",
    ],
)
def test_what_a_hidden_sitecustomize_raises_is_pythons_to_report(text: str, tmp_path: Path) -> None:
    hidden = script(tmp_path, text, "site/sitecustomize.py")
    script(tmp_path, "print('goes on')")
    env = variables(PYTHONPATH=str(hidden.parent))
    plain = run([sys.executable, "script.py"], tmp_path, env)
    # Run Python in the environment of the command. The command itself is a Python and would report
    # it, too.
    ours = run([sys.executable, "script.py"], tmp_path, below_run(env))
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.stderr == plain.stderr
    assert plain.stderr or plain.returncode


def test_a_hidden_sitecustomize_that_ends_the_program_ends_it(tmp_path: Path) -> None:
    hidden = script(tmp_path, "raise SystemExit(4)", "site/sitecustomize.py")
    script(tmp_path, "print('goes on')")
    env = variables(PYTHONPATH=str(hidden.parent))
    for one in (env, below_run(env)):
        done = run([sys.executable, "script.py"], tmp_path, one)
        assert done.returncode
        assert not done.stdout
        assert done.stderr.endswith("\nSystemExit: 4\n")


def below_run(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which `ioshape run` starts the script."""
    from ioshape._run import run as _run  # noqa: PLC0415 - not before the command itself has been tried

    return _run.environment(env)


def test_pythonpath_stays_the_users(tmp_path: Path) -> None:
    script(tmp_path, "import sys; print(sys.path)")
    (tmp_path / "a").mkdir()
    for before in ("", "a", f"{tmp_path / 'a'}{os.pathsep}", f"{os.pathsep}a"):
        env = variables(PYTHONPATH=before)
        plain = succeed(run([sys.executable, "script.py"], tmp_path, env))
        assert succeed(run([*AS_COMMAND, "script.py"], tmp_path, env)) == plain, before


def test_a_torch_that_cannot_be_ours_does_not_stop_the_program(tmp_path: Path) -> None:
    """Check that one line on stderr reports it."""
    script(tmp_path, "version = 'not the real one'\n", "torch.py")
    done = run_script(tmp_path, "import torch; print(torch.version)")
    assert (done.returncode, done.stdout) == (0, "not the real one\n")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ioshape: torch.save was not replaced in process ")


@pytest.mark.slow
def test_a_torch_that_fails_at_first_is_ours_when_it_comes(tmp_path: Path) -> None:
    text = (
        """
import os, sys
sys.path.insert(0, "broken")
try:
    import torch
except RuntimeError as error:
    print(error)
sys.path.remove("broken")
"""
        + SAVE
    )
    script(tmp_path, "raise RuntimeError('no driver')\n", "broken/torch.py")
    assert succeed(run_script(tmp_path, text)) == "no driver\n"
    assert is_ours(tmp_path / "model.pt")


def test_a_child_where_the_package_is_not_installed_goes_on(tmp_path: Path) -> None:
    """Check that the line appears when the program imports torch: most programs never do."""
    script(tmp_path, "print('a program')", "plain.py")
    script(tmp_path, "import torch; print('a trainer')", "train.py")
    script(tmp_path, "", "site/torch.py")
    # -S hides site-packages, and with them our package. It also prevents sitecustomize, so the
    # program imports that by hand. -I would hide our folder as well.
    start = "import sitecustomize, runpy, sys; runpy.run_path(sys.argv[1])"
    env = below_run(variables(PYTHONPATH=str(tmp_path / "site")))
    done = run([sys.executable, "-S", "-c", start, "plain.py"], tmp_path, env)
    assert (done.stdout, done.stderr) == ("a program\n", "")
    done = run([sys.executable, "-S", "-c", start, "train.py"], tmp_path, env)
    assert (done.returncode, done.stdout) == (0, "a trainer\n")
    assert "ModuleNotFoundError: No module named 'ioshape'" in done.stderr
    assert done.stderr.count("\n") == 1


# ---- Mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--lr", "train.py"], '(see "ioshape run --help")'),
        ([], '(see "ioshape run --help")'),
        (["-m"], '(see "ioshape run --help")'),
    ],
)
def test_mistakes_are_explained(arguments: list[str], remedy: str, tmp_path: Path) -> None:
    script(tmp_path, "", "train.py")
    done = run([*AS_COMMAND, *arguments], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ioshape: ")
    assert done.stderr.endswith(f"{remedy}\n")
    assert done.stderr.count("\n") == 1


def test_python_explains_that_there_is_no_script(tmp_path: Path) -> None:
    done = run([*AS_COMMAND, "nothing.py"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "can't open file" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_script_may_have_a_dash_in_front(tmp_path: Path) -> None:
    script(tmp_path, "print('ran')", "-odd.py")
    assert succeed(run([*AS_COMMAND, "--", "-odd.py"], tmp_path)) == "ran\n"
