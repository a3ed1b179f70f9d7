"""Probes against real programs and real package layouts made for the test: no GPU, no network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from trtllm_b12x import environment
from trtllm_b12x.decision import PayloadFault


def program(directory: Path, name: str, text: str) -> None:
    directory.mkdir(exist_ok=True)
    file = directory / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    file.chmod(0o755)


SMI = "0, GPU-aaaa, 12.0\n1, GPU-bbbb, 12.1\n2, GPU-cccc, 9.0"


@pytest.mark.parametrize(
    ("visible", "order", "expected"),
    [
        (None, None, 120),
        ("", None, 0),
        ("-1", None, 0),
        ("GPU-cc", None, 90),
        ("1,0", "PCI_BUS_ID", 121),
        ("2", "PCI_BUS_ID", 90),
        ("1", None, None),  # CUDA may number them otherwise
        ("7", "PCI_BUS_ID", 0),
        ("MIG-aaaa", None, None),  # an instance of one of them
    ],
)
def test_first_visible_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, order: str | None, expected: int | None
) -> None:
    program(tmp_path / "bin", "nvidia-smi", SMI)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert environment.gpu_sm() == expected


@pytest.mark.parametrize("visible", ["1", "MIG-aaaa"])
def test_equal_gpus_need_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    program(tmp_path / "bin", "nvidia-smi", "0, GPU-a, 12.0\n1, GPU-b, 12.0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.gpu_sm() == 120


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed", "0, GPU-a, [N/A]"])
def test_no_usable_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    program(tmp_path / "bin", "nvidia-smi", text)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment.gpu_sm() == 0
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "_DRIVER_DEVICE", tmp_path / "nvidiactl")
    assert environment.gpu_sm() == 0
    (tmp_path / "nvidiactl").touch()
    assert environment.gpu_sm() is None


def test_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "nvidia-smi", "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0  |")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert environment.driver_cuda() == (13, 0)


def test_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "nvcc", "Cuda compilation tools, release 12.9, V12.9.86")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert environment.toolkit_cuda() == (12, 9)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for line, expected in (("cuda: Optional[str] = '13.0'", (13, 0)), ("cuda: Optional[str] = None", (0, 0))):
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\n")
        code = f"from trtllm_b12x import environment; assert environment.toolkit_cuda() == {expected}"
        python_path = f"{tmp_path}:{Path(__file__).parents[2]}"
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": python_path})


WRAPPER = """
class B12xMoEWrapper:
    def __init__(self, num_experts, *, shared_static_workspace=None): ...
    def run(self, x, *, w1_alpha, input_global_scale=None): ...
"""


@pytest.mark.parametrize(
    ("version", "wrapper", "dispatch", "expected"),
    [
        ("0.6.0", "", "", (False, False, False, False, 128)),
        (
            "0.6.16",
            WRAPPER.replace(", input_global_scale=None", "").replace("shared_static_workspace", "x"),
            "",
            (True, False, False, False, 128),
        ),
        ("0.6.18.post1", WRAPPER.replace("shared_static_workspace", "x"), "", (True, True, False, False, 128)),
        ("0.7.0", WRAPPER, "_STATIC_RETAINED_GROUP_N = 256", (True, True, True, False, 256)),
        ("0.7.2.post1", WRAPPER, "_STATIC_RETAINED_GROUP_N = 256", (True, True, True, True, 256)),
        ("0.7.2", "class B12xMoEWrapper: (", "", (False, False, False, False, 128)),
    ],
)
def test_flashinfer_is_read_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, wrapper: str, dispatch: str, expected: tuple[Any, ...]
) -> None:
    package = tmp_path / "flashinfer"
    (package / "fused_moe/cute_dsl/blackwell_sm12x").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "fused_moe/cute_dsl/b12x_moe.py").write_text(wrapper)
    (package / "fused_moe/cute_dsl/blackwell_sm12x/moe_dispatch.py").write_text(dispatch)
    distribution(tmp_path, "flashinfer-python", version, [])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)  # another test may have imported the real one
    found = environment.inspect_flashinfer()
    assert found.version == version
    assert (found.b12x, found.exact_scales, found.shared_workspaces, found.negative_ids, found.tile) == expected


def distribution(site: Path, name: str, version: str, files: list[Path], hashes: dict[Path, str] | None = None) -> None:
    """A dist-info whose RECORD holds the files' hashes as they are now, or those given."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    rows = [f"{file.relative_to(site)},{(hashes or {}).get(file) or environment._hash(file)},1" for file in files]
    (info / "RECORD").write_text("\n".join(rows) + "\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Site packages of an environment whose CuTe DSL says CUDA 12.9 and counts how often it is imported."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "filelock").symlink_to(Path(filelock.__file__).parent)
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
print(json.dumps([found.version, found.cuda, found.fault and found.fault.name, found.detail]))
"""


def process(site: Path, code: str, **variables: str) -> subprocess.Popen[str]:
    """Python in that environment, as a rank of a server would run it."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRTLLM")}
    settings = {"XDG_CACHE_HOME": str(home(site) / "cache"), **variables}
    python = home(site) / "env" / "bin" / "python"
    return subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True, env={**inherited, **settings})


def home(site: Path) -> Path:
    return site.parents[3]


def payload(site: Path, times: int = 1, **variables: str) -> dict[str, Any]:
    """``inspect_payload``, by that many processes at once."""
    processes = [process(site, REPORT, **variables) for _ in range(times)]
    answers = [json.loads(running.communicate(timeout=120)[0]) for running in processes]
    assert all(answer == answers[0] for answer in answers)
    return dict(zip(("version", "cuda", "fault", "detail"), answers[0], strict=True))


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


def test_shadowed_unknown_and_driver(site: Path) -> None:
    """Both wheels own the same file; the disk holds base's."""
    file = site / "cutlass/base_dsl/version_info.py"
    other = "sha256=" + hashlib.sha256(b"cu13").hexdigest()
    distribution(site, "nvidia-cutlass-dsl-libs-cu13", "4.5.0", [file], {file: other})
    assert payload(site)["fault"] == "SHADOWED"
    record = site / "nvidia_cutlass_dsl_libs_cu13-4.5.0.dist-info/RECORD"
    record.write_text(record.read_text().replace(other, environment._hash(file)))
    assert payload(site, PATH="/usr/bin:/bin")["fault"] == "UNKNOWN"
    program(home(site) / "bin", "nvidia-smi", "CUDA Version: 12.8 ")
    found = payload(site, PATH=f"{home(site) / 'bin'}:/usr/bin:/bin")
    assert (found["fault"], found["detail"]) == ("DRIVER", "the driver supports CUDA 12.8")


def test_what_the_dsl_prints_is_no_answer(site: Path) -> None:
    (site / "cutlass/__init__.py").write_text("import atexit; print('[1, 2]'); atexit.register(print, '[3, 4]')")
    assert payload(site)["cuda"] == [12, 9]


def test_the_look_has_no_mpi_rank_and_no_promotion(site: Path) -> None:
    statement = "import os; assert 'OMPI_COMM_WORLD_RANK' not in os.environ and os.environ['TRTLLM_B12X'] == '0'"
    (site / "cutlass/__init__.py").write_text(statement)
    assert payload(site, OMPI_COMM_WORLD_RANK="3")["cuda"] == [12, 9]


def test_where_it_is_imported_it_is_read(site: Path) -> None:
    running = process(site, "import cutlass" + REPORT.replace("found =", "environment._look_cached = None; found ="))
    assert json.loads(running.communicate(timeout=120)[0])[1] == [12, 9]
    assert imports(site) == 1


@pytest.mark.parametrize("compiles", [True, False])
def test_force_asks_for_a_proof_once(site: Path, compiles: bool) -> None:
    """The payload says 12.9: only a compile of the micro kernel outweighs that, and only if the user asked for it."""
    program(home(site) / "bin", "nvidia-smi", "0, GPU-a, 12.1")
    package = site / "flashinfer" / "fused_moe" / "cute_dsl"
    package.mkdir(parents=True)
    (site / "flashinfer" / "__init__.py").touch()
    (package / "b12x_moe.py").write_text(WRAPPER)
    distribution(site, "flashinfer-python", "0.6.17", [])
    code = f"""
from trtllm_b12x import environment as e
from trtllm_b12x.kernels import prove
def proof(target):
    open({str(home(site) / "proofs")!r}, 'a').write(target + ' ')
    return prove.Proof(target, {compiles})
prove.prove = proof
e.toolkit_cuda = lambda: (13, 0)
facts = e.probe()
print(facts.force, facts.compile_proved, e.decide(e.Problem(), environment=facts).served)
"""
    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    inputs = {"PATH": f"{home(site) / 'bin'}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "0"}
    for _ in range(2):
        running = process(site, code, TRTLLM_B12X="force", **inputs)
        assert running.communicate(timeout=120)[0].split() == ["True", str(compiles), str(compiles)]
    assert (home(site) / "proofs").read_text() == "sm_121a "
    assert process(site, code, **inputs).communicate(timeout=120)[0].split() == ["False", "None", "False"]


def test_another_card_starts_without_a_look(site: Path) -> None:
    program(home(site) / "bin", "nvidia-smi", "0, GPU-a, 9.0")
    code = "from trtllm_b12x import environment as e; f = e.probe(); print(f.sm, f.dsl, f.payload_cuda)"
    code += "; print(e.probe(True).payload_cuda)"
    running = process(site, code, PATH=f"{home(site) / 'bin'}:/usr/bin:/bin", CUDA_VISIBLE_DEVICES="0")
    assert running.communicate(timeout=120)[0].split("\n")[:2] == ["90 4.5.0 None", "(12, 9)"]
    assert imports(site) == 1


def test_no_dsl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert environment.inspect_payload() == environment.Payload()
    assert environment.inspect_flashinfer() == environment.FlashInfer()
