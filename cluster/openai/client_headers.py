"""What a client may say of its request in HTTP headers."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers


@dataclass(frozen=True, slots=True)
class ClientHeaders:
    """The headers that mean something here."""

    request_id: str | None = None
    """X-Request-Id, unless it is unfit for an id."""
    explain: bool = False
    """X-Quire-Explain: whether the reply is to say why its replica was chosen."""

    @classmethod
    def of(cls, headers: Headers) -> ClientHeaders:
        """Those of one request."""
        value = headers.get("x-request-id")
        fit = value is not None and 0 < len(value) <= 256 and all("!" <= c <= "~" for c in value)
        return cls(value if fit else None, headers.get("x-quire-explain") == "1")
