"""Compiles launches for targets that this machine need not have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tests.kernels.aot.bounds import bounds_of
from tests.kernels.aot.machine_code import MachineCode, read_cubin
from tests.kernels.aot.offsets import Bounds, overflows

if TYPE_CHECKING:
    from kernels.gpu.launch import Launch


@dataclass(frozen=True, slots=True)
class Target:
    """A compute capability, and whether pointers may be taken for multiples of 16 bytes."""

    arch: int
    aligned: bool = True

    def __str__(self) -> str:
        return f"sm_{self.arch}" + ("" if self.aligned else " unaligned")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of one launch for one target."""

    code: MachineCode | None = None
    shared: int = 0
    """Bytes of shared memory a program takes."""
    overflows: tuple[str, ...] = ()
    """Index arithmetic that can leave 31 bits."""
    error: str = ""
    """The compiler's, where it refused."""

    @staticmethod
    def of_json(fields: dict[str, Any]) -> Compiled:
        code = fields["code"] and MachineCode(**fields["code"])
        return Compiled(code, fields["shared"], tuple(fields["overflows"]), fields["error"])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compile_launch(launch: Launch, target: Target, bounds: Bounds | None = None) -> Compiled:
    """Compile as a call with such pointers would. `bounds` are its op's if not given."""
    import triton

    try:
        kernel = triton.compile(
            source_of(launch, aligned=target.aligned),
            target=gpu_target(target.arch),
            options=launch.options,
        )
    except Exception as error:  # noqa: BLE001 - reported beside those that compiled
        cause = error.__cause__ or error
        return Compiled(error=f"{type(cause).__name__}: {cause}"[-2000:])
    found = overflows(kernel.asm["ttir"], bounds or bounds_of(launch))
    return Compiled(read_cubin(kernel.asm["cubin"]), kernel.metadata.shared, tuple(map(str, found)))


def gpu_target(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", arch, 32)


def _is_special(parameter: Any, launch: Launch) -> bool:
    """Whether a call compiles another variant for some values of an integer."""
    kind = launch.types.get(parameter.name, "")
    return kind in ("i32", "i64") and not parameter.do_not_specialize


def source_of(launch: Launch, *, aligned: bool) -> Any:
    """The launch as the compiler takes it, arguments in the kernel's order.

    Raises:
        ValueError: a call would not compile just this.
    """
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    unknown = (set(launch.types) | set(launch.constants)) ^ set(names)
    if unknown:
        raise ValueError(f"{launch.op}: {sorted(unknown)} are not arguments of both")
    special = [one.name for one in launch.kernel.params if _is_special(one, launch)]
    if special:
        raise ValueError(f"{launch.op}: {special} are compiled anew for 1 and multiples of 16")
    signature = {name: launch.types.get(name, "constexpr") for name in names}
    divisible = [["tt.divisibility", 16]]
    pointers = [(at,) for at, name in enumerate(names) if signature[name].startswith("*")]
    attributes = dict.fromkeys(pointers, divisible) if aligned else {}
    return ASTSource(launch.kernel, signature, dict(launch.constants), attributes)
