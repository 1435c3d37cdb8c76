"""What is measured: the shapes of an 8B model's layer, and what stands for them in a dry run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.gpu_check.targets import NOTHING, Target


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int


HEADS_8B = Heads(32, 8, 128)
HEADS_DRY = Heads(2, 1, 64)
LAYERS_8B = 32
HIDDEN_8B, HIDDEN_DRY = 4096, 64
INTERMEDIATE_8B, INTERMEDIATE_DRY = 14336, 96
BLOCK_SIZE = 64
BLOCK_SIZE_DRY = 16


@dataclass(frozen=True, slots=True)
class Decode:
    """`batch` rows of `context` tokens each, the new one included."""

    item: str
    batch: int
    context: int
    target: Target
    fp8: bool = False
    peers: bool = False
    """Whether it is worth the compilers' time of peers."""

    def dry(self) -> Decode:
        return replace(self, batch=min(2, self.batch), context=9 + self.context % 23)

    def kv_bytes(self, heads: Heads) -> float:
        """Of one layer's keys and values."""
        width = 1 if self.fp8 else 2
        return 2.0 * self.batch * self.context * heads.kv * heads.dim * width


@dataclass(frozen=True, slots=True)
class Prefill:
    """One segment of `tokens` after `start` that the pool holds already."""

    item: str
    tokens: int
    start: int
    target: Target
    peers: bool = False

    def dry(self) -> Prefill:
        return replace(self, tokens=20, start=min(self.start, 16))

    def operations(self, heads: Heads) -> float:
        """Multiplications and additions of both products, over what is not masked."""
        seen = self.tokens * self.start + self.tokens * self.tokens / 2
        return 4.0 * seen * heads.query * heads.dim


_BIG, _FP8 = Target(share=0.85, stretch=0.92), Target(share=0.65, stretch=0.75)
_WIDE = ((64, 4096), (128, 2048), (256, 1024), (8, 32768))
_MIDDLE = Target(share=0.80)


def _decode(batch: int, context: int, target: Target, **more: bool) -> Decode:
    size = f"{context // 1024}k"
    kind = " fp8" if more.get("fp8") else ""
    return Decode(f"decode{kind} B{batch} x {size}", batch, context, target, **more)


DECODES = (
    *(_decode(b, c, _BIG, peers=(b, c) in ((64, 4096), (8, 32768))) for b, c in _WIDE),
    *(_decode(b, c, _FP8, fp8=True) for b, c in _WIDE),
    _decode(16, 8192, _MIDDLE),
    _decode(1, 131072, _MIDDLE, peers=True),
    _decode(1, 32768, Target(share=0.65)),
    _decode(1, 4096, Target(at_most=12.0)),
)
PREFILLS = (
    Prefill("prefill 2k", 2048, 0, Target(share=0.45), peers=True),
    Prefill("prefill 8k", 8192, 0, Target(share=0.50, stretch=500 / 790), peers=True),
    Prefill("prefill chunk 512 at 4.6k", 512, 4096, Target(share=0.40)),
    Prefill("prefill chunk 2k at 32k", 2048, 30720, Target(share=0.50), peers=True),
)
NORM, SILU, COPIES = Target(share=0.85), Target(share=0.90), Target(share=0.90)
NORM_TOKENS = (2048, 8192)
KV_WRITE_TOKENS = (64, 2048)
GATHER_MIB = 256
SAMPLE = Target(at_most=40.0)
SAMPLE_ROWS, SAMPLE_VOCAB = 64, 128_000
LINK = Target(share=0.90)


def elementwise_targets() -> dict[str, Target]:
    """By item, those of everything but attention."""
    return {
        **{f"rms_norm + residual T={tokens}": NORM for tokens in NORM_TOKENS},
        **{f"silu_mul T={tokens}": SILU for tokens in NORM_TOKENS},
        **{f"kv_write with rope T={tokens}": NOTHING for tokens in KV_WRITE_TOKENS},
        f"block_gather {GATHER_MIB} MiB": COPIES,
        f"block_scatter {GATHER_MIB} MiB": COPIES,
        f"block_copy {GATHER_MIB} MiB": NOTHING,
        "sample B64 V=128k greedy": SAMPLE,
        "sample B64 V=128k temperature": SAMPLE,
        "sample B64 V=128k top-p 0.9": SAMPLE,
    }
