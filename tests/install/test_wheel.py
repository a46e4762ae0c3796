# SPDX-License-Identifier: Apache-2.0
"""Test the Python package as users get it: a source archive, and a wheel for other machines.

All is built from a copy of the tree in separate environments without a network. .venv/wheels has
the packages that pip needs.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from abi3info import DATAS, FUNCTIONS  # type: ignore[import-untyped]
from abi3info.models import PyVersion, Symbol  # type: ignore[import-untyped]
from tree import ROOT, program

WHEELS = ROOT / ".venv" / "wheels"
OLDEST_PYTHON = (3, 10)
# Libraries that the extension is linked with and that a wheel must include.
CARRIED = ("libhiredis", "libisal", "liburing")

NOT_SOURCES = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)


def environment() -> dict[str, str]:
    """Return this process's variables without those that redirect Python or the loader."""
    foreign = ("PYTHON", "IOSHAPE_", "LD_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def without_network() -> dict[str, str]:
    """Return these variables with settings that limit pip to the folder of wheels."""
    kept = {name: value for name, value in environment().items() if not name.startswith("PIP_")}
    return {
        **kept,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_FIND_LINKS": str(WHEELS),
        "PIP_NO_INDEX": "1",
    }


def run(*command: str | Path, folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables or without_network(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}"
    return done.stdout


def version() -> str:
    found = re.search(r"^\s*version: '([\d.]+)'", (ROOT / "meson.build").read_text(), re.MULTILINE)
    assert found
    return found[1]


# ---- Build results ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy this tree into a new git repository: the archive has the files that git tracks."""
    copy = tmp_path_factory.mktemp("sources") / "tree"
    shutil.copytree(ROOT, copy, ignore=NOT_SOURCES, symlinks=True)
    git = [program("git"), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    run(*git, "init", "--quiet", folder=copy)
    run(*git, "add", "--all", folder=copy)
    run(*git, "commit", "--quiet", "--message", "all", "--no-gpg-sign", folder=copy)
    return copy


@pytest.fixture(scope="module")
def archive(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, tree, folder=folder)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def unpacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    run(program("tar"), "-xf", archive, folder=folder)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the archive, to test that the archive is complete.

    The script must not find this environment's Python, which has packages that the script may have
    failed to request.
    """
    folder = tmp_path_factory.mktemp("wheel")
    ours = Path(sys.executable).parent
    paths = [path for path in os.environ["PATH"].split(":") if Path(path) != ours]
    variables = {**without_network(), "PATH": ":".join(paths)}
    said = run(unpacked / "bindings" / "wheel.sh", folder, folder=unpacked, variables=variables)
    (found,) = folder.iterdir()
    assert said == f"{found}\n"
    return found


@pytest.fixture(scope="module")
def contents(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contents")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    return folder


def new_environment(folder: Path, *packages: str | Path) -> Path:
    """Return the Python of a new virtual environment with these packages."""
    run(sys.executable, "-m", "venv", folder, folder=folder.parent)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", *packages, folder=folder)
    return python


@pytest.fixture(scope="module")
def stranger(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a user who installed the wheel and its dependencies only."""
    return new_environment(tmp_path_factory.mktemp("stranger") / "venv", wheel)


def lend_torch(python: Path) -> None:
    """Let an environment also use this environment's packages, mainly torch, after its own."""
    (site_packages,) = python.parent.parent.glob("lib/python*/site-packages")
    lent = Path(sysconfig.get_path("purelib"))
    (site_packages / "lent.pth").write_text(f"{lent}\n")


# ---- The archive of sources --------------------------------------------------------------------


def test_the_archive_holds_all(tree: Path, archive: Path) -> None:
    known = set(run(program("git"), "ls-files", folder=tree).splitlines())
    assert {"pyproject.toml", "bindings/callbacks.h", "bindings/ioshape/py.typed"} <= known
    root = f"ioshape-{version()}"
    assert archive.name == f"{root}.tar.gz"
    with tarfile.open(archive) as opened:
        members = {member.name for member in opened if not member.isdir()}
    assert members == {f"{root}/{name}" for name in {*known, "PKG-INFO"}}


@pytest.mark.long  # the wheel of other tests is also built from it
def test_pip_installs_the_archive(archive: Path, tmp_path: Path) -> None:
    """Build from source in pip's isolated environment, as "pip install ." does."""
    python = new_environment(tmp_path / "venv", archive)
    said = run(python, "-c", "import ioshape; print(ioshape.__version__)", folder=tmp_path)
    assert said.strip() == version()


# ---- The wheel ---------------------------------------------------------------------------------


def test_the_name_of_the_wheel(wheel: Path) -> None:
    tag = f"cp310-abi3-manylinux_2_28_{platform.machine()}"  # like torch's
    assert re.fullmatch(rf"ioshape-{re.escape(version())}-{tag}\.whl", wheel.name)


def test_what_is_in_the_wheel(contents: Path) -> None:
    found = {str(path.relative_to(contents)) for path in contents.rglob("*") if path.is_file()}
    package = ROOT / "bindings" / "ioshape"
    python = {
        f"ioshape/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"ioshape/__init__.py", "ioshape/_native.pyi", "ioshape/py.typed"} <= python
    about = {name for name in found if name.startswith(f"ioshape-{version()}.dist-info/")}
    carried = {name for name in found if name.startswith("ioshape.libs/")}
    assert found == {"ioshape/_native.abi3.so"} | python | about | carried
    assert sorted(re.sub(r"-[0-9a-f]+\.so.*", "", name) for name in carried) == [
        f"ioshape.libs/{library}" for library in CARRIED
    ]
    # There is a license for the package and for each included library.
    licenses = {name.rpartition("/")[2] for name in about if "/licenses/" in name}
    assert licenses == {"LICENSE", "ISA-L.txt", "hiredis.txt", "liburing.txt"}


@pytest.fixture(scope="module")
def metadata(contents: Path) -> Message:
    (found,) = contents.glob("*.dist-info/METADATA")
    return message_from_string(found.read_text(encoding="utf-8"))


def test_the_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "ioshape"
    assert metadata["Version"] == version()
    assert metadata["Requires-Python"] == ">=3.10"
    required = [re.split(r"[<>=;]", text)[0] for text in metadata.get_all("Requires-Dist", [])]
    assert sorted(required) == [
        "boto3",
        "cffi",
        "click",
        "deepspeed",
        "lightning",
        "megatron-core",
        "prometheus-client",
        "redis",
        "redis",
        "rich",
        "safetensors",
        "torch",
        "torch_checkpointing",
        "transformers",
    ]
    assert sorted(metadata.get_all("Provides-Extra", [])) == [
        "deepspeed",
        "exporter",
        "lightning",
        "megatron",
        "redis",
        "s3",
        "safetensors",
        "torch",
        "torch-checkpointing",
        "transformers",
    ]  # no other packages are hard dependencies


def undefined_symbols(extension: Path) -> list[str]:
    listed = run(program("nm"), "-D", "--undefined-only", extension, folder=extension.parent)
    # Lines are "U name@VERSION (n)". Weak symbols may stay undefined.
    found = [line.split()[1].partition("@")[0] for line in listed.splitlines() if " U " in line]
    assert found
    return found


def test_python_symbols_are_those_of_the_stable_abi(contents: Path) -> None:
    """Check that every Python from the oldest on can import the extension."""
    symbols = undefined_symbols(contents / "ioshape" / "_native.abi3.so")
    python = {name for name in symbols if name.startswith(("Py", "_Py"))}
    assert "PyImport_ImportModule" in python
    oldest = PyVersion(*OLDEST_PYTHON)
    for name in python:
        entry = FUNCTIONS.get(Symbol(name)) or DATAS.get(Symbol(name))
        assert entry is not None, f"{name} is not in the stable ABI"
        assert entry.added <= oldest, f"{name} came with Python {entry.added}"


def test_the_extension_has_the_library_inside(contents: Path) -> None:
    """Check for missing functions, which would be noticed only when they are called."""
    symbols = undefined_symbols(contents / "ioshape" / "_native.abi3.so")
    assert not [name for name in symbols if name.startswith("ioshape")]
    defined = run(program("nm"), "-D", "--defined-only", "ioshape/_native.abi3.so", folder=contents)
    assert [line.split()[-1] for line in defined.splitlines()] == ["PyInit__native"]


def test_the_wheel_is_typed(stranger: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        "import ioshape\n"
        'report: ioshape.Report = ioshape.save({}, "model.pt")\n'
        'handle: ioshape.SaveHandle = ioshape.save_async({}, "model.pt", replace=False)\n'
        "seconds: float = handle.result().write_s\n"
    )
    (tmp_path / "mistaken.py").write_text(
        'import ioshape\nreport: int = ioshape.save({}, "model.pt", replace="no")\n'
    )
    options = ["--strict", f"--python-executable={stranger}"]
    mypy = [sys.executable, "-m", "mypy", *options]
    run(*mypy, "user.py", folder=tmp_path)
    done = subprocess.run(
        [*mypy, "mistaken.py"],
        cwd=tmp_path,
        env=without_network(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.count(b" error: ") == 2, done.stdout


# ---- On a machine without the libraries --------------------------------------------------------

SAVE = """
import ctypes, re, sys

for library in (
    *("libhiredis.so", "libhiredis.so.0.14"),
    *("libisal.so", "libisal.so.2"),
    *("liburing.so", "liburing.so.2"),
):
    try:
        ctypes.CDLL(library)
    except OSError:
        continue
    sys.exit(f"{library} is there: this says nothing about a machine without it")

import ioshape
import torch

assert ioshape.__file__.startswith(sys.prefix), ioshape.__file__
model = {"weights": torch.arange(1 << 20, dtype=torch.float32), "step": 7}
report = ioshape.save(model, "sync.pt")
assert report.written_by == "ioshape" and report.engine in ("uring", "threads"), report
ioshape.save_async(model, "async.pt").wait()
for file in ("sync.pt", "async.pt"):
    loaded = ioshape.load(file)
    assert torch.equal(loaded["weights"], model["weights"]) and loaded["step"] == 7
    ioshape.verify(file)
mapped = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(*(name for name in mapped if re.search("lib(hiredis|isal|uring)", name)), sep="\\n")
"""

STOCK = """
import sys, torch

for file in ("sync.pt", "async.pt"):
    loaded = torch.load(file, weights_only=True, mmap=True)
    assert torch.equal(loaded["weights"], torch.arange(1 << 20, dtype=torch.float32))
assert not any(name.startswith("ioshape") for name in sys.modules)
"""

# Hides libraries for one command by mounting empty files over them.
HIDE = """
while [ "$1" != -- ]; do
	mount --bind /dev/null "$1" || exit
	shift
done
shift
exec "$@"
"""


def system_libraries() -> set[Path]:
    """Return all copies of the libraries that this machine's loader knows."""
    listed = run("/sbin/ldconfig", "-p", folder=Path("/"))
    known = {Path(line.split(" => ")[1]) for line in listed.splitlines() if " => " in line}
    return {path.resolve() for path in known if path.name.startswith(CARRIED)}


def namespace() -> list[str]:
    """Return a command that runs another command in a mount namespace."""
    unshare = program("unshare")
    for options in (["--mount"], ["--map-root-user", "--mount"]):
        command = [unshare, *options]
        tried = subprocess.run(
            [*command, "mount", "--bind", os.devnull, __file__], capture_output=True, check=False
        )
        if tried.returncode == 0:
            return command
    pytest.skip("this kernel or container lets nobody have mounts of his own")


@pytest.fixture(scope="module")
def lent(stranger: Path) -> Path:
    lend_torch(stranger)
    return stranger


def test_the_wheel_works_without_the_systems_libraries(lent: Path, tmp_path: Path) -> None:
    libraries = system_libraries()
    # The libraries are installed here, because the package was built with them.
    assert {library for library in CARRIED for path in libraries if path.name.startswith(library)}
    shell = program("sh")
    hidden = [*namespace(), shell, "-c", HIDE, shell, *map(str, libraries), "--"]
    (tmp_path / "save.py").write_text(SAVE)
    mapped = [Path(name) for name in run(*hidden, lent, "save.py", folder=tmp_path).split()]
    home = lent.parent.parent.resolve()
    assert sorted(path.name.partition("-")[0] for path in mapped) == list(CARRIED)
    assert all(path.resolve().is_relative_to(home) for path in mapped), mapped

    (tmp_path / "stock.py").write_text(STOCK)
    run(sys.executable, "stock.py", folder=tmp_path)


def test_the_command_works_without_torch(stranger: Path, tmp_path: Path) -> None:
    torch_file = "import torch; torch.save(torch.ones(9), 'torch.pt')"
    run(sys.executable, "-c", torch_file, folder=tmp_path)
    command = stranger.parent / "ioshape"
    assert version() in run(command, "--version", folder=tmp_path)
    run(command, "verify", "torch.pt", folder=tmp_path)
    run(command, "inspect", "torch.pt", folder=tmp_path)


# ---- Other Pythons -----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("minor", [n for n in range(10, 16) if n != sys.version_info.minor])
def test_other_pythons(wheel: Path, minor: int, tmp_path: Path) -> None:
    """Import the extension and read a file with each installed Python.

    Their cffi is from the index.
    """
    python = shutil.which(f"python3.{minor}")
    if python is None or subprocess.run([python, "-c", ""], check=False).returncode != 0:
        pytest.skip(f"there is no Python 3.{minor} here")
    run(python, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    theirs = tmp_path / "venv" / "bin" / "python"
    run(theirs, "-m", "pip", "install", wheel, folder=tmp_path, variables=environment())
    torch_file = "import torch; torch.save(torch.ones(9), 'torch.pt')"
    run(sys.executable, "-c", torch_file, folder=tmp_path)
    verify = "import ioshape; ioshape.verify('torch.pt'); print(ioshape.__version__)"
    assert run(theirs, "-c", verify, folder=tmp_path).strip() == version()
