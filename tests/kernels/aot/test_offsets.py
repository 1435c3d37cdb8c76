"""Finding index arithmetic that leaves 31 bits, on intermediate forms written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.aot.intervals import BINARY, Interval, bits_of, of_bits
from tests.kernels.aot.offsets import Bounds, overflows

LARGE = Interval(0, 1 << 20)
BOUNDS = Bounds(scalars={"n": LARGE}, loads={"ids": LARGE}, grid=(1 << 18, 64, 1))


def body(*lines: str) -> str:
    """A kernel of these lines."""
    head = "tt.func public @k(%pool: !tt.ptr<f32>, %ids: !tt.ptr<i32>, %n: i32) attributes {} {"
    return "\n".join(["module {", head, *lines, "tt.return", "}", "}"])


LOAD = "%id = tt.load %ids : !tt.ptr<i32>"
STRIDE = "%stride = arith.constant 4096 : i32"


def use(offset: str, kind: str = "i32") -> str:
    return f"%place = tt.addptr %pool, {offset} : !tt.ptr<f32>, {kind}"


def test_a_loaded_id_times_a_stride_is_found_with_its_reach() -> None:
    product = "%far = arith.muli %id, %stride : i32"
    (found,) = overflows(body(LOAD, STRIDE, product, use("%far")), BOUNDS)
    assert found.bounds == Interval(0, 4096 << 20)
    assert "%far = arith.muli" in str(found)


def test_what_fits_is_not_found() -> None:
    product = "%far = arith.muli %id, %stride : i32"
    small = Bounds(scalars={}, loads={"ids": Interval(0, 1000)}, grid=(1, 1, 1))
    assert not overflows(body(LOAD, STRIDE, product, use("%far")), small)


def test_an_id_widened_before_the_product_is_not_found() -> None:
    wide = "%wide = arith.extsi %id : i32 to i64"
    stride = "%stride = arith.constant 4096 : i64"
    product = "%far = arith.muli %wide, %stride : i64"
    assert not overflows(body(LOAD, wide, stride, product, use("%far", "i64")), BOUNDS)


def test_an_id_widened_after_the_product_is_found() -> None:
    product = "%near = arith.muli %id, %stride : i32"
    wide = "%far = arith.extsi %near : i32 to i64"
    assert overflows(body(LOAD, STRIDE, product, wide, use("%far", "i64")), BOUNDS)


def test_a_wide_index_that_is_narrowed_is_found() -> None:
    wide = "%wide = arith.extsi %id : i32 to i64"
    stride = "%stride = arith.constant 4096 : i64"
    product = "%far = arith.muli %wide, %stride : i64"
    narrow = "%near = arith.trunci %far : i64 to i32"
    assert overflows(body(LOAD, wide, stride, product, narrow, use("%near")), BOUNDS)


def test_arithmetic_that_no_pointer_depends_on_is_not_found() -> None:
    product = "%hash = arith.muli %id, %stride : i32"
    chosen = (
        "%odd = arith.cmpi slt, %hash, %stride : i32",
        "%near = arith.select %odd, %stride, %stride : i1, i32",
    )
    assert not overflows(body(LOAD, STRIDE, product, *chosen, use("%near")), BOUNDS)


def test_an_unknown_pointer_may_lead_to_any_integer() -> None:
    unknown = Bounds(scalars={}, loads={}, grid=(1, 1, 1))
    total = "%next = arith.addi %id, %stride : i32"
    assert overflows(body(LOAD, STRIDE, total, use("%next")), unknown)


def test_programs_are_bounded_by_the_grid_of_their_axis() -> None:
    product = "%far = arith.muli %row, %stride : i32"

    def rows(axis: str) -> str:
        return body(STRIDE, f"%row = tt.get_program_id {axis} : i32", product, use("%far"))

    assert not overflows(rows("x").replace("4096", "8192"), BOUNDS)
    assert overflows(rows("x").replace("4096", "16384"), BOUNDS)
    assert not overflows(rows("y").replace("4096", "16384"), BOUNDS)


def loop(carried: str, start: str) -> str:
    return body(
        "%zero = arith.constant 0 : i32",
        "%one = arith.constant 1 : i32",
        STRIDE,
        LOAD,
        f"%last = scf.for %at = %zero to %n step %one iter_args(%held = {start})"
        " -> (i32)  : i32 {",
        use("%held"),
        carried,
        "scf.yield %next : i32",
        "}",
    )


def test_an_offset_that_grows_in_a_loop_is_found() -> None:
    assert overflows(loop("%next = arith.addi %held, %stride : i32", "%zero"), BOUNDS)


def test_an_offset_that_grows_little_is_not_found() -> None:
    grown = loop("%next = arith.addi %held, %one : i32", "%zero")
    assert not overflows(grown, BOUNDS)


def test_an_offset_that_doubles_in_a_loop_is_found() -> None:
    assert overflows(loop("%next = arith.addi %held, %held : i32", "%one"), BOUNDS)


def test_a_carried_id_is_followed_into_the_next_round() -> None:
    product = "%next = arith.muli %at, %stride : i32"
    assert overflows(loop(product, "%id"), BOUNDS)
    assert not overflows(loop("%next = tt.load %ids : !tt.ptr<i32>", "%id"), BOUNDS)


def test_regions_may_use_the_same_names_again() -> None:
    branches = (
        "%yes = arith.constant true",
        "%a = scf.if %yes -> (i32) {",
        "  %0 = arith.muli %id, %stride : i32",
        "  scf.yield %0 : i32",
        "} else {",
        "  %0 = arith.constant 5 : i32",
        "  scf.yield %0 : i32",
        "}",
    )
    assert len(overflows(body(LOAD, STRIDE, *branches, use("%a")), BOUNDS)) == 1


def test_a_while_loop_bounds_nothing_that_grows() -> None:
    grown = body(
        LOAD,
        STRIDE,
        "%end = scf.while (%held = %id) : (i32) -> i32 {",
        "  %more = arith.cmpi slt, %held, %n : i32",
        "  scf.condition(%more) %held : i32",
        "} do {",
        "^bb0(%now: i32):",
        "  %next = arith.addi %now, %stride : i32",
        "  scf.yield %next : i32",
        "}",
        use("%end"),
    )
    assert overflows(grown, BOUNDS)


@pytest.mark.parametrize("constant", ['dense<"0x00000080"> : tensor<1xi32>', "dense<7> : i32"])
def test_constants_that_are_not_read_may_be_anything(constant: str) -> None:
    total = "%next = arith.addi %some, %stride : i32"
    found = overflows(
        body(STRIDE, f"%some = arith.constant {constant}", total, use("%next")), BOUNDS
    )
    assert bool(found) == ("0x" in constant)


def test_a_sum_over_a_tensor_reaches_as_far_as_it_is_long() -> None:
    def summed(length: int) -> str:
        return body(
            LOAD,
            f"%all = tt.splat %id : i32 -> tensor<{length}xi32>",
            '%sum = "tt.reduce"(%all) <{axis = 0 : i32}> ({',
            "^bb0(%a: i32, %b: i32):",
            "  %c = arith.addi %a, %b : i32",
            "  tt.reduce.return %c : i32",
            f"}}) : (tensor<{length}xi32>) -> i32",
            STRIDE,
            "%next = arith.addi %sum, %stride : i32",
            use("%next"),
        )

    assert not overflows(summed(1024), BOUNDS)
    assert overflows(summed(4096), BOUNDS)


EXACT: dict[str, Callable[[int, int], int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divsi": lambda a, b: abs(a) // b * (1 if a >= 0 else -1),
    "arith.remsi": lambda a, b: abs(a) % b * (1 if a >= 0 else -1),
    "arith.shli": lambda a, b: a << min(b, 40),
    "arith.shrsi": lambda a, b: a >> b,
    "arith.andi": lambda a, b: a & b,
    "arith.ori": lambda a, b: a | b,
    "arith.xori": lambda a, b: a ^ b,
    "arith.minsi": min,
    "arith.maxsi": max,
}
numbers = st.integers(-1000, 1000)
POSITIVE = ("arith.divsi", "arith.remsi", "arith.shli", "arith.shrsi")


@pytest.mark.parametrize("name", sorted(BINARY))
@given(data=st.data())
def test_intervals_hold_every_result(name: str, data: st.DataObject) -> None:
    right = st.integers(1, 40) if name in POSITIVE else numbers
    a, other_a = data.draw(numbers), data.draw(numbers)
    b, other_b = data.draw(right), data.draw(right)
    first = Interval(min(a, other_a), max(a, other_a))
    second = Interval(min(b, other_b), max(b, other_b))
    exact = EXACT[name](a, b)
    assert Interval(exact, exact).within(BINARY[name](first, second))


def test_widths_of_types() -> None:
    assert [bits_of(kind) for kind in ("i32", "tensor<64x2xi64>", "i1", "f32", "index")] == [
        32,
        64,
        1,
        None,
        64,
    ]
    assert of_bits(1) == Interval(0, 1)
    assert of_bits(8) == Interval(-128, 127)
