"""What a compiled kernel takes, read from its cubin with the tools that Triton ships."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass

USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);", re.MULTILINE
)
TARGET = re.compile(r"\b0x([0-9a-f]+)\b")


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    opcode: str
    operands: str

    @property
    def is_wide_copy(self) -> bool:
        """From global to shared memory without a register between, 16 bytes a thread or more."""
        name, *modifiers = self.opcode.split(".")
        return name in ("UTMALDG", "UBLKCP") or (name == "LDGSTS" and "128" in modifiers)

    @property
    def is_narrow_copy(self) -> bool:
        return self.opcode.startswith("LDGSTS") and not self.is_wide_copy

    @property
    def is_wide_load(self) -> bool:
        """From global memory to registers, 16 bytes a thread or more."""
        name, *modifiers = self.opcode.split(".")
        return name == "LDG" and not {"128", "256"}.isdisjoint(modifiers)

    @property
    def is_local(self) -> bool:
        return self.opcode.split(".")[0] in ("LDL", "STL")

    @property
    def jumps_to(self) -> int | None:
        """The address that a branch names."""
        if not self.opcode.startswith("BRA"):
            return None
        found = TARGET.search(self.operands)
        return int(found[1], 16) if found else None


@dataclass(frozen=True, slots=True)
class MachineCode:
    """One kernel for one target."""

    registers: int
    """A thread's."""
    stack: int
    """Bytes a thread."""
    local: int
    """Instructions that read or write local memory."""
    instructions: int
    """But those that only fill up the end."""
    wgmma: int
    """Matrix products of a whole warp group (sm_90)."""
    tcgen05: int
    """Matrix products in tensor memory (sm_100)."""
    wide_copies: int
    """Asynchronous copies of 16 bytes or more inside a loop."""
    narrow_copies: int
    """Those of fewer bytes inside a loop."""
    wide_loads: int
    """Loads of 16 bytes or more a thread."""


def read_cubin(cubin: bytes) -> MachineCode:
    """Disassemble `cubin`, which holds one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return read_dump(_cuobjdump("--dump-resource-usage", "-sass", file.name))


def read_dump(dump: str) -> MachineCode:
    """`dump` is what `cuobjdump --dump-resource-usage -sass` prints of one kernel."""
    (usage,) = USAGE.findall(dump)
    registers, stack, local_bytes = map(int, usage)
    code = parse(dump)
    looped = [step for step in code if in_loop(step, code)]
    return MachineCode(
        registers=registers,
        stack=stack + local_bytes,
        local=sum(step.is_local for step in code),
        instructions=len(code),
        wgmma=sum(step.opcode.startswith(("HGMMA", "QGMMA")) for step in code),
        tcgen05=sum(bool(re.match(r"UTC\w*MMA", step.opcode)) for step in code),
        wide_copies=sum(step.is_wide_copy for step in looped),
        narrow_copies=sum(step.is_narrow_copy for step in looped),
        wide_loads=sum(step.is_wide_load for step in code),
    )


def parse(dump: str) -> list[Instruction]:
    """The instructions in order, without the padding behind the last one."""
    code = [
        Instruction(int(address, 16), opcode, operands)
        for address, opcode, operands in INSTRUCTION.findall(dump)
    ]
    while code and (code[-1].opcode == "NOP" or code[-1].jumps_to == code[-1].address):
        code.pop()
    return code


def in_loop(step: Instruction, code: list[Instruction]) -> bool:
    """Whether a branch behind `step` leads back before it."""
    return any(
        jump.jumps_to is not None and jump.jumps_to <= step.address < jump.address for jump in code
    )


def _cuobjdump(*arguments: str) -> str:
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout
