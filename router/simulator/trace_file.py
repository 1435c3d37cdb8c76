"""Opens a trace file, whichever of the known formats it has."""

from __future__ import annotations

from pathlib import Path

from router.simulator import azure, mooncake
from router.simulator.trace import Trace, TraceError


def read(path: Path, block_size: int | None = None) -> Trace:
    """The trace at `path`: Mooncake's format where its first line is a JSON object, Azure's
    otherwise. `block_size` says how many tokens a block has; None takes the format's own.

    Raises:
        TraceError: the file cannot be read, is empty or has a mistake.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise TraceError(path, None, f"cannot be read: {reason}") from error
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        trace = mooncake.read(path, lines, block_size or mooncake.BLOCK_SIZE)
    else:
        trace = azure.read(path, lines, block_size or azure.BLOCK_SIZE)
    if not trace.requests:
        raise TraceError(path, None, "holds no request")
    return trace
