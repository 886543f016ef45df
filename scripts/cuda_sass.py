# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Reads the machine code of compiled CUDA kernels, for what only it shows: loads that are really
ahead of their use, the width of stores, operands per product, instructions in loops.

    python scripts/cuda_report.py --keep cubins sm_90
    python scripts/cuda_sass.py cubins/*.cubin

Needs nvdisasm: from CUDA_HOME, PATH, or the package nvidia-cuda-nvdisasm.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from cuda_report import demangle


class Instruction(NamedTuple):
    """One line of machine code: `@P0 LDG.E.128 R4, desc[UR4][R2.64]`."""

    address: int
    opcode: str
    operands: str
    target: int | None = None  # of a branch


class Loop(NamedTuple):
    """A loop with no other inside, by what its body has of each kind."""

    instructions: int
    products: int
    operand_loads: int
    wide_loads: int
    wide_copies: int
    wide_shared_loads: int
    wide_shared_stores: int


PRODUCT = r"HMMA\.|[A-Z]*MMA\."
OPERAND_LOAD = r"LDSM\."
LOAD = r"LDG\."
WIDE_LOAD = r"LDG\..*\b128"
COPY = r"LDGSTS\."  # past the registers, while the thread does something else
WIDE_COPY = r"LDGSTS\..*\b128"
END_OF_COPIES = r"LDGDEPBAR"
WAIT_FOR_COPIES = r"DEPBAR"
WIDE_SHARED_LOAD = r"LDS\..*128"
WIDE_SHARED_STORE = r"STS\.128"
STORE_OF_16_BITS = r"STG\..*\bU16"
STORE_OF_32_BITS = r"STG\.E$"


def find_disassembler() -> str | None:
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvdisasm", path=f"{home}/bin" if home else None)
    found = found or shutil.which("nvdisasm")
    packages = (sorted(Path(path).glob("nvidia/cu[0-9]*/bin/nvdisasm")) for path in sys.path)
    return found or next((str(files[-1]) for files in packages if files), None)


def disassemble(nvdisasm: str, cubin: Path) -> dict[str, list[Instruction]]:
    """The kernels of a file, by name."""
    command = [nvdisasm, "--print-code", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels = parse(text)
    return dict(zip(demangle(list(kernels)), kernels.values(), strict=True))


def parse(text: str) -> dict[str, list[Instruction]]:
    """Kernels in what nvdisasm prints."""
    kernels = {}
    for section in re.split(r"^\.text\.(?=\w+:)", text, flags=re.M)[1:]:
        name, _, body = section.partition(":")
        kernels[name] = _instructions(body)
    return kernels


def _instructions(body: str) -> list[Instruction]:
    line = re.compile(
        r"^(\.L\w+):|/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.M
    )
    found, labels = [], {}
    pending: list[str] = []
    for label, address, opcode, operands in line.findall(body):
        if label:
            pending.append(label)
            continue
        labels |= dict.fromkeys(pending, int(address, 16))
        pending.clear()
        found.append(Instruction(int(address, 16), opcode, operands.strip()))

    def target(instruction: Instruction) -> int | None:
        match = re.search(r"`\((\.L\w+)\)", instruction.operands)
        return labels.get(match[1]) if match and instruction.opcode.startswith("BRA") else None

    return [instruction._replace(target=target(instruction)) for instruction in found]


def count(instructions: list[Instruction], pattern: str) -> int:
    return sum(re.match(pattern, i.opcode) is not None for i in instructions)


def loads_in_flight(instructions: list[Instruction], pattern: str = WIDE_LOAD) -> int:
    """The most loads, by default of 16 bytes, whose registers nothing has touched yet."""
    most, waiting = 0, []
    for instruction in instructions:
        touched = _registers(instruction.operands)
        waiting = [registers for registers in waiting if not registers & touched]
        if re.match(pattern, instruction.opcode) and instruction.operands.startswith("R"):
            wide = re.search(r"\.(64|128)\b", instruction.opcode)
            first = int(re.match(r"R(\d+)|RZ", instruction.operands)[1] or 255)
            waiting.append(set(range(first, first + (int(wide[1]) // 32 if wide else 1))))
            most = max(most, len(waiting))
    return most


def copies_are_ahead(loop: list[Instruction]) -> bool:
    """Whether a loop multiplies between the start of its first copies and the next wait for any."""
    ends = [n for n, i in enumerate(loop) if re.match(END_OF_COPIES, i.opcode)]
    if not ends:
        return False
    after = loop[ends[0] :] + loop[: ends[0]]
    waits = [n for n, i in enumerate(after) if re.match(WAIT_FOR_COPIES, i.opcode)]
    return count(after[: min(waits, default=None)], PRODUCT) > 0


def _registers(operands: str) -> set[int]:
    found = set()
    for number, wide in re.findall(r"\bR(\d+)(\.64)?", operands):
        found |= {int(number), int(number) + 1} if wide else {int(number)}
    return found


def highest_register(instruction: Instruction) -> int:
    return max(_registers(instruction.operands), default=0)


def branches_back(instructions: list[Instruction]) -> list[tuple[int, int]]:
    """Branches to what is before them, as (target, address), but for those that come back from what
    stands behind the last exit: that is what is rarely needed, such as shuffles of some lanes.
    """
    end = max((i.address for i in instructions if i.opcode == "EXIT"), default=0)
    spans = [(i.target, i.address) for i in instructions if i.target is not None]
    return [s for s in spans if s[0] < s[1] and not s[0] <= end < s[1]]


def loops(instructions: list[Instruction]) -> list[Loop]:
    """The innermost loops: what is between a branch back and its target."""
    spans = branches_back(instructions)
    innermost = [
        (start, end)
        for start, end in spans
        if not any((s, e) != (start, end) and start <= s and e <= end for s, e in spans)
    ]
    return [
        _loop([i for i in instructions if start <= i.address <= end]) for start, end in innermost
    ]


def _loop(body: list[Instruction]) -> Loop:
    kinds = (
        PRODUCT,
        OPERAND_LOAD,
        WIDE_LOAD,
        WIDE_COPY,
        WIDE_SHARED_LOAD,
        WIDE_SHARED_STORE,
    )
    return Loop(len(body), *(count(body, kind) for kind in kinds))


def main() -> None:
    nvdisasm = find_disassembler()
    if nvdisasm is None:
        raise SystemExit("nvdisasm is neither in CUDA_HOME nor on PATH nor among pip's packages")
    for cubin in map(Path, sys.argv[1:]):
        for name, instructions in disassemble(nvdisasm, cubin).items():
            print(f"{cubin.name}  {name}")
            print(
                f"  {len(instructions)} instructions, {count(instructions, PRODUCT)} products, "
                f"{count(instructions, OPERAND_LOAD)} loads of operands, "
                f"{loads_in_flight(instructions)} wide loads in flight, "
                f"{count(instructions, WIDE_COPY)} wide copies, "
                f"{count(instructions, STORE_OF_16_BITS)} stores of 16 bits, "
                f"{count(instructions, STORE_OF_32_BITS)} of 32"
            )
            for loop in loops(instructions):
                if loop.products or loop.wide_loads or loop.wide_copies or loop.wide_shared_stores:
                    print(f"    {loop}")


if __name__ == "__main__":
    main()
