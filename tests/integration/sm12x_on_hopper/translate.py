# SPDX-License-Identifier: Apache-2.0
"""PTX that the CuTe DSL, Triton or NVRTC wrote for ``sm_120a`` or ``sm_121a``, as PTX for ``sm_90a``.

Most instructions are the same on both (:data:`_KEPT`).  For each of the others there is a :class:`Rule`.  Anything else is
an error that names the instruction.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

ISA_VERSION = "8.7"
"""Written into the result: enough for every instruction that is left, and old enough for the ``ptxas`` of CUDA 12.8."""


class UnknownInstructionError(ValueError):
    """The PTX holds something that no rule knows."""


@dataclass(frozen=True)
class Entry:
    """A kernel: its name, its parameters' sizes in bytes, and which of them are tensor maps of 4-bit elements."""

    name: str
    parameters: tuple[int, ...]
    fp4_maps: tuple[int, ...]


@dataclass
class Translation:
    ptx: str
    entries: tuple[Entry, ...]
    counts: dict[str, int] = field(default_factory=dict)
    """How often each rule was applied."""


@dataclass
class _Kernel:
    """What the rules need to know of the kernel they are applied to."""

    entry: Entry
    map_of_register: dict[str, int]
    """64-bit register to the parameter whose address it holds."""
    byte_ids: set[str] = field(default_factory=set)
    """Registers seen as byte selectors of scales."""


@dataclass(frozen=True)
class Rule:
    """One foreign instruction: how it is spelled, what replaces it, and where its meaning is written.

    ``pattern`` matches the whole statement, predicate and semicolon included.  ``replace`` returns None where this
    instance of it may stay.
    """

    name: str
    opcode: str
    operands: str
    replace: Callable[[re.Match[str], _Kernel], str | None]
    source: str

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(rf"^[ \t]*(?P<predicate>@!?%p\d+\s+)?(?P<opcode>{self.opcode})\s+{self.operands}\s*;", re.M)


def _call(result: str, result_type: str, function: str, arguments: list[str], prologue: str = "", epilogue: str = "") -> str:
    """A call of one of ``instructions.cu``'s functions.  ``result``: the statements that read ``[result]``."""
    declared = "".join(f" .param .b32 p{i};" for i in range(len(arguments)))
    stored = "".join(f"\n\tst.param.b32 [p{i}], {argument};" for i, argument in enumerate(arguments))
    names = ", ".join(f"p{i}" for i in range(len(arguments)))
    call = f"call.uni (result), {function}, ({names});"
    return f"{{ .param {result_type};{declared}{prologue}{stored}\n\t{call}\n\t{result}{epilogue} }}"


def _mma(match: re.Match[str], kernel: _Kernel) -> str:
    """The CuTe DSL writes a scale's register in braces, Triton does not."""
    _refuse_predicate(match)
    groups = [re.split(r",\s*", (many or one).strip()) for many, one in re.findall(r"\{([^}]*)\}|([%\w]+)", match["groups"])]
    d, a, b, c, sfa, (byte_a, tid_a), sfb, (byte_b, tid_b) = groups
    fp4, selectors = "mxf4nvf4" in match["opcode"], {"tid0": tid_a, "tid1": tid_b, "byte0": byte_a, "byte1": byte_b}
    if fp4:  # a scale of each byte
        kernel.byte_ids.update((selectors.pop("byte0"), selectors.pop("byte1")))
    prologue = " .reg .b32 tid<2>, byte<2>;" + "".join(itertools.starmap(_widened, selectors.items()))
    loads = "\n\t".join(f"ld.param.b32 {register}, [result+{4 * i}];" for i, register in enumerate(d))
    scales = [*sfa, "tid0", *sfb, "tid1"] if fp4 else [*sfa, "tid0", "byte0", *sfb, "tid1", "byte1"]
    function = "b12x_mma_mxf4nvf4" if fp4 else "b12x_mma_mxf8f6f4_e4m3"
    return _call(loads, ".align 4 .b8 result[16]", function, [*a, *b, *c, *scales], prologue)


def _refuse_predicate(match: re.Match[str]) -> None:
    """Calls are made by whole warps."""
    if match["predicate"]:
        raise UnknownInstructionError(f"a predicated {match['opcode']}")


def _widened(register: str, source: str) -> str:
    """Selectors are 16-bit registers or literals."""
    return f" mov.b32 {register}, {source};" if source.isdecimal() else f" cvt.u32.u16 {register}, {source};"


def _to_e2m1x2(match: re.Match[str], kernel: _Kernel) -> str:
    _refuse_predicate(match)
    return _call(
        f"ld.param.b32 codes, [result]; cvt.u8.u32 {match['d']}, codes;",
        ".b32 result",
        "b12x_cvt_e2m1x2_f32",
        [match["a"], match["b"]],
        " .reg .b32 codes;",
    )


def _from_e2m1x2(match: re.Match[str], kernel: _Kernel) -> str:
    _refuse_predicate(match)
    return _call(
        f"ld.param.b32 {match['d']}, [result];",
        ".b32 result",
        "b12x_cvt_f16x2_e2m1x2",
        ["codes"],
        f" .reg .b32 codes; cvt.u32.u8 codes, {match['a']};",
    )


def _tensor_load(match: re.Match[str], kernel: _Kernel) -> str | None:
    """Elements of 4 bits in pairs: half the first coordinate, from a map that ``loader.c`` rewrites to bytes."""
    parameter = kernel.map_of_register.get(match["map"])
    if parameter is None:
        raise UnknownInstructionError(f"{match['opcode']} through {match['map']}, which holds no parameter's address")
    if parameter not in kernel.entry.fp4_maps:
        return None
    first, rest = match["coordinates"].split(",", 1)
    load = f"{match['predicate'] or ''}{match['opcode']} {match['target']}, [{match['map']}, {{pair,{rest}}}], {match['rest']};"
    return f"{{ .reg .b32 pair; shr.s32 pair, {first.strip()}, 1;\n\t{load} }}"


def _pairs_of_float32(match: re.Match[str], kernel: _Kernel) -> str:
    """Two instructions, with the rounding of the one."""
    operation, names = match["opcode"].removesuffix("x2"), "xyz"
    operands = re.split(r",\s*", match["operands"].strip())
    given = "".join(f" mov.b64 {{{name}0, {name}1}}, {operand};" for name, operand in zip(names, operands, strict=False))
    each = "".join(f" {operation} d{i}, {', '.join(f'{name}{i}' for name in names[: len(operands)])};" for i in range(2))
    predicate = match["predicate"] or ""
    return f"{{ .reg .f32 d<2>, x<2>, y<2>, z<2>;{given}{each} {predicate}mov.b64 {match['d']}, {{d0, d1}}; }}"


def _of_16_bits(match: re.Match[str], kernel: _Kernel) -> str:
    """Operands of 16 bits are widened, which is exact."""
    operation, _, kind = match["opcode"].rpartition(".")
    *narrow, last = re.split(r",\s*", match["operands"].strip())
    wide = "".join(f" cvt.f32.{kind} wide{i}, {operand};" for i, operand in enumerate(narrow))
    operands = ", ".join([*(f"wide{i}" for i in range(len(narrow))), last])
    return f"{{ .reg .f32 wide<2>;{wide} {match['predicate'] or ''}{operation} {match['d']}, {operands}; }}"


def _largest_of_three(match: re.Match[str], kernel: _Kernel) -> str:
    """Two at a time: the order changes nothing, nor does a NaN."""
    predicate, opcode = match["predicate"] or "", match["opcode"]
    inner = f"{opcode} two, {match['b']}, {match['c']};"
    return f"{{ .reg .f32 two; {inner} {predicate}{opcode} {match['d']}, {match['a']}, two; }}"


def _nothing(match: re.Match[str], kernel: _Kernel) -> str:
    """A hint: ptxas ignores it in code with calls, after a minute of inlining them."""
    return ""


def _block_scaled(kind: str, scale_vec: str, shape: str, element: str, scale: str) -> str:
    """As PTX ISA has the modifiers, and as Triton has them."""
    kind, shape = rf"kind::{kind}\.block_scale\.scale_vec::{scale_vec}", rf"{shape}\.row\.col"
    return rf"mma\.sync\.aligned\.(?:{kind}\.{shape}|{shape}\.{kind})\.f32\.{element}\.{element}\.f32\.{scale}"


_REGISTER = r"[%\w]+"
RULES = (
    Rule(
        "block-scaled FP4 mma",
        _block_scaled("mxf4nvf4", "4X", "m16n8k64", "e2m1", "ue4m3"),
        r"(?P<groups>\{[^;]*\})",
        _mma,
        "PTX ISA 9.0, 9.7.14.3 (block scaling) and 9.7.14.5.15 (m16n8k64 fragments); sm_120a and later",
    ),
    Rule(
        "block-scaled E4M3 mma",
        _block_scaled("mxf8f6f4", "1X", "m16n8k32", "e4m3", "ue8m0"),
        r"(?P<groups>\{[^;]*\})",
        _mma,
        "PTX ISA 9.0, 9.7.14.3 (block scaling) and 9.7.14.5.10 (m16n8k32 fragments); sm_120a and later",
    ),
    Rule(
        "pairs of float32",
        r"(?:add|sub|mul|fma)(?:\.rn)?(?:\.ftz)?\.f32x2",
        r"(?P<d>%rd\d+),\s*(?P<operands>%rd\d+(?:,\s*%rd\d+){1,2})",
        _pairs_of_float32,
        "PTX ISA 9.0, 9.7.3 (add, sub, mul and fma of f32x2); sm_100 and later",
    ),
    Rule(
        "float32 to E2M1",
        r"cvt\.rn\.satfinite\.e2m1x2\.f32",
        rf"(?P<d>{_REGISTER}),\s*(?P<a>{_REGISTER}),\s*(?P<b>{_REGISTER})",
        _to_e2m1x2,
        "PTX ISA 9.0, 9.7.9.21 (cvt); sm_100a and later",
    ),
    Rule(
        "E2M1 to float16",
        r"cvt\.rn\.f16x2\.e2m1x2",
        rf"(?P<d>{_REGISTER}),\s*(?P<a>{_REGISTER})",
        _from_e2m1x2,
        "PTX ISA 9.0, 9.7.9.21 (cvt); sm_100a and later",
    ),
    Rule(
        "bulk tensor load of 4-bit elements",
        r"cp\.async\.bulk\.tensor\.\dd\.shared::cta\.global\.tile\.mbarrier::complete_tx::bytes(?:\.L2::cache_hint)?",
        r"(?P<target>\[[^\]]*\]),\s*\[(?P<map>%rd\d+),\s*\{(?P<coordinates>[^}]*)\}\],\s*(?P<rest>[^;]*)",
        _tensor_load,
        "PTX ISA 9.0, 5.5 (tensors, sub-byte types); CUDA driver API, CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B needs sm_100",
    ),
    Rule(
        "float32 and 16 bits",
        r"(?:add|sub|fma)(?:\.r[nzmp])?(?:\.sat)?\.f32\.b?f16",
        rf"(?P<d>{_REGISTER}),\s*(?P<operands>{_REGISTER}(?:,\s*{_REGISTER}){{1,2}})",
        _of_16_bits,
        "PTX ISA 9.0, 9.7.5 (mixed precision add, sub and fma); sm_100 and later",
    ),
    Rule(
        "largest of three",
        r"(?:max|min)(?:\.ftz)?(?:\.NaN)?\.f32",
        ",\\s*".join(rf"(?P<{name}>{_REGISTER})" for name in "dabc"),
        _largest_of_three,
        "PTX ISA 9.0, 9.7.3.11 and 9.7.3.12 (min and max of three); sm_100 and later",
    ),
    Rule(
        "register count", r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32", r"\d+", _nothing, "PTX ISA 9.0, 9.7.19.5; ptxas C7508"
    ),
)

_KEPT = re.compile(
    r"mma\.sync\.aligned\.m16n8k(?:8|16)\.row\.col\.f32\.(?:bf16\.bf16|f16\.f16)\.f32"
    r"|(?:abs|add|and|atom|bar|barrier|bfe|bfi|bfind|bra|brev|call|copysign|cp|createpolicy|cvt|cvta|div|elect|ex2|exit|fence|fma|griddepcontrol|ld|ldmatrix|lg2|lop3|mad|match|max|mbarrier"
    r"|membar|min|mov|mul|nanosleep|neg|not|or|popc|prefetch|prefetchu|prmt|rcp|red|redux|rem|ret|rsqrt|selp|set|setp|shfl|shl|shr|sqrt|st|stmatrix|sub|tanh|trap"
    r"|vote|xor)"
    r"(?:\.(?:[usb](?:8|16|32|64|128)|[su]16x2|f(?:16|32|64)|f16x2|bf16|bf16x2|e4m3x2|pred|r[nzmp]i?|approx|ftz|noftz|satfinite|sat|full|wide|lo|hi|nc|v[248]"
    r"|param|global|shared|local|const|shared::cta|to|uni|sync|aligned|arrive|red|idx|bfly|up|down|all|any|ballot|warp|gl|cta|sys|gpu|cluster"
    r"|acquire|release|relaxed|volatile|acq_rel|sc|proxy|async|alias|tensormap|mbarrier_init|init|inval|try_wait|test_wait|parity|expect_tx"
    r"|complete_tx|noComplete|bulk|tensor|[1-5]d|tile|mbarrier::complete_tx::bytes|L2::cache_hint|commit_group|wait_group|read"
    r"|m8n8|x[124]|trans|b16|eq|ne|lt|le|gt|ge|ltu|leu|gtu|geu|equ|neu|num|nan|ls|hs|and|or|xor|add|min|max|exch|cas|inc|dec|cg|ca|L1::no_allocate"
    r"|L2|fractional|L2::evict_last|L2::evict_first|launch_dependents|wait|shiftamt|u8|s8|L1::evict_last|L1::evict_first|L2::128B|L2::256B))*"
)
"""Whole opcodes that mean the same on ``sm_90a`` and ``sm_120a``, from mnemonics and modifiers that older targets know."""

_INSTRUCTION = re.compile(r"(?:^|[;{}])[ \t]*(?:@!?%?\w+[ \t]+)?([a-z][\w.:]*)", re.M)
_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\n\)", re.S)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.[a-z](?P<bits>\d+)\s+\w+?_param_\d+(?:\[(?P<length>\d+)\])?"
)
_ADDRESS = re.compile(r"(?:mov\.b64|mov\.u64|cvta\.param\.u64)\s+(%rd\d+),\s*(%rd\d+|\w+_param_(\d+));")
_TENSOR_MAP_SIZE, _TENSOR_MAP_ALIGNMENT = 128, 64
_FP4_MAPS = (0, 2, 4)
"""Of the six tensor maps of a kernel, in parameter order activations, weights of FC1, weights of FC2, each before its
scales (``moe_static_kernel.py``, ``moe_micro_kernel.py``, ``_moe_dynamic``).  ``loader.c`` refuses a launch whose
maps disagree."""


def translate(ptx: str, device_functions: str, *, stagger: bool = False) -> Translation:
    """Translate a module.

    Args:
        ptx: as ``CUTE_DSL_KEEP_PTX`` keeps it, Triton hands it to ptxas, or NVRTC returns it.
        device_functions: ``instructions.cu`` in PTX for ``sm_90a``; left out where nothing calls them.
        stagger: let every warp sleep at random behind each barrier.

    Raises:
        UnknownInstructionError: an instruction, or an instance of one, that no rule knows.
    """
    refuse_unknown(ptx)
    counts = dict.fromkeys((rule.name for rule in RULES), 0)
    starts = [match.start() for match in _ENTRY.finditer(ptx)]
    parts, entries = [ptx[: starts[0]] if starts else ptx], []
    for start, end in zip(starts, [*starts[1:], len(ptx)], strict=True):
        text = ptx[start:end]
        kernel = _Kernel(_entry(text), _map_registers(text))
        for rule in RULES:

            def apply(match: re.Match[str], rule: Rule = rule, kernel: _Kernel = kernel) -> str:
                replaced = rule.replace(match, kernel)
                counts[rule.name] += replaced is not None
                return match[0] if replaced is None else replaced

            text = rule.pattern.sub(apply, text)
        _check_byte_ids(text, kernel.byte_ids)
        parts.append(text)
        entries.append(kernel.entry)
    result = "".join(parts)
    if stagger:
        result = re.sub(r"^[ \t]*bar\.sync[^;]*;", r"\g<0>\n\tcall.uni b12x_stagger;", result, flags=re.M)
    _refuse_leftovers(result)
    result = re.sub(r"\.version \S+", f".version {ISA_VERSION}", result, count=1)
    result, targets = re.subn(r"\.target sm_12\da", ".target sm_90a", result, count=1)
    if not targets:
        raise UnknownInstructionError("the module's target is not sm_120a or sm_121a")
    head, size, body = result.partition(".address_size 64")
    functions = device_functions.partition(".address_size 64")[2] if "call.uni" in body else ""
    return Translation(f"{head}{size}\n{functions}\n{body}", tuple(entries), counts)


def refuse_unknown(ptx: str) -> None:
    """Raise :class:`UnknownInstructionError` for the first opcode that is neither kept nor replaced."""
    replaced = re.compile("|".join(rule.opcode for rule in RULES))
    for opcode in sorted(opcodes(ptx)):
        if not _KEPT.fullmatch(opcode) and not replaced.fullmatch(opcode):
            raise UnknownInstructionError(f"no rule for {opcode}")


def opcodes(ptx: str) -> set[str]:
    """Every opcode with its modifiers; labels, directives and names of operands are none."""
    text = re.sub(r"//[^\n]*", "", ptx)
    found = {match[1] for match in _INSTRUCTION.finditer(text)}
    return {name for name in found if not name.endswith(":") and ("." in name or name in ("ret", "exit", "trap", "bra"))}


def _entry(text: str) -> Entry:
    match = _ENTRY.match(text)
    assert match is not None
    parameters = list(_PARAMETER.finditer(match[2]))
    sizes = tuple(int(p["length"] or int(p["bits"]) // 8) for p in parameters)
    aligned = (int(p["align"] or 0) >= _TENSOR_MAP_ALIGNMENT for p in parameters)
    maps = [index for index, (size, fits) in enumerate(zip(sizes, aligned, strict=True)) if fits and size == _TENSOR_MAP_SIZE]
    if len(maps) not in (0, 6):
        raise UnknownInstructionError(f"{match[1]} has {len(maps)} tensor maps, not six")
    return Entry(match[1], sizes, tuple(maps[rank] for rank in _FP4_MAPS) if maps else ())


def _map_registers(text: str) -> dict[str, int]:
    """Follow parameter addresses through moves, in program order."""
    found: dict[str, int] = {}
    for match in _ADDRESS.finditer(text):
        parameter = int(match[3]) if match[3] else found.get(match[2])
        if parameter is None:
            continue
        if found.setdefault(match[1], parameter) != parameter:
            raise UnknownInstructionError(f"{match[1]} holds the addresses of two parameters")
    return found


def _check_byte_ids(text: str, registers: set[str]) -> None:
    """``scale_vec::4X`` allows byte selector 0 alone; a register must be set to 0 wherever it is set."""
    for register in registers - {"0"}:
        written = re.findall(rf"^\s*(\S+)\s+{re.escape(register)},\s*([^;]*);", text, re.M)
        if set(written) != {("mov.b16", "0")}:
            raise UnknownInstructionError(f"a scale's byte selector {register} that is not 0")


def _refuse_leftovers(ptx: str) -> None:
    """An operand form that a rule's opcode has and its pattern does not."""
    for opcode in opcodes(ptx):
        mixed = opcode.startswith(("add.", "sub.", "fma.")) and opcode.endswith((".f32.bf16", ".f32.f16"))
        if "e2m1" in opcode or "kind::" in opcode or opcode.endswith("f32x2") or mixed:
            raise UnknownInstructionError(f"no rule for this form of {opcode}")
