#!/usr/bin/env python3
"""Plants faults in compiled kernels and asks whether their run on a CPU sees each.

    make test-ptx                            builds the programs; from the top of the tree
    python3 tests/ptx/ptx_faults.py [part of a fault's name ...]

Faults of assembly text are edits of the PTX in build/ptx/primitives, one line each; those of constraints, which have no
text in PTX, are compiled in one file, a copy of the tests' kernels each. Each must make a test of the suite primitives
fail or a check of the interpreter end the run, but for one that changes nothing in what this compiler makes. A text
that the interpreter does not read shows nothing, nor does a crash or a timeout: these are errors. Prints what saw each,
and "N passed, N failed", which sets the exit status.
"""

import os
import re
import subprocess
import sys

BUILD = os.path.join(os.environ.get("BUILD", "build"), "ptx")
NVCC = os.environ.get("NVCC", "nvcc")
PROGRAM = os.path.join(BUILD, "primitives")
IMAGE = "1.sm_90a.ptx"

MMA = r"(mma\.sync\S+ \{[^}]*\}, )\{(\S+), (\S+), (\S+), (\S+)\}, \{(\S+), (\S+)\}(, \{[^}]*\};)"
WGMMA = r"(wgmma\.mma_async\S+ \{[^}]*\}, )"
A_REGISTERS = r"\{(%r\d+), (%r\d+), (%r\d+), (%r\d+)\}"

# Name, a part of the entry's name, a pattern in its text, what a fault puts there. Every place in the entry changes.
EDITS = (
    ("rows of mma's A swapped", "product_kernelI13", MMA, r"\1{\3, \2, \4, \5}, {\6, \7}\8"),
    ("rows of mma's B swapped", "product_kernelI13", MMA, r"\1{\2, \3, \4, \5}, {\7, \6}\8"),
    ("mma of bf16 as f16", "product_kernelI13", r"f32\.bf16\.bf16\.f32", "f32.f16.f16.f32"),
    ("mma of another shape", "product_kernelI13", "m16n8k16", "m16n8k8"),
    ("sums of mma as an output only", "product_kernelI13", r"(mma\.sync.*), \{[^}]*\};",
     r"\1, {%f9000, %f9001, %f9002, %f9003};"),
    ("ldmatrix without .trans", "matrices_kernel", r"x4\.trans", "x4"),
    ("order of stmatrix", "stored_matrices", r"(stmatrix.*)\{(\S+), (\S+), ", r"\1{\3, \2, "),
    ("a wait for copies + 1", "copies_kernel", r"wait_group 1", "wait_group 2"),
    ("no first commit of copies", "copies_kernel", r"(?s)cp\.async\.commit_group;(.*commit_group;)", r"\1"),
    ("no last commit of copies", "copies_kernel", r"(?s)(commit_group;.*)cp\.async\.commit_group;", r"\1"),
    ("copies that are always of 16 bytes", "copies_kernel", r"(cp\.async\.cg.*), 16, %r\d+;", r"\1, 16, 16;"),
    ("a store where a load is wanted", "quads_kernel", "@write st", "@read st"),
    ("order of red.v4", "quads_kernel", r"(red\.global.*)\{(\S+), (\S+), ", r"\1{\3, \2, "),
    ("a parity inverted", "pieces_kernel", r"(mbarrier\.try_wait.*), (%r\d+);",
     r".reg .b32 inverted;\nxor.b32 inverted, \2, 1;\n\1, inverted;"),
    ("no fence after mbarrier.init", "pieces_kernel", r"fence\.mbarrier_init\S+;", ""),
    ("arrive without expect_tx", "pieces_kernel", r"arrive\.expect_tx(\.\S+ _, \[%r\d+\]), %r\d+;", r"arrive\1;"),
    ("coordinates of a box swapped", "pieces_kernel", r"\{(%r\d+), (%r\d+), (%r\d+)\}\]", r"{\2, \1, \3}]"),
    ("no fence between proxies", "wgmma_kernelI13", r"fence\.proxy\.async\S+;", ""),
    ("no wgmma.fence", "wgmma_kernelI13", r"wgmma\.fence\S+;", ""),
    ("no commit of wgmma", "wgmma_kernelI13", r"wgmma\.commit_group\S+;", ""),
    ("a wait for wgmma + 1", "wgmma_kernelI13", r"(wgmma\.wait_group\S+) 0;", r"\1 1;"),
    ("wgmma that adds where it is not to", "wgmma_kernelI13", "setp.ne.b32 add", "setp.eq.b32 add"),
    ("what of A and B is transposed", "wgmma_kernelI13__nv_bfloat16Lb0ELb0ELb1",
     r"(add, 1, 1), 0, 1;", r"\1, 1, 0;"),
    ("B in registers' wgmma not transposed", "wgmma_kernelI13__nv_bfloat16Lb1ELb0ELb1", r"(add, 1, 1), 1;", r"\1, 0;"),
    ("registers of wgmma's A swapped", "wgmma_kernelI13__nv_bfloat16Lb1", WGMMA + A_REGISTERS, r"\1{\3, \2, \4, \5}"),
    ("a halved bar.arrive", "turns_kernel", r"(bar\.arrive.*), 128;", r"\1, 64;"),
)

# The one fault that is seen because the interpreter, as ptxas, knows no such instruction.
UNREADABLE = {"mma of another shape": "unknown instruction mma.sync.aligned.m16n8k8"}
STOPPED, NOT_READ = 70, 71  # statuses of tests/ptx/ptx.h

# Name, text of the section >>device, what a fault puts there, whether it is seen.
CONSTRAINTS = (
    ("registers that nobody holds",
     'asm volatile("" : "+f"(c[j][0])', 'if (false) asm volatile("" : "+f"(c[j][0])', True),
    ("a fence that clobbers no memory",
     '"fence.proxy.async.shared::cta;" ::: "memory"', '"fence.proxy.async.shared::cta;"', False),
)


def entries(text):
    """Where each entry begins, and the end."""
    return [found.start() for found in re.finditer(r"^(\.visible )?\.entry ", text, re.M)] + [len(text)]


def edited(text, entry, pattern, wanted):
    """The text with the fault in it, and how many places that changed."""
    parts, changed, at = [], 0, entries(text)
    parts.append(text[:at[0]])
    for begin, end in zip(at, at[1:]):
        body = text[begin:end]
        if entry in body.split("(", 1)[0]:
            body, n = re.subn(pattern, wanted, body)
            changed += n
        parts.append(body)
    return "".join(parts), changed


def plain_name(entry):
    """A mangled name without what differs between files and namespaces."""
    entry = re.sub(r"\d+_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_c[cu]_[0-9a-f]{8}", "", entry)
    return re.sub(r"7copy_\d_|S\d*_", "", entry)


def compile_copies():
    """The PTX of the primitives in as many copies as there are faults of constraints, and one without: copy_0. One
    compilation makes all of them; each has its number, for a fault in another program's branch might not be one."""
    folder = os.path.join(BUILD, "planted")
    os.makedirs(folder, exist_ok=True)
    section = open(os.path.join(BUILD, "device_section.h")).read()
    for number, (_, right, wrong, _) in enumerate(CONSTRAINTS, 1):
        if right not in section:
            sys.exit("ptx_faults: the section >>device has no " + right)
        section = section.replace(right, "\n#if PLANTED == %d\n%s\n#else\n%s\n#endif\n" % (number, wrong, right))
    open(os.path.join(folder, "device_section.h"), "w").write(section)
    source, result = os.path.join(folder, "copies.cu"), os.path.join(folder, "copies.ptx")
    with open(source, "w") as file:
        for header in re.findall(r"^#include .*", open("tests/cuda/test_primitives.cc").read(), re.M):
            if "device_section" not in header:
                file.write(header.replace("../", "tests/") + "\n")
        for number in range(len(CONSTRAINTS) + 1):
            file.write("#undef PLANTED\n#define PLANTED %d\nnamespace copy_%d_ {\n#include "
                       "\"tests/cuda/test_primitives.cc\"\n}\n" % (number, number))
    subprocess.run([NVCC, "-std=c++17", "-O3", "-arch=compute_90a", "-ptx", "-DCHUNKFLOW_CUDA_VARIANTS",
                    "-I" + folder, "-I.", source, "-o", result], check=True)
    return open(result).read()


def recompiled(number, copies, text):
    """That copy's entries under the names that the program knows."""
    at = entries(copies)
    known = {plain_name(name): name for name in re.findall(r"\.entry (\w+)\(", text)}
    parts = [copies[:at[0]]]
    for begin, end in zip(at, at[1:]):
        name = re.search(r"\.entry (\w+)\(", copies[begin:end]).group(1)
        if "7copy_%d_" % number in name:
            parts.append(copies[begin:end].replace(name, known.pop(plain_name(name))))
    if known:
        sys.exit("ptx_faults: not compiled: " + ", ".join(known))
    return re.sub(r"\$L__BB\d+_|7copy_\d_", lambda found: found.group()[:5], "".join(parts))


def what_sees(text, name=""):
    """The first thing that says that something is wrong with this text, or None. Ends where the run says nothing."""
    folder = os.path.join(BUILD, "planted")
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, IMAGE), "w").write(text)
    try:
        run = subprocess.run([PROGRAM, "primitives."], capture_output=True, text=True, errors="replace", timeout=300,
                             env=dict(os.environ, PTX_ARCH="90", PTX_TEXT=folder))
    except subprocess.TimeoutExpired:
        sys.exit("ptx_faults: %s: no end within 300 s" % name)
    stopped = re.search(r"^ptx: (.*)", run.stderr, re.M)
    failed = re.search(r"FAILED (\S+?),", run.stdout)
    said = re.sub(r"^_Z\S+, line \d+: ", "", stopped.group(1))[:80] if stopped else ""
    unreadable = UNREADABLE.get(name)
    if run.returncode == 0 and re.search(r"^[1-9]\d* passed, 0 failed", run.stdout, re.M):
        return None
    if run.returncode == 1 and failed:
        return failed.group(1)
    if said and (run.returncode == STOPPED or
                 run.returncode == NOT_READ and unreadable and said.startswith(unreadable)):
        return said
    sys.exit("ptx_faults: %s: status %d says nothing of the fault: %s" % (name, run.returncode, said))


def main():
    parts = sys.argv[1:]
    names = [one[0] for one in (*EDITS, *CONSTRAINTS)]
    chosen = {name for name in names if not parts or any(part in name for part in parts)}
    if not chosen:
        sys.exit("ptx_faults: no fault's name has " + " or ".join(parts))
    dump = os.path.join(BUILD, "dump")
    os.makedirs(dump, exist_ok=True)
    subprocess.run([PROGRAM, "--list"], check=True, capture_output=True, env=dict(os.environ, PTX_DUMP=dump))
    text = open(os.path.join(dump, IMAGE)).read()
    if what_sees(text):
        sys.exit("ptx_faults: fails without a fault: " + what_sees(text))
    copies = compile_copies()
    if what_sees(recompiled(0, copies, text)):
        sys.exit("ptx_faults: compiled anew it fails without a fault: " + what_sees(recompiled(0, copies, text)))
    seen = missed = 0
    for name, make, wanted in (
            *((name, lambda e=entry, p=pattern, w=wrong: edited(text, e, p, w), True)
              for name, entry, pattern, wrong in EDITS),
            *((name, lambda n=number: (recompiled(n, copies, text), 1), is_seen)
              for number, (name, _, _, is_seen) in enumerate(CONSTRAINTS, 1))):
        if name not in chosen:
            continue
        planted, changed = make()
        if not changed:
            sys.exit("ptx_faults: %s: its text is nowhere" % name)
        by = what_sees(planted, name)
        if not wanted:
            same = planted.split() == recompiled(0, copies, text).split()
            print("%-40s %s" % (name, "changes nothing in the PTX" if same and not by else "NOT so: %s" % by))
            missed += bool(by) or not same
            continue
        print("%-40s %s" % (name, "seen: " + by if by else "NOT SEEN"), flush=True)
        seen += by is not None
        missed += by is None
    print("%d passed, %d failed" % (seen, missed))
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
