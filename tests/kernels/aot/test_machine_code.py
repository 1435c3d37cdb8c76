"""Reading disassemblies."""

from __future__ import annotations

from tests.kernels.aot.machine_code import parse, read_dump

DUMP = """
Resource usage:
 Common:
  GLOBAL:0
 Function k:
  REG:62 STACK:8 SHARED:1024 LOCAL:4 CONSTANT[0]:584 TEXTURE:0 SURFACE:0 SAMPLER:0

\tcode for sm_90a
\t\tFunction : k
        /*0000*/                   LDGSTS.E.BYPASS.128 [R6], desc[UR20][R38.64], P0 ;   /* 0x0000 */
                                                                                       /* 0x0008 */
        /*0010*/                   LDG.E.128 R0, desc[UR20][R32.64] ;                   /* 0x0000 */
        /*0020*/              @!P0 LDGSTS.E.BYPASS.128 [R17], desc[UR20][R4.64], !P0 ;  /* 0x0000 */
        /*0030*/                   LDGSTS.E.LTC128B.64 [R17], desc[UR20][R4.64], !P0 ;  /* 0x0000 */
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;       /* 0x0000 */
        /*0050*/                   STL.64 [R1], R2 ;                                    /* 0x0000 */
        /*0060*/               @P0 BRA 0x20 ;                                           /* 0x0000 */
        /*0070*/                   LDL R2, [R1+0x4] ;                                   /* 0x0000 */
        /*0080*/                   LDGSTS.E.BYPASS.128 [R6], desc[UR20][R38.64], P0 ;   /* 0x0000 */
        /*0090*/                   EXIT ;                                               /* 0x0000 */
        /*00a0*/                   BRA 0xa0;                                            /* 0x0000 */
        /*00b0*/                   NOP;                                                 /* 0x0000 */
\t\t..........
"""


def test_resources_and_instructions_are_counted() -> None:
    code = read_dump(DUMP)
    assert (code.registers, code.stack, code.local) == (62, 12, 2)
    assert code.instructions == 10
    assert (code.wgmma, code.tcgen05) == (1, 0)
    assert read_dump(DUMP.replace("HGMMA.64x64x16", "UTCHMMA")).tcgen05 == 1
    assert code.wide_loads == 1


def test_only_copies_inside_a_loop_count() -> None:
    code = read_dump(DUMP)
    assert (code.wide_copies, code.narrow_copies) == (1, 1)
    straight = read_dump(DUMP.replace("@P0 BRA 0x20 ;", "@P0 BRA 0x90 ;"))
    assert (straight.wide_copies, straight.narrow_copies) == (0, 0)


def test_padding_behind_the_end_is_no_instruction() -> None:
    assert parse(DUMP)[-1].opcode == "EXIT"
