# SPDX-License-Identifier: Apache-2.0
"""Build and run the examples with only the files that `meson install` put into a prefix.

The command quickstart.sh is tested, too.
"""

import os
import re
import shutil
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from processes import TIMEOUT_S
from tree import HEADERS, LIBRARY, ROOT, build_folder, program, sources

# The MPI example is started by mpirun.
MPI_EXAMPLE = ROOT / "examples" / "group_trainer.c"
EXAMPLES = [example for example in sources("examples") if example != MPI_EXAMPLE]
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)


def run(*command: str | Path, **environment: str | Path) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(
        command,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a release build without the parts that only tests need, and return the prefix."""
    folder = tmp_path_factory.mktemp("install")
    build = folder / "build"
    meson = program("meson")
    installed = folder / "prefix"
    run(
        meson,
        *("setup", build, ROOT, "--prefix", installed),
        *("--libdir", "lib", "--buildtype", "release", "-Dwerror=true", "-Dmpi=enabled"),
    )
    run(meson, "compile", "-C", build)
    run(meson, "install", "-C", build, "--quiet")
    # Installed files must not refer to the build folder.
    shutil.rmtree(build)
    return installed


def compiler_for(example: Path) -> list[str]:
    return ["c++", "-std=c++17"] if example.suffix == ".cpp" else ["cc", "-std=gnu11"]


def pkg_config(prefix: Path, *options: str, package: str = "ioshape") -> list[str]:
    folder = prefix / "lib" / "pkgconfig"
    return run(program("pkg-config"), *options, package, PKG_CONFIG_PATH=folder).split()


def run_example(executable: Path, folder: Path, **environment: str | Path) -> None:
    folder.mkdir()
    run(executable, folder, **environment)


def test_there_are_examples_in_c_and_cpp() -> None:
    assert {example.suffix for example in EXAMPLES} >= {".c", ".cpp"}


def test_what_is_installed(prefix: Path) -> None:
    installed = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if not path.is_dir()}
    version = pkg_config(prefix, "--modversion")[0]
    pages = {name for name in installed if name.startswith("share/")}
    maps = (LIBRARY / "ioshape.map", LIBRARY / "tier" / "tier.map")
    functions = re.findall(
        r"(ioshape_\w+);", "".join(path.read_text(encoding="utf-8") for path in maps)
    )
    assert pages >= {f"share/man/man3/{function}.3" for function in functions}
    assert pages >= {"share/man/man3/ioshape_comm_of_mpi.3", "share/man/man7/ioshape.7"}
    assert installed - pages == {
        *(f"include/ioshape/{header.name}" for header in HEADERS.iterdir()),
        "lib/libioshape.a",
        "lib/libioshape-tier.a",
        "lib/libioshape.so",
        "lib/libioshape.so.1",
        f"lib/libioshape.so.{version}",
        *(f"lib/libioshape-mpi.so{end}" for end in ("", ".1", f".{version}")),
        *(f"lib/libioshape-tier.so{end}" for end in ("", ".1", f".{version}")),
        "lib/ioshape/ioshape-holder",
        "lib/ioshape/libioshape-preload.so",
        "lib/pkgconfig/ioshape.pc",
        "lib/pkgconfig/ioshape-tier.pc",
        "lib/pkgconfig/ioshape-mpi.pc",
        "lib/cmake/ioshape/ioshape-config.cmake",
        "lib/cmake/ioshape/ioshape-config-version.cmake",
    }


@pytest.mark.parametrize("option", ["bindings", "mpi"])
def test_pages_are_of_what_is_installed(option: str, tmp_path: Path) -> None:
    """Check that the command's page needs the Python package, and MPI's pages need its library."""
    pages = {"bindings": "share/man/man1/ioshape.1", "mpi": "share/man/man3/ioshape_comm_of_mpi.3"}
    chosen = {"bindings": "-Dbindings=true", "mpi": "-Dmpi=enabled"}
    meson, prefix = program("meson"), tmp_path / "prefix"
    run(meson, "setup", tmp_path / "build", ROOT, "--prefix", prefix, chosen[option])
    run(program("ninja"), "-C", tmp_path / "build", "include/reference.md")
    run(meson, "install", "-C", tmp_path / "build", "--no-rebuild", "--tags", "man")
    assert {name for name, page in pages.items() if (prefix / page).exists()} == {option}


@pytest.mark.parametrize("name", ["trainer", "group_trainer_cpp"])
def test_a_trainer_says_that_its_steps_are_those_of_a_run(name: str, tmp_path: Path) -> None:
    trainer = build_folder() / "examples" / name
    done = subprocess.run([trainer], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "in this run (default: 30), beyond those of the checkpoint" in done.stderr
    for steps, last in (("20", 20), ("10", 30)):
        assert f"step {last}" in run(trainer, tmp_path, steps)


@each_example
def test_pkg_config_shared(prefix: Path, example: Path, tmp_path: Path) -> None:
    executable = tmp_path / "example"
    flags = pkg_config(prefix, "--cflags", "--libs")
    run(*compiler_for(example), "-o", executable, example, *flags)
    environment = {"LD_LIBRARY_PATH": prefix / "lib"}
    assert str(prefix) in run(program("ldd"), executable, **environment)
    run_example(executable, tmp_path / "files", **environment)


@each_example
def test_pkg_config_static(prefix: Path, example: Path, tmp_path: Path) -> None:
    executable = tmp_path / "example"
    flags = pkg_config(prefix, "--static", "--cflags", "--libs")
    # Only libioshape is linked statically: distributions have ISA-L as a shared library alone.
    ours = ["-l:libioshape.a" if flag == "-lioshape" else flag for flag in flags]
    run(*compiler_for(example), "-o", executable, example, *ours)
    assert "libioshape" not in run(program("ldd"), executable)
    run_example(executable, tmp_path / "files")


# ---- The tier library ---------------------------------------------------------------------------

TIER_PROGRAM = """
#include <ioshape/ioshape.h>
#include <ioshape/tier.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    struct ioshape_context *context;
    struct ioshape_tier *tier;
    char *place;

    if (argc != 2 || ioshape_context_open(&context, NULL) ||
        ioshape_tier_open(context, argv[1], NULL, &tier) ||
        ioshape_tier_path(tier, "/somewhere/file", 0, &place))
        return 1;
    puts(place);
    ioshape_free(place);
    ioshape_tier_free(tier);
    ioshape_context_free(context);
    return 0;
}
"""


@pytest.mark.parametrize("static", [False, True], ids=["shared", "static"])
def test_pkg_config_tier(prefix: Path, static: bool, tmp_path: Path) -> None:
    source, executable, folder = tmp_path / "tier.c", tmp_path / "tier", tmp_path / "disk"
    source.write_text(TIER_PROGRAM, encoding="utf-8")
    folder.mkdir()
    flags = pkg_config(
        prefix, *(["--static"] if static else []), "--cflags", "--libs", package="ioshape-tier"
    )
    if static:
        flags = [re.sub(r"^-l(ioshape\S*)$", r"-l:lib\1.a", flag) for flag in flags]
    run("cc", "-std=gnu11", "-o", executable, source, *flags)
    linked = run(program("ldd"), executable, LD_LIBRARY_PATH=prefix / "lib")
    assert ("libioshape-tier.so" in linked) == ("libioshape.so" in linked) == (not static)
    said = run(executable, folder, LD_LIBRARY_PATH=prefix / "lib")
    assert said == f"{folder}/ioshape-{os.geteuid()}/files/somewhere/file\n"


def test_the_second_library_can_be_left_out(tmp_path: Path) -> None:
    meson, prefix = program("meson"), tmp_path / "prefix"
    run(meson, "setup", tmp_path / "build", ROOT, "--prefix", prefix, "-Dtier=false")
    run(meson, "install", "-C", tmp_path / "build", "--quiet")
    # The page of the type that groups take a pointer to is still installed.
    installed = {path.name for path in prefix.rglob("*") if path.suffix != ".3"}
    assert not {name for name in installed if "tier" in name}
    assert {"libioshape.so", "libioshape.a", "ioshape.pc"} <= installed


@pytest.fixture(scope="module")
def cmake_build(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the examples with CMake against a prefix that was moved after its installation."""
    moved = tmp_path_factory.mktemp("cmake") / "moved"
    shutil.copytree(prefix, moved, symlinks=True)
    build = moved.parent / "build"
    run(
        program("cmake"),
        *("-S", ROOT / "tests" / "install", "-B", build, "-G", "Ninja"),
        f"-DCMAKE_PREFIX_PATH={moved}",
        f"-DEXAMPLES={';'.join(str(example) for example in EXAMPLES)}",
    )
    run(program("cmake"), "--build", build)
    return build


@each_example
@pytest.mark.parametrize("target", ["ioshape", "ioshape_static"])
def test_cmake(cmake_build: Path, example: Path, target: str, tmp_path: Path) -> None:
    executable = cmake_build / f"{example.name}-{target}"
    assert ("libioshape.so" in run(program("ldd"), executable)) == (target == "ioshape")
    run_example(executable, tmp_path / "files")


# ---- Ranks that save together -------------------------------------------------------------------


def weights_of(checkpoint: Path, ranks: int) -> torch.Tensor:
    """Return the rows of all ranks, read from the zip by stock torch."""
    (bundle,) = checkpoint.glob("*.zip")
    rows = []
    with zipfile.ZipFile(bundle) as archive:
        for rank in range(ranks):
            with archive.open(f"rank-{rank:05d}.pt") as member:
                rows.append(torch.load(member, weights_only=True)["weights"])
    return torch.cat(rows)


def has_learned(weights: torch.Tensor) -> bool:
    """Return whether weights match the target of the two trainers with several ranks."""
    row, column = torch.arange(weights.shape[0])[:, None], torch.arange(weights.shape[1])
    return torch.allclose(weights, (7 * row + 3 * column) % 11 / 11, atol=0.01)


def steps_in(folder: Path) -> list[int]:
    """Return the steps in a folder that must hold checkpoints only."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def complete_steps(folder: Path) -> list[int]:
    """Return the steps in a folder that may hold other files, too."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@pytest.fixture(scope="module")
def group_trainer(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the C++ trainer of four processes."""
    executable = tmp_path_factory.mktemp("group") / "trainer"
    rpath = f"-Wl,-rpath,{prefix / 'lib'}"
    source = ROOT / "examples" / "group_trainer.cpp"
    flags = pkg_config(prefix, "--cflags", "--libs")
    run(*compiler_for(source), "-o", executable, source, *flags, rpath)
    return executable


def children_of(process: "subprocess.Popen[str]") -> list[int]:
    """Return the children's pids in the order of their ranks."""
    return [
        int(child)
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


@pytest.mark.parametrize("rank", [0, 2, None])
def test_a_group_that_is_killed_goes_on(
    group_trainer: Path, rank: int | None, tmp_path: Path
) -> None:
    """Kill one rank, or all at once, and resume."""
    ranks = 4
    training = subprocess.Popen(
        [group_trainer, tmp_path, "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert training.stdout is not None
        while not training.stdout.readline().startswith("step 20,"):
            assert training.poll() is None, training.communicate()
        if rank is not None:
            os.kill(children_of(training)[rank], signal.SIGKILL)
            # The other ranks learn of it at once, long before their deadline of two minutes.
            _, said = training.communicate(timeout=TIMEOUT_S)
            assert training.returncode == 1
            assert len(said.splitlines()) == ranks - 1, said
            for line in said.splitlines():
                assert f"rank {rank} " in line.partition("was not saved:")[2], said
    finally:
        if training.poll() is None:
            os.killpg(training.pid, signal.SIGKILL)
        training.communicate()
    newest = complete_steps(tmp_path)[-1]
    assert newest >= 10
    said = run(group_trainer, tmp_path)
    assert f"resuming from step {newest}\n" in said
    end = newest + 30
    assert steps_in(tmp_path) == [end - 10, end]
    assert has_learned(weights_of(tmp_path / f"step-{end:010d}", ranks))


@pytest.mark.parametrize(("mode", "file"), [("node", "node-00000.zip"), ("rank0", "ranks.zip")])
def test_an_mpi_program(prefix: Path, mode: str, file: str, tmp_path: Path) -> None:
    executable, folder, ranks = tmp_path / "example", tmp_path / "files", 4
    flags = pkg_config(prefix, "--cflags", "--libs", package="ioshape-mpi")
    rpath = f"-Wl,-rpath,{prefix / 'lib'}"
    run(program("mpicc"), "-std=gnu11", "-o", executable, MPI_EXAMPLE, *flags, rpath)
    begin = (program("mpirun"), "--oversubscribe", "--allow-run-as-root", "-n", str(ranks))
    for begins_with in ("starting from step 0\n", "resuming from step 30\n"):
        said = run(*begin, executable, folder, "30", IOSHAPE_MODE=mode)
        assert begins_with in said
        assert f" bytes, {mode}: as requested" in said
    assert steps_in(folder) == [50, 60]
    newest = folder / "step-0000000060"
    assert sorted(path.name for path in newest.iterdir()) == ["manifest.json", file]
    assert has_learned(weights_of(newest, ranks))


# ---- Versions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "found"), [("0.2", True), ("0.3", False), ("1.0", False)])
def test_cmake_versions(prefix: Path, wanted: str, found: bool, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\n"
        "project(stranger C)\n"
        f"find_package(ioshape {wanted} QUIET)\n"
        f'if(NOT ioshape_FOUND STREQUAL "{int(found)}")\n'
        '  message(FATAL_ERROR "found: ${ioshape_FOUND}")\n'
        "endif()\n"
    )
    run(
        program("cmake"),
        *("-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja"),
        f"-DCMAKE_PREFIX_PATH={prefix}",
    )


def test_quickstart(tmp_path: Path) -> None:
    """Check that the script reports success and cleans up. Other tests check what it shows."""
    said = run(ROOT / "examples" / "quickstart.sh", TMPDIR=tmp_path)
    assert "torchrun saw: Signal 9 (SIGKILL)" in said
    assert said.count("every loss the same to the last bit") == 3
    assert re.search(r"^ours/step-000030-rank-3\.pt: ok", said, re.MULTILINE)
    assert "== Done." in said
    assert "\x1b" not in said  # no color codes
    assert not list(tmp_path.glob("ioshape-*"))


def test_quickstart_refuses_what_it_does_not_know() -> None:
    done = subprocess.run(
        [ROOT / "examples" / "quickstart.sh", "--keeep"], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"Usage: examples/quickstart.sh" in done.stderr
