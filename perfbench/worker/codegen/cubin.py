"""Reads a cubin, NVIDIA's ELF of one kernel: what a thread takes, and which instructions it has.

nvdisasm takes .4 s a kernel, which is more than a third of what compiling it takes, and cuobjdump
counts no instructions; so the ELF is read here. `tests/perfbench/test_codegen_cubin.py` holds it
against both.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

# The low 9 bits of an instruction, of 16 bytes on every card since SM 7.0; the next 3 say where its
# operands come from.
OPCODES = {
    0x03C: "mma",  # HMMA
    0x1F0: "wgmma",  # HGMMA
    0x1EA: "tcgen05",  # UTCHMMA
    0x187: "stores",  # STL, to local memory
    0x183: "loads",  # LDL, from it
}
INSTRUCTION_BYTES = 16
_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of .nv.info
_WITH_SIZE = 0x04  # an attribute whose value has a length


@dataclass(frozen=True, slots=True)
class CubinNumbers:
    """``registers`` and ``stack`` (bytes of local memory) of a thread, ``code`` in bytes, and how
    many instructions of each kind of `OPCODES`.
    """

    registers: int
    stack: int
    code: int
    counts: dict[str, int]


def read_cubin(cubin: bytes) -> CubinNumbers:
    """The numbers of the one kernel in it; ValueError for what is no cubin of one kernel."""
    sections = dict(_sections(cubin))
    texts = [body for name, body in sections.items() if name.startswith(".text.")]
    if len(texts) != 1:
        raise ValueError(
            f"got {len(texts)} kernels in a cubin, wanted 1. Next: report the version of Triton"
        )
    (code,) = texts
    found = dict.fromkeys(OPCODES.values(), 0)
    counted = Counter(
        word & 0x1FF for (word,) in struct.iter_unpack(f"<Q{INSTRUCTION_BYTES - 8}x", code)
    )
    for opcode, name in OPCODES.items():
        found[name] = counted[opcode]
    info = dict(_info(sections[".nv.info"]))
    return CubinNumbers(info.get(_REGISTERS, 0), info.get(_FRAME, 0), len(code), found)


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"got {cubin[:5]!r}, wanted a 64-bit ELF. Next: report the GPU's target")
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, number, of_names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, start + size * i) for i in range(number)]
    names = headers[of_names][4]
    for at, kind, _, _, offset, length in headers:
        name = cubin[names + at : cubin.index(b"\0", names + at)].decode()
        yield name, b"" if kind == 8 else cubin[offset : offset + length]  # 8: takes no bytes


def _info(body: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) of those that hold a symbol and a number: of one kernel, one symbol."""
    at = 0
    while at + 4 <= len(body):
        form, attribute, size = struct.unpack_from("<2BH", body, at)
        at += 4
        if form == _WITH_SIZE:
            if size == 8:
                yield attribute, struct.unpack_from("<2I", body, at)[1]
            at += size
