#!/usr/bin/env python3
"""Every command of README.md, tools/README.md and tools/guide, as it stands there, in order, each page in a fresh clone.

    tests/meta/pages.py [BUILD]         BUILD (default: build) has the programs, and stands in the clone as build/

A block is indented by four spaces. Where its commands have a "$" before them, what stands below is what they print. `make`
itself, Python (tests/torch/wheel.py runs it), and what needs a device are left out. README's table of memory is asked for
again by tests/command/cli_models.transcript.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parents[2]
PAGES = ["README.md", "tools/README.md", *sorted(f"tools/guide/{page.name}" for page in TOP.glob("tools/guide/*.md"))]
ELSEWHERE = ("make ", "import chunkflow", "pip ")
passed = failed = skipped = 0


def check(name, holds, what=""):
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    print(f"ok {name}" if holds else f"FAIL {name}: {what}", flush=True)


def blocks(page):
    """Runs of lines that are indented by four spaces, outside fences."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"(?:^\n)((?:^    .*\n)+)", text, flags=re.MULTILINE)
    return [[line[4:] for line in block.splitlines()] for block in found]


def run(command, folder):
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "COLUMNS": "100"}
    return subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=folder, env=environment, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL)


def check_block(page, block, folder):
    """Commands with their output, or commands alone."""
    global skipped
    if block[0].startswith("$ "):
        printed = ""
        for line in block:
            if line.startswith("$ "):
                ran = run(line[2:], folder)
                check(f"{page}: {line[2:]}", ran.returncode == 0, ran.stderr)
                printed += ran.stdout
            else:
                check(f"{page}: prints {line}", line in printed.splitlines(), "it is not printed")
    elif block[0].startswith(ELSEWHERE):
        return
    elif block[0].startswith("import "):
        program = "\n".join(block)
        ran = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
        check(f"{page}: {block[0]} ...", ran.returncode == 0 and ran.stdout, ran.stderr.strip().split("\n")[-1])
    else:
        for line in block:
            if line.startswith("mpirun") and not (shutil.which("mpirun") and (folder / "build" / "pipeline_mpi").exists()):
                print(f"skip {page}: {line}: there is no MPI")
                skipped += 1
                break  # what follows reads its files
            ran = run(line, folder)
            check(f"{page}: {line}", ran.returncode == 0, ran.stderr.strip().split("\n")[-1])


def check_links(page):
    """Links to files of the repository, and to headings of its pages, lead somewhere."""
    text = re.sub(r"^```.*?^```$", "", (TOP / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        path = (TOP / page).parent / path if path else TOP / page
        found = path.exists()
        if found and heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            found = heading in (re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)
        check(f"{page}: its link to {target}", found, "leads nowhere")


def main(build="build"):
    if not (TOP / ".git").exists() or not shutil.which("git"):
        print("skip pages: this is no clone\n0 passed, 0 failed, 1 skipped")
        return 0
    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work) / "clone"
        subprocess.run(["git", "clone", "-q", "--local", "--no-hardlinks", TOP, folder], check=True)
        for page in PAGES:  # as they are now
            (folder / page).parent.mkdir(exist_ok=True)
            shutil.copy(TOP / page, folder / page)
        before = {path for path in folder.rglob("*") if ".git" not in path.parts}
        (folder / "build").symlink_to(pathlib.Path(build).resolve())
        for page in PAGES:
            found = blocks(folder / page)
            check(f"{page} has commands", found)
            for block in found:
                check_block(page, block, folder)
            for path in folder.iterdir():  # no page needs what another one made
                if path not in before and path.name not in ("build", ".git"):
                    path.unlink()
        for page in (*PAGES, "tools/python/README.md", "tests/README.md", "tools/bench/results/README.md"):
            check_links(page)
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
