# SPDX-License-Identifier: Apache-2.0
"""The look at the CuTe DSL, once per installation, in environments made for the test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from pathlib import Path
from typing import Any

import filelock
import packaging
import pytest

from tests.installations import distribution, program
from trtllm_b12x.decision import PayloadFault


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Site packages of an environment whose CuTe DSL says CUDA 12.9 and counts how often it is imported."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    for module in (filelock, packaging):
        (site / module.__name__).symlink_to(Path(str(module.__file__)).parent)
    (site / "ours.pth").write_text(str(Path(__file__).parents[2]))
    package = site / "cutlass" / "base_dsl"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('x')\n")
    (package / "__init__.py").touch()
    (package / "version_info.py").write_text("class CUDA_VERSION: major, minor = 12, 9\n")
    distribution(site, "nvidia-cutlass-dsl", "4.5.0", [])
    distribution(site, "nvidia-cutlass-dsl-libs-base", "4.5.0", sorted((site / "cutlass").rglob("*.py")))
    return site


REPORT = """
import json
from trtllm_b12x import environment
found = environment.inspect_payload()
fault = found.payload_fault and found.payload_fault.name
print(json.dumps([found.dsl, found.payload_cuda, fault, found.payload_detail, found.flashinfer_fault]))
"""


def process(site: Path, code: str, **variables: str) -> subprocess.Popen[str]:
    """Python in that environment, as a rank of a server would run it."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRTLLM")}
    settings = {"XDG_CACHE_HOME": str(home(site) / "cache"), **variables}
    settings["PYTHONDONTWRITEBYTECODE"] = "1"  # a .pyc outlives a source that is rewritten within a second
    python = home(site) / "env" / "bin" / "python"
    return subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True, env={**inherited, **settings})


def home(site: Path) -> Path:
    return site.parents[3]


def payload(site: Path, times: int = 1, **variables: str) -> dict[str, Any]:
    """``inspect_payload``, by that many processes at once."""
    processes = [process(site, REPORT, **variables) for _ in range(times)]
    answers = [json.loads(running.communicate(timeout=120)[0]) for running in processes]
    assert all(answer == answers[0] for answer in answers)
    return dict(zip(("version", "cuda", "fault", "detail", "flashinfer_fault"), answers[0], strict=True))


def imports(site: Path) -> int:
    file = home(site) / "imports"
    return len(file.read_text()) if file.exists() else 0


def test_one_look_per_installation_whoever_asks(site: Path) -> None:
    found = payload(site, times=4)
    assert (found["version"], found["cuda"], found["fault"]) == ("4.5.0", [12, 9], "CU13_MISSING")
    assert "libs-base 4.5.0" in found["detail"]
    assert imports(site) == 1
    assert payload(site) == found
    assert imports(site) == 1
    (site / "cutlass/base_dsl/version_info.py").write_text("class CUDA_VERSION: major, minor = 13, 1\n")
    assert payload(site)["cuda"] == [13, 1]
    assert imports(site) == 2


def test_a_damaged_or_unwritable_cache_costs_a_look_and_nothing_else(site: Path) -> None:
    first = payload(site)
    (home(site) / "cache/trtllm_b12x/payload.json").write_text("{")
    assert payload(site) == first
    (home(site) / "file").touch()
    assert payload(site, XDG_CACHE_HOME=str(home(site) / "file")) == first
    assert imports(site) == 3


@pytest.mark.parametrize(
    ("statement", "fault", "words"),
    [
        ("raise ImportError('libcute_dsl_runtime.so: cannot open')", PayloadFault.IMPORT, "libcute_dsl_runtime.so"),
        ("raise SystemExit(3)", PayloadFault.IMPORT, "status 3"),
        ("import os; os.kill(os.getpid(), 11)", PayloadFault.CRASH, "SIGSEGV"),
        ("import os; os.abort()", PayloadFault.CRASH, "SIGABRT"),
        ("import os; os._exit(0)", PayloadFault.CRASH, "without an answer"),
    ],
)
def test_an_import_that_fails_or_kills(site: Path, statement: str, fault: PayloadFault, words: str) -> None:
    (site / "cutlass/__init__.py").write_text(statement)
    found = payload(site)
    assert (found["cuda"], found["fault"]) == ([0, 0], fault.name)
    assert words in found["detail"]


@pytest.mark.parametrize("statement", ["raise ImportError('x')", "import os; os.kill(os.getpid(), 11)"])
def test_only_what_was_read_is_kept(site: Path, statement: str) -> None:
    """An import that fails today may work tomorrow, without a file of the wheels having changed."""
    init = site / "cutlass/__init__.py"
    good, marker = init.read_text(), home(site) / "fails"
    marker.touch()
    init.write_text(f"import os\nif os.path.exists({str(marker)!r}): {statement}\n{good}")
    assert payload(site)["cuda"] == [0, 0]
    assert not (home(site) / "cache/trtllm_b12x/payload.json").exists()
    marker.unlink()
    assert payload(site)["cuda"] == [12, 9]
    marker.touch()
    assert payload(site)["cuda"] == [12, 9]  # kept


@pytest.mark.parametrize("how", ["slow", "killed"])
def test_what_may_not_come_again_is_called_so(site: Path, how: str) -> None:
    statement = "import time; time.sleep(60)" if how == "slow" else "import os; os.kill(os.getpid(), 9)"
    (site / "cutlass/__init__.py").write_text(statement)
    found = json.loads(
        process(site, f"from trtllm_b12x.environment import cute_dsl; cute_dsl.PROBE_TIMEOUT_S = 1{REPORT}").communicate()[0]
    )
    assert found[1:3] == [[0, 0], "NO_ANSWER"]
    assert ("none within 1 s" if how == "slow" else "SIGKILL") in found[3]
    assert not (home(site) / "cache/trtllm_b12x/payload.json").exists()


def test_the_look_runs_nothing_of_the_working_directory(site: Path, tmp_path: Path) -> None:
    """A server is started anywhere: ``./json.py`` and ``./cutlass`` are not the installation's."""
    folder = tmp_path / "work"
    (folder / "cutlass").mkdir(parents=True)
    for file in ("json.py", "csv.py", "cutlass/__init__.py"):
        (folder / file).write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({file!r})\n")
    code = f"import os, sys; sys.path.remove(''); os.chdir({str(folder)!r}){REPORT}"
    assert json.loads(process(site, code).communicate()[0])[1] == [12, 9]
    assert not (tmp_path / "executed").exists()


def test_another_package_named_cutlass(site: Path, tmp_path: Path) -> None:
    """The CuTe DSL's own lies in a folder that comes later on the path, as with PyPI's ``cutlass`` beside DSL 4.5."""
    (site / "later").mkdir()
    (site / "cutlass").rename(site / "later/cutlass")
    (site / "later.pth").write_text(str(site / "later"))
    info = site / "nvidia_cutlass_dsl_libs_base-4.5.0.dist-info"
    (info / "RECORD").write_text((info / "RECORD").read_text().replace("cutlass/", "later/cutlass/"))
    assert payload(site)["cuda"] == [12, 9]
    other = site / "cutlass/__init__.py"
    other.parent.mkdir()
    other.touch()
    found = payload(site)
    assert (found["fault"], found["detail"].partition(";")[0]) == ("FOREIGN", str(other))
    shutil.rmtree(other.parent)
    assert payload(site)["cuda"] == [12, 9]


def test_flashinfers_import_is_tried_too(site: Path) -> None:
    package = site / "flashinfer/fused_moe/cute_dsl/blackwell_sm12x"
    package.mkdir(parents=True)
    for folder in (site / "flashinfer", *(site / "flashinfer").rglob("*/")):
        (folder / "__init__.py").touch()
    assert payload(site)["flashinfer_fault"] == ""  # as before b12x
    (package / "moe_dispatch.py").write_text("import triton_that_is_not_there\n")
    (site / "torch.py").write_text("class cuda:\n is_available = staticmethod(lambda: False)\n")
    found = payload(site)
    assert found["cuda"] == [12, 9]
    assert "No module named 'triton_that_is_not_there'" in found["flashinfer_fault"]
    (package / "moe_dispatch.py").write_text("import os; os.abort()\n")
    assert payload(site)["flashinfer_fault"].endswith("SIGABRT")
    (package / "moe_dispatch.py").write_text("")
    assert payload(site)["flashinfer_fault"] == ""
    assert json.loads((home(site) / "cache/trtllm_b12x/payload.json").read_text())


def test_what_a_driver_explains(site: Path) -> None:
    """Both wheels own the same file, as they wrote it."""
    distribution(site, "nvidia-cutlass-dsl-libs-cu13", "4.5.0", [site / "cutlass/base_dsl/version_info.py"])
    assert payload(site, PATH="/usr/bin:/bin")["fault"] == "UNKNOWN"
    program(home(site) / "bin", "nvidia-smi", "CUDA Version: 12.8 ")
    found = payload(site, PATH=f"{home(site) / 'bin'}:/usr/bin:/bin")
    assert (found["fault"], found["detail"]) == ("DRIVER", "the driver supports CUDA 12.8")


def test_the_look_has_no_mpi_rank_and_no_promotion_and_what_the_dsl_prints_is_no_answer(site: Path) -> None:
    statement = "import os; assert 'OMPI_COMM_WORLD_RANK' not in os.environ and os.environ['TRTLLM_B12X'] == '0'"
    statement += "\nimport atexit; print('[1, 2]'); atexit.register(print, '[3, 4]')"
    (site / "cutlass/__init__.py").write_text(statement)
    assert payload(site, OMPI_COMM_WORLD_RANK="3")["cuda"] == [12, 9]


def test_where_it_is_imported_it_is_read(site: Path) -> None:
    report = REPORT.replace("found =", "environment.cute_dsl._look_in_subprocess = None; found =")
    running = process(site, f"import cutlass{report}")
    assert json.loads(running.communicate(timeout=120)[0])[1] == [12, 9]
    assert imports(site) == 1


@pytest.mark.parametrize("compiles", [True, False])
def test_a_compile_that_passes_is_not_repeated(site: Path, compiles: bool) -> None:
    code = f"""
from trtllm_b12x.environment import prove
def proof(target):
    open({str(home(site) / "proofs")!r}, 'a').write(target + ' ')
    return prove.Proof(target, {compiles}, "" if {compiles} else "ptxas fatal")
prove.prove = proof
print(prove.compile_error("sm_121a"))
"""
    for _ in range(2):
        assert process(site, code).communicate(timeout=120)[0].strip() == ("" if compiles else "ptxas fatal")
    assert (home(site) / "proofs").read_text() == "sm_121a " * (1 if compiles else 2)


def test_another_card_starts_without_a_look(site: Path) -> None:
    program(home(site) / "bin", "nvidia-smi", "0, GPU-a, 9.0")
    code = "from trtllm_b12x import environment as e; f = e.probe(); print(f.sm, f.dsl, f.payload_cuda)"
    code += "; print(e.probe(always_look=True).payload_cuda)"
    running = process(site, code, PATH=f"{home(site) / 'bin'}:/usr/bin:/bin", CUDA_VISIBLE_DEVICES="0")
    assert running.communicate(timeout=120)[0].split("\n")[:2] == ["90 4.5.0 None", "(12, 9)"]
    assert imports(site) == 1
