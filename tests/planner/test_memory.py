"""How much main memory a process may take: the machine's, or its container's."""

import subprocess
import sys
from os import getpid
from pathlib import Path

import pytest
from pipemesh.parallel_runtime import memory
from pipemesh.parallel_runtime.memory import control_groups, system_memory

MIB = 1 << 20
ROOT = Path(memory.__file__).parent.parent
FILES = {  # as the kernel's documents name them; of the first version, with what is in the groups inside
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    "cgroup2": ("memory.max", "memory.current", ""),
}
NO_LIMIT = {"cgroup": str((1 << 63) - 4096), "cgroup2": "max"}
SUPER_OPTIONS = {"cgroup": "rw,memory", "cgroup2": "rw,nsdelegate"}
FOREIGN = (
    "30 1 8:1 / / rw - ext4 /dev/root rw",
    "31 30 0:28 / /sys/cpu rw - cgroup cgroup rw,cpu",
    r"33 30 0:30 / /Docker/host rw - 9p drvfs rw,aname=drvfs;path=C:\Program Files\Docker\resources;mmap",
    "34 - cgroup2 cgroup rw,nsdelegate",
    "of another form",
)


def group(folder, kind, limit=None, used=0, inactive=0, active=0):
    """Makes a control group with these MiB: its limit, what it uses, pages of files of that."""
    limit_name, used_name, names = FILES[kind]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_name).write_text(f"{NO_LIMIT[kind] if limit is None else limit * MIB}\n")
    (folder / used_name).write_text(f"{used * MIB}\n")
    own = f"inactive_file {7 * MIB}\nactive_file {7 * MIB}\n" if names else ""  # without groups inside
    pages = f"anon 1\n{own}{names}inactive_file {inactive * MIB}\n{names}active_file {active * MIB}\n"
    (folder / "memory.stat").write_text(pages)


def system(proc, available, total, own="", mounts=()):
    """Makes a /proc of a machine with these MiB; ``mounts``: (root, folder, kind) of each."""
    (proc / "self").mkdir(parents=True)
    kib = {"MemTotal": total << 10, "MemFree": 1, "MemAvailable": available << 10, "Buffers": 1}
    (proc / "meminfo").write_text("".join(f"{name}: {count} kB\n" for name, count in kib.items()))
    (proc / "self/cgroup").write_text(own)
    lines = [*FOREIGN]
    for root, folder, kind in mounts:
        at = str(folder).replace(" ", "\\040")
        lines.append(f"32 30 0:29 {root} {at} rw shared:9 - {kind} cgroup {SUPER_OPTIONS[kind]}")
    (proc / "self/mountinfo").write_text("\n".join(lines) + "\n")
    return proc


OWN = {"cgroup": "of another form\n4:cpu:/\n3:cpuset,memory:{}\n0::/\n", "cgroup2": "0::{}\n"}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("place", ["own", "outer", "beside"])
def test_the_tightest_group_around_a_process_counts(tmp_path, kind, place):
    top = tmp_path / "of groups"
    outer, own = top / "slice", top / "slice/unit"
    for folder, limit, is_tight in (
        (top, 0, False),
        (outer, 4000, place == "outer"),
        (own, 6000, place == "own"),
    ):
        tight = {"limit": limit, "used": limit - 500, "inactive": 200, "active": 300}
        group(folder, kind, **tight if is_tight else {})
    group(outer / "other", kind, limit=10, used=10)
    proc = system(tmp_path / "proc", 32_000, 64_000, OWN[kind].format("/slice/unit"), [("/", top, kind)])
    expected = {"own": (1000, 6000), "outer": (1000, 4000), "beside": (32_000, 64_000)}[place]
    assert system_memory(proc) == tuple(mib * MIB for mib in expected)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    ("path", "root"),
    [("/", "/"), ("/box/1", "/box/1"), ("/box/1", "/other"), ("/../2", "/"), ("/x", "/../..")],
)
def test_what_is_mounted_in_a_container_is_its_own_group(tmp_path, kind, path, root):
    group(tmp_path / "groups", kind, limit=500, used=700, inactive=100)
    mounts = [(root, tmp_path / "groups", kind)]
    proc = system(tmp_path / "proc", 32_000, 64_000, OWN[kind].format(path), mounts)
    assert system_memory(proc) == (0, 500 * MIB), "never less than nothing"


def test_a_machine_with_less_than_the_groups_limit_counts_itself(tmp_path):
    group(tmp_path / "groups", "cgroup2", limit=64_000, used=10)
    mounts = [("/", tmp_path / "groups", "cgroup2"), ("/", tmp_path / "not there", "cgroup2")]
    proc = system(tmp_path / "proc", 100, 200, "0::/\n", mounts)
    assert system_memory(proc) == (100 * MIB, 200 * MIB)
    group(tmp_path / "groups", "cgroup2", limit=50)
    for name, said in (("memory.stat", "anon 1\n"), ("memory.current", "")):
        (tmp_path / "groups" / name).write_text(said)
        assert system_memory(proc) == (100 * MIB, 200 * MIB), f"{name} of another form is no limit"
    (proc / "self/cgroup").unlink()
    assert system_memory(proc) == (100 * MIB, 200 * MIB), "a kernel without control groups"


@pytest.fixture
def real_group():
    """A control group of this system with a limit of 64 MiB."""
    tops = [one for one in control_groups(Path("/proc")) if (one[0] / "cgroup.procs").exists()]
    folder, kind = next(iter(tops), (Path("/none"), "cgroup2"))
    made = folder / f"pipemesh-test-{getpid()}"
    try:
        made.mkdir()
        (made / FILES[kind][0]).write_text(str(64 * MIB))
    except OSError as error:
        if made.exists():
            made.rmdir()
        pytest.skip(f"no control group with a limit can be made here: {error}")
    yield made
    made.rmdir()


def test_a_real_groups_limit_counts(real_group):
    code = f"""if True:
        import runpy
        open({str(real_group / "cgroup.procs")!r}, "w").write("0")
        system_memory = runpy.run_path({memory.__file__!r})["system_memory"]
        before, total = system_memory()
        taken = b"x" * (32 << 20)
        print(total, before, before - system_memory()[0])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total, available, taken = map(int, done.stdout.split())
    assert total == 64 * MIB and 32 * MIB < available <= total and 31 * MIB < taken < 40 * MIB


def test_main_memory_is_asked_in_one_place():
    """ComfyUI's and psutil's answers are the machine's."""
    asks = ("virtual_memory", "/proc/meminfo", "get_total_memory", "SC_PHYS_PAGES")
    folders = (ROOT / folder for folder in ("nodes", "launcher", "pool", "parallel_runtime", "lab"))
    files = [file for folder in folders for file in folder.rglob("*.py")]
    found = [file.relative_to(ROOT).as_posix() for file in files if any(map(file.read_text().count, asks))]
    assert found == ["nodes/status/collection.py"], "of a GPU that is no pool's"
