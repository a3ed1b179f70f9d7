# SPDX-License-Identifier: Apache-2.0
"""Single instructions, written as ``sm_120a`` PTX, translated, and run on the device; and the layouts of their operands."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from .build import assemble, device_functions
from .translate import translate

_HEAD = ".version 9.0\n.target sm_120a\n.address_size 64\n"

MMA_E4M3 = (
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 "
    "{{ %f5,%f6,%f7,%f8 }}, {{ %r1,%r2,%r3,%r4 }}, {{ %r5,%r6 }}, {{ %f1,%f2,%f3,%f4 }}, %r7, {{ {byte_a}, {tid_a} }}, "
    "%r8, {{ {byte_b}, {tid_b} }};"
)
MMA = (
    "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
    "{{%f5,%f6,%f7,%f8}},{{%r1,%r2,%r3,%r4}},{{%r5,%r6}},{{%f1,%f2,%f3,%f4}},{{%r7}},{{0,{tid_a}}},{{%r8}},{{0,{tid_b}}};"
)


def _kernel(addresses: int, registers: str, body: str) -> str:
    """A kernel whose parameters are addresses, in ``%rd1``, ``%rd2`` and so on."""
    names = [f"probe_param_{i}" for i in range(addresses)]
    parameters = ",\n".join(f"\t.param .u64 {name}" for name in names)
    loads = "\n".join(f"\tld.param.u64 %rd{i}, [{name}];" for i, name in enumerate(names, 1))
    return f"{_HEAD}.visible .entry probe(\n{parameters}\n)\n{{\n\t{registers} .reg .b64 %rd<8>;\n{loads}{body}\tret;\n}}\n"


def mma_ptx(tid_a: int, tid_b: int, instruction: str = MMA, byte_a: int = 0, byte_b: int = 0) -> str:
    """One warp per product.  Parameters: registers ``(n, 32, 8)`` b32 (a0-a3, b0, b1, sfa, sfb), c and d ``(n, 32, 4)`` f32."""
    body = f"""
	mov.u32 %r9, %ctaid.x;
	mov.u32 %r10, %tid.x;
	mad.lo.s32 %r11, %r9, 32, %r10;
	mul.wide.u32 %rd4, %r11, 32;
	add.s64 %rd5, %rd1, %rd4;
	ld.global.v4.u32 {{%r1,%r2,%r3,%r4}}, [%rd5];
	ld.global.v4.u32 {{%r5,%r6,%r7,%r8}}, [%rd5+16];
	mul.wide.u32 %rd4, %r11, 16;
	add.s64 %rd6, %rd2, %rd4;
	add.s64 %rd7, %rd3, %rd4;
	ld.global.v4.f32 {{%f1,%f2,%f3,%f4}}, [%rd6];
	{instruction.format(tid_a=tid_a, tid_b=tid_b, byte_a=byte_a, byte_b=byte_b)}
	st.global.v4.f32 [%rd7], {{%f5,%f6,%f7,%f8}};
"""
    return _kernel(3, ".reg .b32 %r<12>; .reg .f32 %f<9>;", body)


TO_E2M1 = _kernel(
    3,
    ".reg .b32 %r<5>; .reg .f32 %f<3>; .reg .b16 %rs<2>; .reg .b8 %b<2>;",
    """
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %tid.x;
	mad.lo.s32 %r3, %r1, 256, %r2;
	mul.wide.u32 %rd4, %r3, 4;
	add.s64 %rd5, %rd1, %rd4;
	add.s64 %rd6, %rd2, %rd4;
	ld.global.f32 %f1, [%rd5];
	ld.global.f32 %f2, [%rd6];
	cvt.rn.satfinite.e2m1x2.f32 %b1, %f1, %f2;
	cvt.u64.u32 %rd4, %r3;
	add.s64 %rd7, %rd3, %rd4;
	cvt.u32.u8 %r4, %b1;
	st.global.u8 [%rd7], %r4;
""",
)
"""Upper and lower operand ``(n,)`` f32, ``(n,)`` u8; n a multiple of 256."""

FROM_E2M1 = _kernel(
    2,
    ".reg .b32 %r<5>; .reg .b8 %b<2>;",
    """
	mov.u32 %r1, %tid.x;
	cvt.u64.u32 %rd3, %r1;
	add.s64 %rd4, %rd1, %rd3;
	ld.global.u8 %r2, [%rd4];
	cvt.u8.u32 %b1, %r2;
	cvt.rn.f16x2.e2m1x2 %r3, %b1;
	mul.wide.u32 %rd5, %r1, 4;
	add.s64 %rd6, %rd2, %rd5;
	st.global.u32 [%rd6], %r3;
""",
)
"""``(256,)`` u8 to ``(256,)`` b32, one block."""

_PREDICATES = """
	setp.ne.u64 %p1, %rd1, 0;
	setp.eq.u64 %p2, %rd1, 0;
"""
"""True and false."""

PAIRS = _kernel(
    2,
    ".reg .pred %p<3>;",
    f"""{_PREDICATES}
	ld.global.v2.u64 {{%rd3,%rd4}}, [%rd1];
	ld.global.u64 %rd5, [%rd1+16];
	fma.rn.f32x2 %rd6, %rd3, %rd4, %rd5;
	add.f32x2 %rd7, %rd3, %rd4;
	st.global.v2.u64 [%rd2], {{%rd6,%rd7}};
	mul.f32x2 %rd6, %rd3, %rd4;
	@%p1 sub.f32x2 %rd7, %rd3, %rd4;
	st.global.v2.u64 [%rd2+16], {{%rd6,%rd7}};
	@%p2 mul.f32x2 %rd6, %rd5, %rd5;
	@!%p1 fma.rn.f32x2 %rd7, %rd5, %rd5, %rd5;
	st.global.v2.u64 [%rd2+32], {{%rd6,%rd7}};
	ld.global.u64 %rd5, [%rd1+24];
	add.ftz.f32x2 %rd6, %rd5, %rd5;
	add.f32x2 %rd7, %rd5, %rd5;
	st.global.v2.u64 [%rd2+48], {{%rd6,%rd7}};
""",
)
"""a, b, c and d ``(4, 2)`` f32 to ``(8, 2)``: a b + c, a + b, a b, a - b, the last two again, 2 d without subnormals, 2 d."""

MIXED = _kernel(
    3,
    ".reg .pred %p<3>; .reg .b32 %r<4>; .reg .b16 %rs<2>; .reg .f32 %f<4>;",
    f"""{_PREDICATES}
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %tid.x;
	mad.lo.s32 %r3, %r1, 256, %r2;
	mul.wide.u32 %rd4, %r3, 2;
	add.s64 %rd4, %rd1, %rd4;
	ld.global.b16 %rs1, [%rd4];
	mul.wide.u32 %rd4, %r3, 4;
	add.s64 %rd5, %rd2, %rd4;
	add.s64 %rd6, %rd3, %rd4;
	ld.global.f32 %f1, [%rd5];
	add.f32.bf16 %f2, %rs1, %f1;
	@%p2 add.f32.bf16 %f2, %rs1, %f2;
	@%p1 fma.rn.f32.bf16 %f3, %rs1, %rs1, %f2;
	st.global.f32 [%rd6], %f3;
""",
)
"""``(n,)`` bf16 and f32 to ``(n,)`` f32: their sum, plus the first squared; n a multiple of 256."""

LARGEST = _kernel(
    2,
    ".reg .pred %p<3>; .reg .f32 %f<6>;",
    f"""{_PREDICATES}
	ld.global.v2.f32 {{%f1,%f2}}, [%rd1];
	ld.global.f32 %f3, [%rd1+8];
	max.f32 %f4, %f1, %f2, %f3;
	min.ftz.f32 %f5, %f1, %f2, %f3;
	@%p2 max.f32 %f5, %f1, %f2, %f3;
	st.global.v2.f32 [%rd2], {{%f4,%f5}};
	@%p1 max.NaN.f32 %f1, %f1, %f2, %f3;
	st.global.f32 [%rd2+8], %f1;
""",
)
"""``(3,)`` f32 to ``(3,)``: the largest, the smallest without subnormals, and the largest or NaN if one is."""

_UNUSED_MAPS = ",\n".join(f"\t.param .align 64 .b8 probe_param_{i}[128]" for i in range(1, 6))
LOAD = "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
TENSOR_LOAD = f"""{_HEAD}.visible .entry probe(
	.param .align 64 .b8 probe_param_0[128],
{_UNUSED_MAPS},
	.param .u64 probe_param_6,
	.param .u32 probe_param_7,
	.param .u32 probe_param_8,
	.param .u32 probe_param_9,
	.param .u32 probe_param_10
)
{{
	.reg .b32 %r<12>; .reg .b64 %rd<8>; .reg .pred %p<3>;
	.shared .align 1024 .b8 tile[16384];
	.shared .align 8 .b8 bar[8];
	mov.b64 %rd1, probe_param_0;
	cvta.param.u64 %rd2, %rd1;
	ld.param.u64 %rd3, [probe_param_6];
	ld.param.u32 %r1, [probe_param_7];
	ld.param.u32 %r2, [probe_param_8];
	ld.param.u32 %r3, [probe_param_9];
	ld.param.u32 %r4, [probe_param_10];
	mov.u32 %r5, tile;
	mov.u32 %r6, bar;
	mov.b64 %rd4, 0;
	mbarrier.init.shared.b64 [%r6], 1;
	fence.proxy.async.shared::cta;
	mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r6], %r4;
	setp.ne.u32 %p1, %r4, 0;
	@!%p1 {LOAD} [%r5], [%rd2, {{%r3,%r3,%r3}}], [%r6], %rd4;
	@%p1 {LOAD} [%r5], [%rd2, {{%r1,%r2,%r3}}], [%r6], %rd4;
WAIT:
	mbarrier.try_wait.parity.shared.b64 %p1, [%r6], 0;
	@!%p1 bra WAIT;
	mov.u32 %r7, 0;
COPY:
	add.s32 %r8, %r5, %r7;
	ld.shared.u32 %r9, [%r8];
	cvt.u64.u32 %rd6, %r7;
	add.s64 %rd7, %rd3, %rd6;
	st.global.u32 [%rd7], %r9;
	add.s32 %r7, %r7, 4;
	setp.lt.u32 %p2, %r7, %r4;
	@%p2 bra COPY;
	ret;
}}
"""
"""One thread.  Six tensor maps, of which the first is used, the tile's bytes, three coordinates, the number of bytes."""


def run(ptx: str, grid: int, block: int, *parameters: Any) -> None:
    """Translate, assemble, launch and wait.  Parameters: tensors, ints (32 bits) or bytes (a tensor map)."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(str(result[0]))
        return result[1] if len(result) > 1 else None

    torch.zeros(1, device="cuda")  # a context
    with tempfile.TemporaryDirectory() as directory:
        cubin, _ = assemble(translate(ptx, device_functions()).ptx, Path(directory))
        module = checked(driver.cuModuleLoadData(cubin.read_bytes()))
    function = checked(driver.cuModuleGetFunction(module, b"probe"))
    held: list[Any] = []
    for parameter in parameters:
        if isinstance(parameter, torch.Tensor):
            held.append(ctypes.c_uint64(parameter.data_ptr()))
        elif isinstance(parameter, bytes):
            held.append((ctypes.c_char * len(parameter)).from_buffer_copy(parameter))
        else:
            held.append(ctypes.c_uint32(parameter))
    addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
    checked(driver.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, 0, ctypes.addressof(addresses), 0))
    torch.cuda.synchronize()
    checked(driver.cuModuleUnload(module))


def fragments(
    a: torch.Tensor,
    b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    tid_a: int,
    tid_b: int,
    byte_a: int = 0,
    byte_b: int = 0,
) -> torch.Tensor:
    """Registers ``(n, 32, 8)`` int32 of codes a ``(n, 16, 64)``, b ``(n, 8, 64)`` and scale bytes ``(n, 16, 4)``, ``(n, 8, 4)``.

    Of E4M3 32 columns, and one scale byte at a place of its word. PTX ISA 9.0, 9.7.14.5.10, 9.7.14.5.15 and 9.7.14.3.  Lanes
    and bytes that supply no scale get what would show.
    """
    n = a.shape[0]

    def words(codes: torch.Tensor) -> torch.Tensor:
        """``(..., 8)`` codes of 4 bits, or 4 of 8, to one word, the first in the lowest bits."""
        shifts = torch.arange(0, 32, 32 // codes.shape[-1], device=codes.device)
        return (codes.long() << shifts).sum(-1)

    def scales(given: torch.Tensor, byte: int) -> torch.Tensor:
        if given.shape[-1] == 1:
            return given[..., 0].long() << 8 * byte | 0x55AA55AA & ~(0xFF << 8 * byte)
        return words(given)

    rows_a, rows_b = words(a.view(n, 16, 8, -1)), words(b.view(n, 8, 8, -1))  # (n, row, eighth of the columns)
    top, bottom = rows_a[:, :8], rows_a[:, 8:]
    registers = [top[..., :4], bottom[..., :4], top[..., 4:], bottom[..., 4:], rows_b[..., :4], rows_b[..., 4:]]  # (n, g, t)
    sfa = torch.full((n, 8, 4), 0x55AA55AA, device=a.device, dtype=torch.long)
    sfb = sfa.clone()
    sfa[:, :, 2 * tid_a] = scales(scales_a[:, :8], byte_a)
    sfa[:, :, 2 * tid_a + 1] = scales(scales_a[:, 8:], byte_a)
    sfb[:, :, tid_b] = scales(scales_b, byte_b)
    stacked = torch.stack([*registers, sfa, sfb], -1).view(n, 32, 8)
    return torch.where(stacked >= 1 << 31, stacked - (1 << 32), stacked).to(torch.int32).contiguous()


def accumulators(d: torch.Tensor) -> torch.Tensor:
    """``(n, 16, 8)`` to ``(n, 32, 4)``: of lane 4g+t, rows g and g+8, columns 2t and 2t+1."""
    return d.view(-1, 2, 8, 4, 2).permute(0, 2, 3, 1, 4).reshape(-1, 32, 4).contiguous()


def matrix(registers: torch.Tensor) -> torch.Tensor:
    """``(n, 32, 4)`` to ``(n, 16, 8)``."""
    return registers.view(-1, 8, 4, 2, 2).permute(0, 3, 1, 2, 4).reshape(-1, 16, 8)


def tensor_map_rewriter(folder: Path) -> Any:
    """``loader.c``'s function, built alone."""
    header = folder / "entries.h"
    header.write_text('static const struct entry entries[] = {{"", 0, 0}};\n#define ENTRY_COUNT 1\n')
    (folder / "empty").write_bytes(b"")
    library = folder / "loader.so"
    source = Path(__file__).parent / "loader.c"
    command = [
        "cc",
        "-shared",
        "-fPIC",
        f'-DCUBIN="{folder / "empty"}"',
        f'-DENTRIES="{header}"',
        "-o",
        str(library),
        str(source),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library)).b12x_rewrite_tensor_map
