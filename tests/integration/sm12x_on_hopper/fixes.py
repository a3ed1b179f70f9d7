"""FlashInfer 0.7.2.post1 with the defects that the bed found mended, as a copy of the installed package.

``python -m tests.integration.sm12x_on_hopper.fixes`` prints the patch.
"""

from __future__ import annotations

import difflib
import shutil
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path("fused_moe/cute_dsl/blackwell_sm12x")


@dataclass(frozen=True)
class Fix:
    """One line to insert behind the only line that holds ``behind``, indented like it."""

    file: Path
    behind: str
    inserted: str


MICRO_BARRIER = Fix(_FOLDER / "moe_micro_kernel.py", "own 64x64 quadrant", "self.epilog_sync_barrier.arrive_and_wait()")
DYNAMIC_CLAIM = tuple(
    Fix(_FOLDER / "_moe_dynamic" / name, "_ld_shared_i32(ctrl_base_addr + Int32(28))", "cute.arch.sync_threads()")
    for name in ("generic.py", "gated.py")
)
FIXES = (MICRO_BARRIER, *DYNAMIC_CLAIM)


def apply(fix: Fix, package: Path) -> str:
    """Mend the file below ``package`` and return the change as a patch.

    Raises:
        ValueError: the place is not there, or is there twice: another version of FlashInfer.
    """
    path = package / fix.file
    old = path.read_text()
    lines = old.splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if fix.behind in line]
    if len(places) != 1:
        raise ValueError(f"{path} holds the place {len(places)} times, not once")
    line = lines[places[0]]
    indent = line[: len(line) - len(line.lstrip())]
    new = "".join([*lines[: places[0] + 1], f"{indent}{fix.inserted}\n", *lines[places[0] + 1 :]])
    path.write_text(new)
    name = Path("flashinfer") / fix.file
    before, after = (text.splitlines(keepends=True) for text in (old, new))
    return "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))


def mended_copy(folder: Path) -> Path:
    """A copy of the installed FlashInfer with every fix; put the returned folder first on ``PYTHONPATH``."""
    import flashinfer

    source = Path(flashinfer.__file__).parent
    shutil.copytree(
        source, folder / "flashinfer", ignore=shutil.ignore_patterns("__pycache__", "*.cu", "*.cuh"), dirs_exist_ok=True
    )
    for fix in FIXES:
        apply(fix, folder / "flashinfer")
    return folder


if __name__ == "__main__":
    import tempfile

    import flashinfer

    with tempfile.TemporaryDirectory() as directory:
        for fix in FIXES:
            source = Path(flashinfer.__file__).parent / fix.file
            (Path(directory) / fix.file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, Path(directory) / fix.file)
            print(apply(fix, Path(directory)), end="")
