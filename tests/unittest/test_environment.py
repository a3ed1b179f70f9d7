"""Probes against real programs and real package layouts made for the test: no GPU, no network."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import filelock
import packaging
import pytest

from trtllm_b12x import environment
from trtllm_b12x.decision import PayloadFault
from trtllm_b12x.environment import answers as kept_answers
from trtllm_b12x.environment import cute_dsl, gpu, packages


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
    monkeypatch.setattr(gpu, "_DRIVER_DEVICE", tmp_path / "nvidiactl")
    assert environment.gpu_sm() == 0
    (tmp_path / "nvidiactl").touch()
    assert environment.gpu_sm() is None


def test_a_slow_nvidia_smi_is_not_a_machine_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without persistence mode takes its time to start; a program that fails says so at once."""
    file = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpu, "TIMEOUT_S", 0.3)
    for text, expected in (("exec sleep 5", None), ("exit 9", 0)):
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        assert environment.gpu_sm() == expected
        assert environment.driver_cuda() is None
        assert environment.cards() == []


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
        ("0.6.0", "", "", (False, False, False, 128)),
        (
            "0.6.16",
            WRAPPER.replace(", input_global_scale=None", ""),
            "",
            (True, False, False, 128),
        ),
        ("0.6.18.post1", WRAPPER, "", (True, True, False, 128)),
        ("0.7.0", WRAPPER, "_STATIC_RETAINED_GROUP_N = 256", (True, True, False, 256)),
        ("0.7.2.post1", WRAPPER, "_STATIC_RETAINED_GROUP_N = 256", (True, True, True, 256)),
        ("0.7.2", "class B12xMoEWrapper: (", "", (False, False, False, 128)),
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
    assert (found.b12x, found.exact_scales, found.negative_ids, found.tile) == expected


def distribution(site: Path, name: str, version: str, files: list[Path], hashes: dict[Path, str] | None = None) -> None:
    """A dist-info whose RECORD holds the files' hashes as they are now, or those given."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    rows = [
        f"{file.relative_to(site)},{(hashes or {}).get(file) or packages.digest(file)},{file.stat().st_size}" for file in files
    ]
    (info / "RECORD").write_text("\n".join(rows) + "\n")


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
fault = found.fault and found.fault.name
print(json.dumps([found.version, found.cuda, fault, found.detail, found.in_the_way, found.flashinfer_fault]))
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
    return dict(zip(("version", "cuda", "fault", "detail", "in_the_way", "flashinfer_fault"), answers[0], strict=True))


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
    assert (found["fault"], found["in_the_way"]) == ("FOREIGN", [])
    assert found["detail"] == f"{other}; rename it, or take its folder off PYTHONPATH"
    distribution(site, "cutlass", "0.0.1", [other])
    assert payload(site)["in_the_way"] == ["cutlass"]
    shutil.rmtree(other.parent)
    assert payload(site)["cuda"] == [12, 9]


def test_files_that_are_not_the_wheels(site: Path) -> None:
    """The payload says 13, but a library's tail is zeros, or a module was cut off."""
    (site / "cutlass/base_dsl/version_info.py").write_text("class CUDA_VERSION: major, minor = 13, 1\n")
    library, module = site / "cutlass/lib.so", site / "cutlass/ops.py"
    library.write_bytes(b"x" * 5000)
    module.write_text("a = 1\nb = 2\n")
    distribution(site, "nvidia-cutlass-dsl-libs-cu13", "4.5.0", [library, module])
    assert payload(site)["cuda"] == [13, 1]
    library.write_bytes(b"x" * 4000 + bytes(1000))
    found = payload(site)
    assert (found["cuda"], found["fault"], found["detail"]) == ([0, 0], "DAMAGED", str(library))
    library.write_bytes(b"x" * 5000)
    module.write_text("a = 1\n")
    assert payload(site)["detail"] == str(module)
    module.write_text("a = 1\nb = 2  # edited\n")
    assert payload(site)["cuda"] == [13, 1]


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


def test_shadowed_unknown_and_driver(site: Path) -> None:
    """Both wheels own the same file; the disk holds base's."""
    file = site / "cutlass/base_dsl/version_info.py"
    other = "sha256=" + hashlib.sha256(b"cu13").hexdigest()
    distribution(site, "nvidia-cutlass-dsl-libs-cu13", "4.5.0", [file], {file: other})
    assert payload(site)["fault"] == "SHADOWED"
    record = site / "nvidia_cutlass_dsl_libs_cu13-4.5.0.dist-info/RECORD"
    record.write_text(record.read_text().replace(other, packages.digest(file)))
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
    running = process(site, "import cutlass" + REPORT.replace("found =", "environment.cute_dsl._look_cached = None; found ="))
    assert json.loads(running.communicate(timeout=120)[0])[1] == [12, 9]
    assert imports(site) == 1


@pytest.mark.parametrize("compiles", [True, False])
def test_a_compile_that_passes_is_not_repeated(site: Path, compiles: bool) -> None:
    code = f"""
from trtllm_b12x import environment as e
from trtllm_b12x.environment import prove
def proof(target):
    open({str(home(site) / "proofs")!r}, 'a').write(target + ' ')
    return prove.Proof(target, {compiles}, "" if {compiles} else "ptxas fatal")
prove.prove = proof
print(e.compile_error("sm_121a"))
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


@pytest.mark.parametrize(
    ("given", "home_of_user", "expected"),
    [
        ("/some/where", "/root", "/some/where/trtllm_b12x"),
        ("rel", "/home/user", "/home/user/.cache/trtllm_b12x"),
        (None, "/home/user", "/home/user/.cache/trtllm_b12x"),
        (None, None, None),
        ("rel", None, None),
        (None, "rel", None),
    ],
)
def test_where_the_cache_lies(
    monkeypatch: pytest.MonkeyPatch, given: str | None, home_of_user: str | None, expected: str | None
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    if home_of_user is None:  # a container's UID without an entry in /etc/passwd
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    else:
        monkeypatch.setenv("HOME", home_of_user)
    assert kept_answers.directory() == (None if expected is None else Path(expected))
    if expected is None:
        assert kept_answers.once("question", lambda: "answer", bool) == ("answer", False)
        assert (kept_answers.contents(), kept_answers.clear()) == ([], 0)


def test_no_link_is_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who may write into a shared cache must not choose what we write over."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "trtllm_b12x"
    folder.mkdir()
    (folder / f"payload.json.{os.getpid()}").symlink_to(victim)
    assert kept_answers.once("question", lambda: [1], bool) == ([1], False)
    assert kept_answers.once("question", lambda: [2], bool) == ([1], True)
    assert victim.read_text() == "precious"


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where flock says ENOSYS, filelock up to 3.20 raises this (``filelock/_unix.py``)."""

    def acquire(self: filelock.BaseFileLock, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock; use SoftFileLock instead")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(filelock.BaseFileLock, "acquire", acquire)
    assert kept_answers.once("question", lambda: "answer", bool) == ("answer", False)


def test_what_an_answer_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another FlashInfer, driver, search path or setting of FlashInfer's asks anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    keys = [cute_dsl.installation_key()]
    kernel = tmp_path / "flashinfer/cute_dsl/kernel.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("1")
    (tmp_path / "flashinfer/__init__.py").touch()
    distribution(tmp_path, "flashinfer-python", "0.7.2", [kernel])
    importlib.invalidate_caches()
    keys.append(cute_dsl.installation_key())
    kernel.write_text("23")
    keys.append(cute_dsl.installation_key())
    assert keys[-1] == cute_dsl.installation_key()
    for name in ("PYTHONPATH", "FLASHINFER_DISABLE_VERSION_CHECK", "CUTE_DSL_ARCH"):
        monkeypatch.setenv(name, "1")
        keys.append(cute_dsl.installation_key())
    monkeypatch.setattr(gpu, "driver_cuda", lambda: (13, 3))
    keys.append(cute_dsl.installation_key())
    assert len(set(keys)) == len(keys)


ENV_0_6_18 = "raise RuntimeError"
ENV_0_7_2 = 'logger.warning("Ignoring incompatible flashinfer-cubin package")'


@pytest.mark.parametrize(
    ("version", "source", "variables", "expected"),
    [
        ("0.6.18", ENV_0_6_18, {}, ("flashinfer-cubin 0.6.11", "flashinfer-jit-cache 0.6.11+cu130")),
        ("0.6.18", ENV_0_6_18, {"FLASHINFER_CUBIN_DIR": "/x"}, ("flashinfer-jit-cache 0.6.11+cu130",)),
        ("0.6.18", ENV_0_6_18, {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}, ()),
        ("0.6.11", ENV_0_6_18, {}, ()),
        ("0.7.2", ENV_0_7_2, {}, ()),
    ],
)
def test_kernel_wheels_of_another_version(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    source: str,
    variables: dict[str, str],
    expected: tuple[str, ...],
) -> None:
    (tmp_path / "flashinfer/jit").mkdir(parents=True)
    (tmp_path / "flashinfer/__init__.py").touch()
    (tmp_path / "flashinfer/_build_meta.py").write_text(f'"""Build."""\n__version__ = "{version}"\n')
    (tmp_path / "flashinfer/jit/env.py").write_text(source)
    distribution(tmp_path, "flashinfer-cubin", "0.6.11", [])
    distribution(tmp_path, "flashinfer-jit-cache", "0.6.11+cu130", [])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    for name in ("FLASHINFER_CUBIN_DIR", "FLASHINFER_DISABLE_VERSION_CHECK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.inspect_flashinfer().mismatched == expected


def test_the_copy_that_loads_and_what_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on the path before site-packages hides the installed one, whose metadata may be found first all the same."""
    for folder, version in (("first", "0.7.1"), ("second", "0.7.2")):
        package = tmp_path / folder / "flashinfer"
        kernels = package / "fused_moe/cute_dsl/blackwell_sm12x"
        kernels.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "_build_meta.py").write_text(f'__version__ = "{version}"\n')
        (kernels / "moe_static_kernel.py").write_text("a = 1\n" * 10)
    distribution(tmp_path / "second", "flashinfer-python", "0.7.2", [kernels / "moe_static_kernel.py"])
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "second"))
    assert environment.inspect_flashinfer().version == "0.7.2"
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    assert environment.inspect_flashinfer().version == "0.7.1"
    monkeypatch.setattr(sys, "path", sys.path[1:])
    for damage in (lambda: (kernels / "moe_static_kernel.py").write_text("a = 1\n"), (kernels / "moe_static_kernel.py").unlink):
        assert environment.inspect_flashinfer().fault == ""
        damage()
        assert environment.inspect_flashinfer().fault == f"missing or cut off: moe_static_kernel.py, in {kernels}"
        (kernels / "moe_static_kernel.py").write_text("a = 1\n" * 10)


def test_what_packages_require_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "asker-1.0.dist-info"
    info.mkdir()
    wants = ["pytest>=9999", "pytest>=1", "nobody-has-this<3", 'pytest>=9999; extra == "x"', "torch>=999a0"]
    lines = "".join(f"Requires-Dist: {want}\n" for want in wants)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: asker\nVersion: 1.0\n{lines}")
    monkeypatch.syspath_prepend(str(tmp_path))
    unmet, missing = packages.requirements(packages.installed(["asker", "nobody"]).values())
    torch = importlib.metadata.version("torch")  # a CUDA build says +cu130 in the module alone
    assert unmet == [f"pytest>=9999 ({pytest.__version__} is installed)", f"torch>=999a0 ({torch} is installed)"]
    assert missing == ["nobody-has-this<3"]


@pytest.mark.parametrize(
    ("dsl", "tvm_ffi", "met"), [("4.6.0", "0.1.9", False), ("4.6.0", "0.1.10", True), ("4.5.0", "0.1.6", True)]
)
def test_what_the_dsl_requires_and_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsl: str, tvm_ffi: str, met: bool
) -> None:
    for name, version in (("nvidia_cutlass_dsl", dsl), ("apache_tvm_ffi", tvm_ffi)):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = packages.installed(["nvidia-cutlass-dsl"]).values()
    assert packages.requirements(found) == ([] if met else [f"apache-tvm-ffi>=0.1.10 ({tvm_ffi} is installed)"], [])
    with (tmp_path / f"nvidia_cutlass_dsl-{dsl}.dist-info" / "METADATA").open("a") as metadata:
        metadata.write("Requires-Dist: apache-tvm-ffi>=0.1.11\n")
    assert packages.requirements(found) == ([f"apache-tvm-ffi>=0.1.11 ({tvm_ffi} is installed)"], [])  # told once


def test_no_dsl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)  # of another test of this process
    assert environment.inspect_payload() == environment.Payload()
    assert environment.inspect_flashinfer() == environment.FlashInfer()


POLICY = ("FLASHINFER_TOO_OLD", "REQUIREMENT", "DSL_PAYLOAD")
"""Reasons that refuse what compiles: releases whose kernels are known wrong, versions that packages exclude themselves, payloads
below CUDA 13 and files that are not their wheels'."""


def test_no_compile_refutes_what_was_said_of_real_environments() -> None:
    table = json.loads((Path(__file__).parents[1] / "integration/environments.json").read_text())
    assert table
    for name, row in table.items():
        assert row["compiles"] or not row["active"], name
        if row["compiles"] and not row["active"]:
            assert all(reason.startswith(POLICY) for reason in row["reasons"]), name
