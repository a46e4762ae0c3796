# SPDX-License-Identifier: Apache-2.0
"""Packages: built, installed in Debian roots that have nothing else, and used.

Each root is made by mmdebstrap from Debian's archive, and goes again. Takes root.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .setting import Figure, Setting

ROOT = Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "bindings" / "packaging"
WHEELS = ROOT / ".venv" / "wheels"
SUITE = "bookworm"
FOREIGN = "arm64"
BUILD_TOOLS = ("gcc", "pkg-config", "python3-dev", "python3-venv")
LIBRARIES = ("libhiredis-dev", "libisal-dev", "liburing-dev")
OFFLINE = "pip install --quiet --no-index --find-links /wheels --disable-pip-version-check"

# Run in a root. With torch, which is lent; or without, by what needs none.
USE = """
import pickle, sys
import ioshape

state = {"weights": bytes(range(256)) * 4096, "step": 7}
with ioshape.open("state.pickle", "wb", checksums=True) as file:
    pickle.dump(state, file)
with ioshape.open("state.pickle", "rb") as file:
    assert pickle.load(file) == state
ioshape.verify("state.pickle")
if "torch" in sys.argv:
    import torch
    model = {"weights": torch.arange(1 << 20, dtype=torch.float32), "step": 7}
    print(ioshape.save(model, "model.pt"))
    loaded = ioshape.load("model.pt")
    assert torch.equal(loaded["weights"], model["weights"]) and loaded["step"] == 7
    assert torch.equal(torch.load("model.pt", weights_only=True)["weights"], model["weights"])
"""


# apt's own user may lack rights in a container.
QUIETLY = ("--quiet", "--skip=output/mknod", '--aptopt=APT::Sandbox::User "root"')


class PackageError(Exception):
    """A package cannot be built, or does not work."""


def run(*command: str | Path, folder: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        shown = " ".join(map(str, command))
        raise PackageError(f"{shown[:200]} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def needed(program: str, package: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise PackageError(f"{program} is not installed: apt-get install {package}")
    return found


@dataclass
class Root:
    """What is done in a Debian root: hooks of mmdebstrap, in order."""

    include: Sequence[str] = ()
    hooks: list[str] = field(default_factory=list)

    def give(self, source: Path, place: str) -> None:
        """A file, or what is in a folder."""
        if source.is_dir():
            self.hooks += [f'mkdir -p "$1{place}"', f'cp -rL {source}/. "$1{place}"']
        else:
            self.hooks += [f'mkdir -p "$1{place}"', f'cp -L {source} "$1{place}"']

    def lend(self, source: Path, place: str) -> None:
        """To be read, and taken back in the end."""
        self.hooks += [
            f'mkdir -p "$1{place}"',
            f'mount --bind {source} "$1{place}" && mount -o remount,bind,ro "$1{place}"',
        ]

    def do(self, script: str) -> None:
        number = sum("script-" in hook for hook in self.hooks)
        text = f"set -eu; export HOME=/root LC_ALL=C.UTF-8 TMPDIR=/tmp\n{script}\n"
        self.hooks += [
            f"cat >\"$1/tmp/script-{number}\" <<'END_OF_SCRIPT'\n{text}END_OF_SCRIPT\n",
            f'chroot "$1" sh /tmp/script-{number}',
        ]

    def take(self, place: str, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        self.hooks += [f'cp -r "$1{place}/." {target}']

    def take_back(self, place: str) -> None:
        self.hooks += [f'umount "$1{place}"']

    def make(self) -> str:
        mmdebstrap = needed("mmdebstrap", "mmdebstrap")
        include = [f"--include={','.join(self.include)}"] if self.include else []
        hooks = [f"--customize-hook={hook}" for hook in self.hooks]
        options = ["--variant=apt", "--format=null", *QUIETLY]
        return run(mmdebstrap, *options, *include, *hooks, SUITE, "/dev/null")


class Workplace:
    """What is built, and from what."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        self.epoch = run("git", "log", "-1", "--format=%ct").strip()
        self.sources = folder / "sources"
        self.sources.mkdir()
        names = run("git", "ls-files").splitlines()
        for name in names:
            if (ROOT / name).exists():
                target = self.sources / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        self.debs = folder / "debs"
        #: between what was built twice, and of lintian; what was not looked at is not well
        self.differences = [f"{what}: not compared" for what in ("debs", "wheel", "wheel-aarch64")]
        self.findings = ["not looked at"]

    def differ(self, what: str, one: Path, two: Path) -> None:
        """What is not the same bytes in both."""
        self.differences.remove(f"{what}: not compared")
        names = {path.name for path in (*one.iterdir(), *two.iterdir())}
        for name in sorted(names):
            pair = one / name, two / name
            # It tells where and when, and with what.
            if not name.endswith((".buildinfo", ".changes")) and not (
                all(path.is_file() for path in pair)
                and pair[0].read_bytes() == pair[1].read_bytes()
            ):
                self.differences.append(name)


def build_depends() -> list[str]:
    text = (PACKAGING / "debian" / "control").read_text(encoding="utf-8")
    found = re.search(r"^Build-Depends:\n((?: .*\n)+)", text, re.MULTILINE)
    assert found
    names = re.findall(r"^ ([\w.+-]+)", found[1], re.MULTILINE)
    return ["debhelper" if name == "debhelper-compat" else name for name in names]


# ---- Debian -------------------------------------------------------------------------------------


def build_debs(work: Workplace) -> None:
    """Twice: in other folders, with another umask, zone, language and user's name."""
    again = work.folder / "debs-again"
    root = Root(["build-essential", *build_depends()])
    root.give(work.sources, "/one")
    root.do(f"SOURCE_DATE_EPOCH={work.epoch} /one/bindings/packaging/deb.sh /first")
    root.do(
        "mkdir -p /var/some/where/else; cp -r /one /var/some/where/else/two; umask 077\n"
        "export TZ=Pacific/Chatham LC_ALL=C TMPDIR=/var/some/where USER=nobody\n"
        f"SOURCE_DATE_EPOCH={work.epoch} /var/some/where/else/two/bindings/packaging/deb.sh /second"
    )
    root.take("/first", work.debs)
    root.take("/second", again)
    root.make()
    work.differ("debs", work.debs, again)


def lintian(work: Workplace) -> None:
    (changes,) = work.debs.glob("*.changes")
    tool = needed("lintian", "lintian")
    told = subprocess.run(
        [tool, "--allow-root", "--fail-on=none", "--tag-display-limit=0", changes],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    work.findings = [line for line in told.splitlines() if line[:2] in ("E:", "W:")]


def depends_of_tests() -> list[str]:
    text = (PACKAGING / "debian" / "tests" / "control").read_text(encoding="utf-8")
    lines = re.findall(r"^Depends: (.*)$", text, re.MULTILINE)
    return sorted({name for line in lines for name in line.split(", ")})


def try_debs(work: Workplace) -> None:
    """As autopkgtest does: what the tests depend on, the packages, then each test."""
    theirs = [one for one in depends_of_tests() if "ioshape" not in one]
    root = Root(theirs)
    root.give(work.debs, "/debs")
    root.give(PACKAGING / "debian" / "tests", "/tests")
    root.do("apt-get install --yes --no-install-recommends /debs/*.deb")
    for path in sorted((PACKAGING / "debian" / "tests").iterdir()):
        if path.name != "control":
            root.do(
                f"echo == {path.name}; mkdir /work-{path.name}; "
                f"AUTOPKGTEST_TMP=/work-{path.name} /tests/{path.name}"
            )
    root.do("apt-get purge --yes 'libioshape*' 'ioshape*' 'python3-ioshape'; ! command -v ioshape")
    said = root.make()
    (work.folder / "debs.log").write_text(said, encoding="utf-8")


def deb(work: Workplace) -> None:
    build_debs(work)
    lintian(work)
    try_debs(work)


# ---- Python -------------------------------------------------------------------------------------


def archive(work: Workplace) -> Path:
    folder = work.folder / "sdist"
    if not folder.exists():
        run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT)
    (found,) = folder.iterdir()
    return found


def sdist(work: Workplace) -> None:
    """Built in a root that has the libraries, and no index of packages."""
    root = Root([*BUILD_TOOLS, *LIBRARIES])
    root.give(archive(work), "/archive")
    root.give(WHEELS, "/wheels")
    root.do(
        "python3 -m venv /venv\n"
        f"/venv/bin/{OFFLINE} /archive/*.tar.gz\n"
        f"cd /root; /venv/bin/python - <<'END'\n{USE}\nEND\n"
        "/venv/bin/ioshape verify state.pickle"
    )
    root.make()


def path_without_ours() -> str:
    ours = Path(sys.executable).parent
    return ":".join(one for one in os.environ["PATH"].split(":") if Path(one) != ours)


def build_wheel(work: Workplace, target: Path, *options: str | Path) -> Path:
    """Twice, as above."""
    names = []
    for number, (umask, zone) in enumerate((("022", "UTC"), ("077", "Pacific/Chatham"))):
        tree = work.folder / f"wheel-{target.name}-{'x' * (20 * number)}{number}"
        shutil.copytree(work.sources, tree)
        made = work.folder / f"{target.name}-{number}"
        script = f'umask {umask}; exec bindings/wheel.sh "$@"'
        run(
            *("bash", "-c", script, "wheel.sh", *options, made),
            folder=tree,
            PATH=path_without_ours(),
            TZ=zone,
            SOURCE_DATE_EPOCH=work.epoch,
        )
        names.append(made)
        shutil.rmtree(tree)
    work.differ(target.name, *names)
    shutil.copytree(names[0], target)
    (found,) = target.iterdir()
    return found


def wheel(work: Workplace) -> None:
    """With torch lent, and without any of the libraries."""
    made = build_wheel(work, work.folder / "wheel")
    ours = Path(sysconfig.get_path("purelib"))
    root = Root(["python3-venv"])
    root.give(made, "/wheel")
    root.give(WHEELS, "/wheels")
    root.lend(ours, "/lent")
    root.do(
        "python3 -m venv /venv\n"
        f"/venv/bin/{OFFLINE} /wheel/*.whl\n"
        "echo /lent >$(echo /venv/lib/python3*/site-packages)/lent.pth\n"
        f"cd /root; cat >use.py <<'END'\n{USE}\nEND\n"
        "/venv/bin/python use.py torch\n"
        "/venv/bin/ioshape verify model.pt"
    )
    root.take_back("/lent")
    root.make()


# ---- Another machine ----------------------------------------------------------------------------


@contextmanager
def foreign_root(work: Workplace) -> Iterator[Path]:
    """Unpacked, not installed: nothing of it runs but what we run."""
    folder = work.folder / FOREIGN
    include = [*LIBRARIES, "check", "libc6-dev", "libfuse3-dev", "libpython3-dev", "python3-pip"]
    include += ["python3-cffi-backend", "python3-click", "python3-rich"]
    run(
        *(needed("mmdebstrap", "mmdebstrap"), "--variant=extract", *QUIETLY),
        *(f"--architectures={FOREIGN}", f"--include={','.join(include)}"),
        *("--format=directory", SUITE, folder),
    )
    emulator = needed("qemu-aarch64-static", "qemu-user-static")
    shutil.copy2(emulator, folder / "emulator")
    yield folder
    shutil.rmtree(folder)


CROSS = """
[binaries]
c = ['ccache', 'aarch64-linux-gnu-gcc']
cpp = ['ccache', 'aarch64-linux-gnu-g++']
ar = 'aarch64-linux-gnu-ar'
objcopy = 'aarch64-linux-gnu-objcopy'
strip = 'aarch64-linux-gnu-strip'
pkg-config = 'pkg-config'
[built-in options]
c_args = ['--sysroot=ROOT']
cpp_args = ['--sysroot=ROOT']
c_link_args = ['--sysroot=ROOT']
cpp_link_args = ['--sysroot=ROOT']
[properties]
sys_root = 'ROOT'
pkg_config_libdir = 'ROOT/usr/lib/aarch64-linux-gnu/pkgconfig'
[host_machine]
system = 'linux'
cpu_family = 'aarch64'
cpu = 'aarch64'
endian = 'little'
"""


# These fail under the emulator, which seems to forget MADV_WIPEONFORK; nobody has tried them on
# such a machine. They are told by name each time.
NOT_EMULATED = ("fork",)


def units_aarch64(work: Workplace, root: Path) -> None:
    """The unit tests of the C library, compiled for that machine and run by the emulator.

    It knows no io_uring: the library takes its other engines.
    """
    needed("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    cross = work.folder / "cross.txt"
    text = CROSS.replace("ROOT", str(root))
    cross.write_text(text if shutil.which("ccache") else text.replace("'ccache', ", ""))
    build = work.folder / "units"
    run("meson", "setup", build, ROOT, "--cross-file", cross, "-Dtests=true")
    listed = run("ninja", "-C", build, "-t", "targets", "all")
    programs = sorted(set(re.findall(r"^(tests/unit/unit-\w+): ", listed, re.MULTILINE)))
    run("ninja", "-C", build, *programs)
    scratch = work.folder / "scratch"
    scratch.mkdir()
    failed = {}
    for name in programs:
        done = subprocess.run(
            ["qemu-aarch64-static", "-L", root, build / name],
            cwd=scratch,
            env={**os.environ, "CK_TIMEOUT_MULTIPLIER": "20"},
            capture_output=True,
            text=True,
            check=False,
        )
        wrong = re.findall(r"^not ok \d+ - (.*)$", done.stdout, re.MULTILINE)
        left = [one for one in wrong if not any(word in one for word in NOT_EMULATED)]
        if len(left) < len(wrong):
            work.say(f"aarch64: passed over in {name}: {[one for one in wrong if one not in left]}")
        if left or (done.returncode and not wrong):
            failed[name] = left or [done.stderr[-200:]]
    work.say(f"aarch64: {len(programs)} programs of unit tests")
    if failed:
        raise PackageError(f"unit tests fail on aarch64: {failed}")


def emulated(root: Path, *command: str) -> str:
    return run("chroot", root, "/emulator", *command, PYTHONDONTWRITEBYTECODE="1")


def wheel_aarch64(work: Workplace) -> None:
    with foreign_root(work) as root:
        units_aarch64(work, root)
        made = build_wheel(work, work.folder / "wheel-aarch64", "--root", root)
        if "manylinux_2_28_aarch64" not in made.name:
            raise PackageError(f"{made.name} is not for aarch64")
        shutil.copy2(made, root / made.name)
        python = ("/usr/bin/python3.11",)
        install = ("install", "--no-deps", "--no-index", "--break-system-packages")
        emulated(root, *python, "-m", "pip", *install, f"/{made.name}")
        (root / "use.py").write_text(f"import os; os.chdir('/tmp')\n{USE}", encoding="utf-8")
        emulated(root, *python, "/use.py")
        said = emulated(root, *python, "-m", "ioshape", "verify", "/tmp/state.pickle")
        work.say(f"aarch64: {said.strip()}")


PACKAGES: dict[str, Callable[[Workplace], None]] = {
    "deb": deb,
    "sdist": sdist,
    f"wheel {platform.machine()}": wheel,
    "wheel aarch64": wheel_aarch64,
}


# ---- What describes the packages ----------------------------------------------------------------


def container_file(work: Workplace) -> None:
    """Built on a Debian of our own making: there is no registry here."""
    buildah = needed("buildah", "buildah")
    base = work.folder / "base.tar"
    run(
        *(needed("mmdebstrap", "mmdebstrap"), "--variant=apt", *QUIETLY),
        *("--include=ca-certificates", "trixie", base),
    )
    store: list[str | Path] = [
        *("--storage-driver", "vfs", "--root", work.folder / "images"),
        *("--runroot", work.folder / "containers"),
    ]
    made = run(buildah, *store, "from", "scratch").strip()
    run(buildah, *store, "add", made, base)
    run(buildah, *store, "commit", made, "localhost/base")
    run(
        *(buildah, *store, "build", "--isolation", "chroot", "--network", "host"),
        *("--build-arg", "BASE=localhost/base", "--tag", "localhost/ioshape"),
        *("-f", PACKAGING / "Containerfile", work.sources),
    )
    made = run(buildah, *store, "from", "localhost/ioshape").strip()
    command: list[str | Path] = [
        buildah,
        *store,
        "run",
        "--isolation",
        "chroot",
        made,
        "--",
        "/usr/bin/ioshape",
    ]
    work.say(f"container: {run(*command, '--version').strip()}")
    run(*command, "settings")
    run(buildah, *store, "rm", "--all")
    run(buildah, *store, "rmi", "--all", "--force")


def checks(work: Workplace) -> Path:
    """The Python that has what recipes and manifests are checked with."""
    folder = ROOT / "build" / "launch-checks"
    wanted = (PACKAGING / "checks.txt").read_text(encoding="utf-8")
    stamp = folder / "complete"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        work.say("installing what recipes are checked with")
        run(sys.executable, "-m", "venv", "--clear", folder)
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(folder / "bin" / "python", *install, "-r", PACKAGING / "checks.txt")
        stamp.write_text(wanted, encoding="utf-8")
    return folder / "bin" / "python"


BOM = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
error = JsonStrictValidator(SchemaVersion.V1_5).validate_str(sys.stdin.read())
sys.exit(f"{error!r}" if error else 0)
"""


def bill_of_materials(work: Workplace) -> None:
    made = next(work.folder.glob("wheel/*.whl"), None)
    if made is None:
        raise PackageError("there is no wheel")
    for options in ([], [made]):
        bill = run(sys.executable, PACKAGING / "sbom.py", *options)
        done = subprocess.run(
            [checks(work), "-c", BOM], input=bill, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise PackageError(f"CycloneDX does not take the bill of materials: {done.stderr}")
    if bill.count('"alg": "SHA-256"') != 3:
        raise PackageError("the wheel's bill of materials does not have its three libraries")


def kubernetes(work: Workplace) -> None:
    tool = checks(work).parent / "kubernetes-validate"
    examples = ROOT / "examples"
    names = ("deploy/kubernetes.yaml", "kubernetes_group.yaml", "kubernetes_tier.yaml")
    files = [examples / name for name in names]
    for version in ("1.30.0", "1.33.0"):
        run(tool, "--strict", "--kubernetes-version", version, *files)


EASYBUILD = """
import sys
from easybuild.tools.options import set_up_configuration
set_up_configuration(args=["--allow-use-as-root-and-accept-consequences"], silent=True)
from easybuild.framework.easyconfig.parser import EasyConfigParser
from easybuild.framework.easyconfig.style import check_easyconfigs_style
if check_easyconfigs_style([sys.argv[1]]):
    sys.exit("its style is wrong")
assert EasyConfigParser(sys.argv[1]).get_config_dict()["checksums"]
"""

CONDA = """
import sys
from rattler_build import Stage0Recipe, VariantConfig
known = VariantConfig({
    "c_compiler": ["gcc"], "c_compiler_version": ["13"],
    "c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"], "python": ["3.12.* *_cpython"],
})
made = Stage0Recipe.from_file(sys.argv[1]).render(known)
assert [one.recipe.package.name for one in made] == ["libioshape", "ioshape"], made
"""


def recipes(work: Workplace) -> None:
    """With what PyPI has of their tools. Of Spack it has none: its recipe is Python, at least."""
    made, filled = archive(work), work.folder / "recipes"
    url = f"https://example.org/{made.name}"
    run(PACKAGING / "recipes.sh", made, url, "https://example.org", filled)
    (file,) = (filled / "easybuild").iterdir()
    run(checks(work), "-c", EASYBUILD, file)
    run(checks(work), "-c", CONDA, filled / "conda" / "recipe.yaml")
    run(checks(work), "-m", "py_compile", filled / "spack" / "packages" / "ioshape" / "package.py")


def meson_dist(work: Workplace) -> None:
    """From a repository of its own, as a release has it."""
    tree = work.folder / "dist-tree"
    shutil.copytree(work.sources, tree)
    git = ("git", "-c", "user.name=bench", "-c", "user.email=bench@localhost")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all", "--no-gpg-sign"]):
        run(*git, *words, folder=tree)
    run("meson", "setup", "build/dist", folder=tree)
    run("meson", "dist", "-C", "build/dist", "--no-tests", folder=tree)
    (made,) = (tree / "build" / "dist" / "meson-dist").glob("*.tar.xz")
    with tarfile.open(made) as opened:
        if not any(name.endswith("/bindings/packaging/deb.sh") for name in opened.getnames()):
            raise PackageError(f"{made} lacks the packaging")


def binary_interface(work: Workplace) -> None:
    """Against the last tag; as long as there is none, against what 0.2 began from."""
    tags = run("git", "tag").split()
    first = run("git", "log", "-S## [0.2.0]", "--format=%h", "--reverse", "--", "CHANGELOG.md")
    base = [] if tags else [f"{first.split()[0]}^"]
    work.say(run(PACKAGING / "abi.sh", *base).splitlines()[-1])


DESCRIPTIONS: dict[str, Callable[[Workplace], None]] = {
    "bill of materials": bill_of_materials,
    "Kubernetes": kubernetes,
    "recipes": recipes,
    "meson dist": meson_dist,
    "binary interface": binary_interface,
}


def figures(setting: Setting) -> list[Figure]:
    folder = ROOT / "build" / "launch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    work = Workplace(folder, setting.say)
    failed: dict[str, str] = {}

    def tried(what: dict[str, Callable[[Workplace], None]]) -> int:
        for name, step in what.items():
            try:
                step(work)
                setting.say(f"{name}: works")
            except PackageError as error:
                setting.say(f"{name}: {error}")
                failed[name] = str(error)
        return sum(name not in failed for name in what)

    packages = {**PACKAGES, "container file": container_file}
    good = tried(packages)
    described = tried(DESCRIPTIONS)
    remark = f"failed: {', '.join(failed)}" if failed else "each built, installed and used"
    return [
        Figure("packages_ok", good, ">=", len(packages), remark),
        Figure("descriptions_ok", described, ">=", len(DESCRIPTIONS), remark),
        Figure("lintian_findings", len(work.findings), "<=", 0, "; ".join(work.findings)[:200]),
        Figure(
            "reproducible_differences",
            len(work.differences),
            "<=",
            0,
            ", ".join(work.differences) or "debs and wheels built twice",
        ),
    ]
