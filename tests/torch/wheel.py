"""Tests the wheel: its requirements, its contents, and the pages' programs with nothing else installed.

    python tests/torch/wheel.py

This Python has torch, transformers, NumPy and cffi. pip installs the wheel into a separate folder, as a user would. An
arm64 wheel is made and tried if aarch64-linux-gnu-gcc and qemu-aarch64 are available.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from judge import check, finish, skip

TOP = pathlib.Path(__file__).resolve().parents[2]
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def run(*command, **options):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)


def check_symbols(name, library, objdump):
    versions = re.findall(r"GLIBC_([0-9.]+)", run(objdump, "-T", library).stdout)
    newest = max((tuple(map(int, v.split("."))) for v in versions), default=None)
    check(f"{name}: symbols of glibc", newest and newest <= (2, 17), f"none above {newest}")


def programs(page):
    """Returns the Python blocks of a page that use the package."""
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", page.read_text(), re.MULTILINE)
    texts = [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks]
    return [text for text in texts if text.lstrip().startswith("import ") and "import chunkflow" in text]


def extra(name):
    """Returns the packages that pip installs with an extra."""
    return set(re.findall(rf'^Requires-Dist: ([\w-]+).*extra == "{name}"',
                          (TOP / "tools" / "python" / "backend.py").read_text(), re.MULTILINE))


def check_installed(folder):
    place = folder / "place"
    made = run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target",
               place, TOP / "tools" / "python")
    check("pip install ./tools/python", made.returncode == 0, made.stderr[-300:])
    check("typed", (place / "chunkflow" / "py.typed").exists())
    check_symbols("the library", place / "chunkflow" / "libchunkflow.so", "objdump")
    environment = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    environment.pop("CHUNKFLOW_BUILD", None)
    for page, n in (("tools/python/README.md", 7), ("tools/README.md", 1)):
        found = programs(TOP / page)
        check(page, len(found) == n, f"{len(found)} programs")
        for number, program in enumerate(found):
            (folder / "program.py").write_text(program)
            ranks = (*RANKS, "--redirects", "1", "--log-dir", folder / "ranks") if "torchrun" in program else ()
            ran = run(sys.executable, "-B", *ranks, folder / "program.py", cwd=folder, env=environment)
            if ranks:  # each rank writes its own file: in one pipe, lines of two processes mix
                printed = [log.read_text() for log in (folder / "ranks").rglob("stdout.log")]
                ran.stdout = "".join(printed)
                check(f"{page}, program {number + 1}: one loss on both ranks",
                      len(printed) == 2 and printed[0] == printed[1] != "", ran.stdout)
            apart = [float(x) for x in re.findall(r"apart ([-+.0-9e]+)", ran.stdout)]
            check(f"{page}, program {number + 1}", ran.returncode == 0 and ran.stdout and max(apart, default=0) < 1e-6
                  and len(apart) == 2 * ("apart" in program),
                  ran.stderr[-300:] or ran.stdout.replace("\n", "; ")[:90])
            imported = set(re.findall(r"^import (\w+)", program, re.MULTILINE)) - {"chunkflow", "numpy"}
            check(f"{page}, program {number + 1}: an extra brings what it imports", imported <= extra("trainer"),
                  f"{', '.join(sorted(imported))}")
    program = [TOP / "examples" / "train_hf.py", "--steps", "2", "--chunk-size", "256", TOP / "LICENSE"]
    ran = run(sys.executable, "-B", *program, cwd=folder, env=environment)
    check("train_hf.py", ran.returncode == 0 and "step 1: loss" in ran.stdout, ran.stdout[-60:] + ran.stderr[-300:])
    size = (TOP / "LICENSE").stat().st_size
    check("train_hf.py's first line", ran.stdout.startswith(
        f"1 sequences, the longest of {size} tokens, in {-(-size // 256)} chunks\n"), ran.stdout[:60])
    losses = re.findall("loss [0-9.]+", ran.stdout)
    ran = run(sys.executable, *RANKS, *program, "--max-cp", "2", cwd=folder, env=environment)
    check("train_hf.py, the file spread over two processes", re.findall("loss [0-9.]+", ran.stdout) == losses != [],
          ran.stdout[-60:] + ran.stderr[-300:])
    seconds = "import numpy, time; c = time.process_time(); import chunkflow; " \
              "chunkflow.pack([900, 14000], 4096).schedule(k=2); print(time.process_time() - c)"
    taken = min(float(run(sys.executable, "-c", seconds, env=environment).stdout) for _ in range(3))
    check("import and a first plan", taken <= 0.3, f"{taken:.2f} s of a processor beyond NumPy")


def check_arm(folder):
    if not shutil.which(CROSS) or not shutil.which(EMULATOR):
        skip("arm64", f"there is no {CROSS} or {EMULATOR}")
        return
    made = run(sys.executable, "-B", TOP / "tools" / "python" / "backend.py", folder, env={**os.environ, "CC": CROSS})
    wheel = made.stdout.strip()
    check("a wheel for arm64", made.returncode == 0 and wheel.endswith("2014_aarch64.whl"), wheel or made.stderr)
    shutil.unpack_archive(folder / wheel, folder / "arm", "zip")
    library = folder / "arm" / "chunkflow" / "libchunkflow.so"
    check_symbols("arm64's library", library, "aarch64-linux-gnu-objdump")
    built = run(CROSS, "-std=c99", f"-I{TOP}", "-DCHUNKFLOW_IMPLEMENTED", "-DCHUNKFLOW_API=extern",
                TOP / "examples" / "hello.c", library, "-lm", "-o", folder / "hello")
    ran = run(EMULATOR, "-L", "/usr/aarch64-linux-gnu", "-E", f"LD_LIBRARY_PATH={library.parent}", folder / "hello")
    native = run("cc", "-std=c99", f"-I{TOP}", TOP / "examples" / "hello.c", "-lm", "-o", folder / "native")
    same = built.returncode == native.returncode == 0 and ran.stdout == run(folder / "native").stdout != ""
    check("a C program on arm64 prints what it prints here", same, built.stderr[-300:] + ran.stderr[-300:])


def main():
    with tempfile.TemporaryDirectory() as folder:
        check_installed(pathlib.Path(folder))
        check_arm(pathlib.Path(folder))
    return finish()


if __name__ == "__main__":
    sys.exit(main())
