#!/usr/bin/env python3
"""Counts the instructions of the hot loop of each fused attention kernel in the compiled machine code. Needs no GPU.

    python3 tools/bench/count_instructions.py [sm_80 sm_86 sm_90a ...]      from the top of the tree
    python3 tools/bench/count_instructions.py --overlap     the kernels with wgmma; status 1 if one of them is wrong

Compiles chunkflow_cuda.cu with nvcc (NVCC names another) and disassembles it with nvdisasm. Prints, for each kernel,
registers, bytes spilled, and the instructions of one turn of its main loop. They are counted on the path of an unmasked
tile without softcap: of all paths through the loop, the one with most products, exponentials, copies and reductions,
and of those the shortest. wgmma counts as HMMA. The kernels are those with CHUNKFLOW_CUDA_VARIANTS.

--overlap checks the purpose of the wgmma kernels: exponentials that run at the same time as products. In each turn of
the loop, a kernel waits for scores while other products still run ("wait 1"), computes their exponentials, and then
waits for those products ("wait 0"). The language does not prevent the compiler from moving the second wait before the
exponentials. On every path without softcap, masked or not, at least half of a turn's exponentials must come before that
wait. No address may come from a register that is not uniform (R2UR), and none may be spilled. fp16 differs only in the
type of products.

nvdisasm is taken from NVDISASM, from PATH, or installed from PyPI (nvidia-cuda-nvdisasm) into build/. Without it the
status is 77.
"""

import os
import re
import shutil
import subprocess
import sys

BUILD = os.environ.get("BUILD", "build")
NVCC = os.environ.get("NVCC", "nvcc")
OPTIONS = ("-O3", "-std=c++17", "-DCHUNKFLOW_CUDA_VARIANTS", "-I.")

# The columns, each with the opcodes that it counts. An opcode counts in the first column that matches it.
COLUMNS = (
    ("HMMA", r"HG?MMA"), ("LDSM", r"LDSM"), ("EX2", r"MUFU\.EX2"), ("LDGSTS", r"LDGSTS"), ("STS", r"STS"),
    ("LDS", r"LDS"),
    ("RED", r"(RED|ATOM)"), ("LDL/STL", r"(LDL|STL)"), ("moves", r"(MOV|IMAD\.MOV)"), ("convert", r"F2F"),
    ("BSSY", r"BSSY"), ("BRA", r"BRA"), ("BAR", r"(BAR|WARPSYNC)"), ("FP", r"(FADD|FMUL|FFMA|FMNMX|FSEL|FSETP|FCHK)"),
    ("integer", r"(IADD|IMAD|LEA|LOP|SHF|ISETP|SEL|VIADD|PRMT|IABS|IMNMX|VIMNMX|LOP3|PLOP3|R2P|S2R|CS2R|U[A-Z])"),
)


def find_nvdisasm():
    named = os.environ.get("NVDISASM") or shutil.which("nvdisasm")
    if named:
        return named
    home = os.path.join(BUILD, "disassembler")
    python = os.path.join(home, "bin", "python3")
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", home], check=False)
    if os.path.exists(python):
        subprocess.run([python, "-m", "pip", "-q", "install", "nvidia-cuda-nvdisasm"], check=False)
    for folder, _, files in os.walk(home):
        if "nvdisasm" in files:
            return os.path.join(folder, "nvdisasm")
    print("count_instructions: no nvdisasm", file=sys.stderr)
    sys.exit(77)


def compile_for(arch):
    """Returns the machine code, and {mangled name: (registers, spilled bytes)} from the output of ptxas."""
    cubin = os.path.join(BUILD, "count_" + arch + ".cubin")
    log = run([NVCC, *OPTIONS, "-Xptxas", "-v", "-arch=" + arch, "-cubin", "chunkflow_cuda.cu", "-o", cubin])
    return cubin, facts_of(log.stderr)


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return done


def facts_of(log):
    facts, name, spilled = {}, None, 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match.group(1)
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", line):
            spilled = max(int(match.group(1)), int(match.group(2)))
        elif (match := re.search(r"Used (\d+) registers", line)) and name:
            facts[name] = (int(match.group(1)), spilled)
    return facts


def functions_of(text):
    """{mangled name: [blocks]}; a block is (label, [instructions])."""
    functions, blocks = {}, None
    for line in text.splitlines():
        if match := re.match(r"\.text\.(\w+):", line):
            blocks = functions[match.group(1)] = [("entry", [])]
        elif match := re.match(r"(\.L_\w+):", line):
            if blocks is not None:
                blocks.append((match.group(1), []))
        elif (match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)) and blocks is not None:
            instruction = match.group(1)
            blocks[-1][1].append(instruction)
            if re.search(r"\b(BRA|EXIT|BSYNC|RET)\b", instruction):
                blocks.append(("", []))
    return functions


def opcode(instruction):
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def edges_of(blocks):
    """Returns, for each block, the indices of the blocks that may follow it."""
    at = {label: i for i, (label, _) in enumerate(blocks) if label}
    joins, edges = {}, []
    for i, (_, instructions) in enumerate(blocks):
        for one in instructions:
            if match := re.search(r"BSSY\S* (B\d+), `\((\.L_\w+)\)", one):
                joins[match.group(1)] = match.group(2)  # the block at which the next BSYNC of this barrier continues
        follow, last = [], instructions[-1] if instructions else "NOP"
        kind = opcode(last).split(".")[0]
        if kind == "BRA" and (match := re.search(r"(\.L_\w+)", last)):
            follow.append(at[match.group(1)])
        if kind == "BSYNC" and (match := re.search(r"(B\d+)", last)):
            follow.append(at[joins[match.group(1)]])
        always = not last.startswith("@") and not re.match(r"BRA(\.\w+)* !?U?P", last)
        if not (always and kind in ("BRA", "EXIT", "RET", "BSYNC")) and i + 1 < len(blocks):
            follow.append(i + 1)
        edges.append(follow)
    return edges


def weight_of(instructions):
    """Returns the weight of a path: most products and exponentials first, then fewest instructions. A reciprocal is
    part of a softcap's tanh, and outweighs the exponential in it."""
    kinds = [opcode(one) for one in instructions]
    return sum(1_000_000 if re.match(r"(HG?MMA|LDGSTS|RED|ATOM|MUFU\.EX2)", kind)
               else -2_000_000 if kind.startswith("MUFU.RCP") else -1 for kind in kinds)


def order_from(head, edges, body):
    """Returns the blocks of a loop's body in an order in which every edge, except a jump back, goes forward."""
    order, seen, stack = [], {head}, [(head, iter(edges[head]))]
    while stack:
        block, rest = stack[-1]
        to = next((to for to in rest if to in body and to not in seen), None)
        if to is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(to)
            stack.append((to, iter(edges[to])))
    return order[::-1]


def body_of(head, latch, edges):
    """Returns all blocks from which the latch can be reached without passing the head."""
    before = [[] for _ in edges]
    for block, follow in enumerate(edges):
        for to in follow:
            before[to].append(block)
    body, todo = {head, latch}, [latch]
    while todo:
        block = todo.pop()
        if block == head:
            continue
        for one in before[block]:
            if one not in body:
                body.add(one)
                todo.append(one)
    return body


def jumps_back(edges):
    """Returns every edge (latch, head) to a block that is on the path to the latch."""
    jumps, state, stack = [], {0: "on"}, [(0, iter(edges[0]))]
    while stack:
        block, rest = stack[-1]
        to = next(rest, None)
        if to is None:
            state[block] = "done"
            stack.pop()
        elif to not in state:
            state[to] = "on"
            stack.append((to, iter(edges[to])))
        elif state[to] == "on":
            jumps.append((block, to))
    return jumps


def has_products(blocks, body):
    return any(re.match(r"HG?MMA", opcode(one)) for block in body for one in blocks[block][1])


def hot_loop(blocks):
    """Returns the innermost loop with most products: the instructions of one turn, and all of its blocks."""
    edges = edges_of(blocks)
    loops = [(latch, head, body_of(head, latch, edges)) for latch, head in jumps_back(edges)]
    loops = [loop for loop in loops if has_products(blocks, loop[2])]
    best = (0, [], set())
    for latch, head, body in loops:
        if not any(other < body for _, _, other in loops):
            order = order_from(head, edges, body)
            place = {block: i for i, block in enumerate(order)}
            ways = {head: (weight_of(blocks[head][1]), None)}
            for block in order:
                if block not in ways:
                    continue
                for to in edges[block]:
                    if to in place and place[to] > place[block]:
                        weight = ways[block][0] + weight_of(blocks[to][1])
                        if to not in ways or weight > ways[to][0]:
                            ways[to] = (weight, block)
            if latch not in ways or ways[latch][0] <= best[0]:
                continue
            way, block = [], latch
            while block is not None:
                way = blocks[block][1] + way
                block = ways[block][1]
            best = (ways[latch][0], way, body)
    return best[1:]


WAIT = r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)"
# tanh, and the comparison that tells its slope from a hidden score
SOFTCAP = r"MUFU\.RCP|FSETP\.GEU\S* \w+, PT, \S+, -1, PT"


def has_softcap(block):
    return any(re.search(SOFTCAP, instruction) for instruction in block[1])


def exponentials_to_next_wait(blocks, edges, body, block, first, known):
    """Returns the set of counts over all paths inside the loop; paths with a softcap are left out."""
    if (block, first) in known:
        return known[block, first]
    known[block, first] = set()  # a jump back to here is no new way
    if has_softcap(blocks[block]):
        return set()
    count = 0
    for instruction in blocks[block][1][first:]:
        if re.search(WAIT, instruction):
            known[block, first] = {count}
            return {count}
        count += "MUFU.EX2" in instruction
    known[block, first] = {count + more for to in edges[block] if to in body
                           for more in exponentials_to_next_wait(blocks, edges, body, to, 0, known)}
    return known[block, first]


def overlap(blocks, body):
    """Returns (exponentials before the second wait, exponentials after it) of one turn, on the worst path."""
    edges, found = edges_of(blocks), {True: [], False: []}
    for block in body:
        for i, instruction in enumerate([] if has_softcap(blocks[block]) else blocks[block][1]):
            if match := re.search(WAIT, instruction):
                counts = exponentials_to_next_wait(blocks, edges, body, block, i + 1, {})
                found[match.group(1) != "0"].append(counts or {0})
    return max(map(min, found[True]), default=0), max(map(max, found[False]), default=0)


def check_overlap():
    """Prints a line for each kernel with wgmma, and returns whether one of them is wrong."""
    nvdisasm, ptx, wrong = find_nvdisasm(), os.path.join(BUILD, "overlap.ptx"), 0
    run([NVCC, *OPTIONS, "-arch=compute_90a", "-ptx", "chunkflow_cuda.cu", "-o", ptx])
    names = [name for name in re.findall(r"\.entry (\w+)", open(ptx).read()) if "_hopper" in (short_name(name) or "")]
    print("kernel (bf16)            registers spilled  loop  R2UR    EX2 before second wait")
    for name in names:
        cubin = os.path.join(BUILD, "overlap.cubin")
        log = run([os.environ.get("PTXAS", "ptxas"), "-arch=sm_90a", "-v", "--entry", name, ptx, "-o", cubin])
        registers, spilled = facts_of(log.stderr + log.stdout)[name]
        blocks = functions_of(run([nvdisasm, "-c", cubin]).stdout)[name]
        loop, body = hot_loop(blocks)
        before, after = overlap(blocks, body)
        moves = sum(opcode(one) == "R2UR" for one in loop)
        fine = after <= before > 0 and moves == spilled == 0
        print("%-24s%10d%8d%6d%6d%17d of %-4d%s" % (short_name(name), registers, spilled, len(loop), moves, before,
                                                    before + after, "" if fine else "  wrong"))
        wrong += not fine
    return wrong > 0 or not names


def count(instructions):
    counts = dict.fromkeys([name for name, _ in COLUMNS] + ["other"], 0)
    for one in instructions:
        kind = opcode(one)
        name = next((name for name, pattern in COLUMNS if re.match(pattern, kind)), "other")
        counts[name] += 1
    return counts


def short_name(mangled):
    match = re.search(r"attention_((?:forward|backward|dq)(?:_hopper)?)_kernelI(13__nv_bfloat16|6__half)"
                      r"((?:L[ib]\d+E)+)", mangled)
    if not match or match.group(2) != "13__nv_bfloat16":  # fp16 differs only in the type of the products
        return None
    return match.group(1) + " " + " x ".join(re.findall(r"L[ib](\d+)E", match.group(3)))


def main():
    if sys.argv[1:] == ["--overlap"]:
        sys.exit(check_overlap())
    nvdisasm = find_nvdisasm()
    names = [name for name, _ in COLUMNS] + ["other"]
    print("%-8s%-28s%10s%8s%6s" % ("arch", "kernel (bf16)", "registers", "spilled", "loop")
          + "".join("%*s" % (max(len(name) + 1, 5), name) for name in names))
    for arch in sys.argv[1:] or ["sm_80", "sm_90a"]:
        cubin, facts = compile_for(arch)
        text = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout
        for mangled, blocks in sorted(functions_of(text).items()):
            name = short_name(mangled)
            if not name:
                continue
            loop, _ = hot_loop(blocks)
            if not loop:  # empty on this architecture
                continue
            counts = count(loop)
            print("%-8s%-28s%10d%8d%6d" % ((arch, name) + facts[mangled] + (len(loop),))
                  + "".join("%*d" % (max(len(one) + 1, 5), counts[one]) for one in names))


if __name__ == "__main__":
    main()
