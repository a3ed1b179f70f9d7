"""Promotion inside doubles of TensorRT-LLM, generation by generation, in processes of their own.

The doubles keep to the facts extracted from the public source (``tests/unittest/test_host_facts.py``).  The machine they run on
has an SM120 card and CUDA 13 as far as ``nvidia-smi`` and ``nvcc`` say; FlashInfer and the CuTe DSL are the real ones.  The
package is the wheel, installed in an environment of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import random_experts, write_checkpoint
from tests.hosts.build import build
from tests.hosts.extract import OLD_PACKAGE, PACKAGES
from trtllm_b12x.host.contract import GENERATIONS

ROOT = Path(__file__).parents[2]
OURS, HOSTS = "FlashInferNvfp4Sm12xFusedMoE", "CutlassFusedMoE"
EACH = "b12x,triton"
"""Families: gate and up with one scale are b12x's, with two Triton's."""
SUITE = [
    "tests/unittest/test_fused_moe.py",
    "tests/unittest/test_quantization.py",
    "tests/unittest/test_refit.py",
    "tests/unittest/test_faults.py",
    "tests/unittest/test_triton_layer.py",
    "tests/unittest/test_unequal_scales.py",
    "tests/unittest/test_triton_forms.py",
    "tests/integration/test_distributed.py",
]
KEYWORD_SUITE = [*SUITE, "tests/unittest/test_calls.py"]  # which calls run_moe by keywords

SMI = """#!/bin/sh
case "$*" in
  *compute_cap*) echo "0, GPU-aaaa, ${FAKE_COMPUTE_CAP:-12.0}" ;;
  *) echo "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |" ;;
esac
"""
NVCC = '#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.48"\n'


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="session")
def python(base: Path) -> Path:
    """An environment with the wheel of a clean copy of the sources, and everything else by reference; returns its interpreter."""
    shutil.copytree(ROOT / "trtllm_b12x", base / "clone" / "trtllm_b12x", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md", "trtllm_b12x.pth", "trtllm_b12x.start"):
        shutil.copy(ROOT / name, base / "clone")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(base / "wheel"), str(base / "clone")], check=True
    )
    (wheel,) = (base / "wheel").glob("*.whl")
    venv.create(base / "venv", with_pip=False, symlinks=True)
    interpreter = base / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(interpreter), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    # What is installed here, by reference: the folder, and the hooks of the CuTe DSL's wheels, but none of ours.
    parent = Path(sysconfig.get_path("purelib"))
    (site(interpreter) / "zz_parent.pth").write_text(f"{parent}\n")
    for hook in parent.glob("nvidia*.pth"):
        shutil.copy(hook, site(interpreter) / f"zzz_{hook.name}")
    (base / "sources").mkdir()
    shutil.copytree(ROOT / "tests", base / "sources" / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    return interpreter


@pytest.fixture
def own_python(python: Path, tmp_path: Path) -> Path:
    """An environment of the test's own, to be broken."""
    # Without what processes of other tests have compiled, or were compiling when they were ended.
    shutil.copytree(python.parents[1], tmp_path / "venv", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "venv" / "bin" / "python"


def site(interpreter: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([interpreter, "-c", code], check=True, capture_output=True, text=True).stdout.strip())


@pytest.fixture(scope="session")
def machine(base: Path) -> dict[str, str]:
    """Variables of a machine that has the card, without a host yet."""
    programs = base / "machine" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("nvidia-smi", SMI), ("nvcc", NVCC)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRTLLM", "CUDA", "PYTHON"))}
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = {"CUDA_HOME": str(base / "machine"), "LD_LIBRARY_PATH": f"{sys.prefix}/lib"}  # of the MPI wheel
    found["TRTLLM_B12X_KERNELS"] = "b12x"  # where a test does not say which families it is about
    return {**kept, **found, "PATH": path, "XDG_CACHE_HOME": str(base / "cache")}


@pytest.fixture(scope="session", params=GENERATIONS)
def double(request: pytest.FixtureRequest, base: Path, machine: dict[str, str]) -> Iterator[dict[str, str]]:
    """Variables of a machine that has the card and this generation's double."""
    folder = build(request.param, base / "doubles" / request.param)
    yield {**machine, "PYTHONPATH": f"{folder}:{base / 'sources'}", "GENERATION": request.param}
    server = _servers.pop(request.param, None)
    if server is not None:
        server.communicate()


STARTS = {"before_import", "spawned", "mpi_worker"}
"""Scenarios about how a process starts, each in an interpreter of its own; others are forked from one that has imported torch."""
_servers: dict[str, subprocess.Popen[str]] = {}


def scenario(python: Path, variables: dict[str, str], name: str, *arguments: str, **more: str) -> dict[str, Any]:
    command = [str(python), "-m", "tests.hosts.scenarios"]
    directory = Path(variables["XDG_CACHE_HOME"]).parent  # not the checkout: it would be imported
    environment = {**variables, **more}
    if name in STARTS or "TRTLLM_B12X" in more or "GENERATION" not in variables:
        code, output, errors = _alone([*command, name, *arguments], environment, directory)
    else:
        generation = variables["GENERATION"]
        if generation not in _servers:
            _servers[generation] = subprocess.Popen(
                [*command, "serve"], env=variables, cwd=directory, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        requests, answers = _servers[generation].stdin, _servers[generation].stdout
        assert requests is not None
        assert answers is not None
        files = [directory / f"{generation}.{stream}" for stream in ("out", "err")]
        request = {"arguments": [name, *arguments], "environment": environment, "files": [str(file) for file in files]}
        print(json.dumps(request), file=requests, flush=True)
        code = int(answers.readline())
        output, errors = (file.read_text() for file in files)
    assert code == 0, output + errors
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {**answer, "stderr": errors}


def _alone(command: list[str], environment: dict[str, str], directory: Path) -> tuple[int, str, str]:
    """In a session that ends with it: where a worker dies, MPICH kills the process group of whoever spawned it, not pytest's."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, cwd=directory, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output, errors


TIMINGS = ["before_import", "after_import", "by_itself", "spawned", "mpi_worker"]


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("verdict", ["yes", "no"])
def test_a_model_is_promoted_or_not(python: Path, double: dict[str, str], verdict: str, timing: str) -> None:
    result = scenario(python, double, timing, FAKE_COMPUTE_CAP="12.1" if verdict == "yes" else "9.0", DOUBLE_SM="121")
    assert result["generation"] == double["GENERATION"]
    assert result["finite"]
    assert result["built_once"]  # nothing of ours touches tensors that have no storage yet
    assert result["wrappers"] == ["ConfigurableMoE"] * 3
    if verdict == "no":
        assert result["backends"] == [HOSTS] * 3
        assert not result["log"]
        assert result["promoted"] == 0
        return
    # The third lost its quantization after it was built: ours by name, the host's to the letter.  C2 binds late enough.
    assert result["backends"] == [OURS, OURS, HOSTS if double["GENERATION"] == "C2" else OURS]
    assert result["methods"] == ["NVFP4Sm12xFusedMoEMethod"] * 2 + ["UnquantizedFusedMoEMethod"]
    assert result["kernels"] == [True, True, False]
    assert (result["promoted"], result["layers"]) == (2, 3)
    assert [line for line in result["log"] if "MoE layers on b12x" in line] == [
        "rank 0: 2 of 3 MoE layers on b12x, decode below 64 tokens (NVFP4)"
    ]
    expected = {"create_moe.create_moe_backend", "AutoTuner._find_nearest_profile"}
    if double["GENERATION"].startswith("C"):
        expected |= {"create_moe.resolve_moe_cls", "moe_resolution.resolve_moe_cls"}
    else:
        expected.add("create_moe.get_moe_cls")
    assert {".".join(name.split(".")[-2:]) for name in result["patches"]} == expected


@pytest.mark.parametrize("timing", ["before_import", "by_itself", "mpi_worker"])
def test_on_stock_pins_decode_runs_on_triton(python: Path, double: dict[str, str], tmp_path: Path, timing: str) -> None:
    """FlashInfer is 1.2's, as far as its metadata and sources say."""
    stock = tmp_path / "stock"
    for file, text in {
        "flashinfer/__init__.py": "",
        "flashinfer/_build_meta.py": '__version__ = "0.6.0"\n',
        "flashinfer_python-0.6.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.0\n",
    }.items():
        (stock / file).parent.mkdir(parents=True, exist_ok=True)
        (stock / file).write_text(text)
    others = {name: value for name, value in double.items() if name not in ("GENERATION", "TRTLLM_B12X_KERNELS")}
    result = scenario(python, {**others, "PYTHONPATH": f"{stock}:{double['PYTHONPATH']}"}, timing)
    assert result["generation"] == double["GENERATION"]
    assert result["backends"][:2] == [OURS] * 2
    assert result["kernels"] == [True, True, False]
    assert result["finite"]
    assert (result["promoted"], result["families"]) == (2, {"triton": 2})
    assert result["log"].count("rank 0: 2 of 3 MoE layers on triton, decode below 64 tokens (NVFP4)") == 1
    (line,) = (line for line in result["log"] if "is served by triton, not by b12x" in line)
    assert "FLASHINFER_TOO_OLD: flashinfer-python 0.6.0 is older than 0.6.18" in line
    assert 'pip install "flashinfer-python>=0.7.2,<0.8"' in line
    assert all("QUANTIZATION" in line for line in result["warnings"])  # of the third layer


def test_the_line_is_seen(python: Path, double: dict[str, str]) -> None:
    result = scenario(python, double, "unheard")
    line = "[trtllm_b12x] [INFO] rank 0: 2 of 3 MoE layers on b12x, decode below 64 tokens (NVFP4)"
    assert result["stderr"].splitlines().count(line) == 1
    result = scenario(python, double, "unheard", TRTLLM_B12X_LOG="ERROR")
    assert "[trtllm_b12x]" not in result["stderr"]


def test_threads_failures_and_pipeline_ranks(python: Path, double: dict[str, str]) -> None:
    result = scenario(python, double, "unusual")
    assert result["gate"] in ([], [OURS, OURS])
    assert result["threads"] == {f"torch.bfloat16 {OURS}": 60, f"torch.float16 {HOSTS}": 60}
    assert result["left"] == 0
    assert len(result["explained"]) == (24 if double["GENERATION"].startswith("C") else 48)
    for config, said, became in result["explained"]:
        assert said == became, config
    assert result["failed"] == HOSTS
    assert result["stderr"].count("promotion is off in this process") == 1


@pytest.mark.parametrize("form", ["loaded", "transformed"])
def test_parameters_from_a_peer(python: Path, double: dict[str, str], form: str) -> None:
    """Since late 1.3, in the form that was derived of them since C1; gate and up with one scale, and with two."""
    if double["GENERATION"] in (("A",) if form == "loaded" else ("A", "B")):
        return
    found = scenario(python, double, "from_a_peer", form, TRTLLM_B12X_KERNELS=EACH)
    assert found["equal"] == {ratio: [True, True] for ratio in ("1.0", "0.4", "3.0")}


def test_groups(python: Path, double: dict[str, str]) -> None:
    if double["GENERATION"].startswith("C"):  # earlier hosts have no such stream
        assert scenario(python, double, "in_groups", TRTLLM_B12X_KERNELS=EACH)["equal"]


def test_buckets_in_any_order(python: Path, double: dict[str, str]) -> None:
    """Hosts of 1.2 refuse parts, with us as without."""
    answer = scenario(python, double, "in_buckets", "yes", TRTLLM_B12X_KERNELS=EACH)
    if double["GENERATION"] == "A":
        assert answer["error"] == scenario(python, double, "in_buckets", "no")["error"]
    else:
        assert answer["equal"] == [True] * 6


def test_fused_gate_and_up(python: Path, double: dict[str, str]) -> None:
    assert scenario(python, double, "fused_gate_up")["equal"]


@pytest.mark.parametrize("switch", ["0", "1"])
def test_without_configurable_moe_or_with_it(python: Path, double: dict[str, str], switch: str) -> None:
    """Generations A and B can do without the wrapper; later ones read no such switch."""
    result = scenario(python, double, "by_itself", ENABLE_CONFIGURABLE_MOE=switch)
    wrapped = switch == "1" or double["GENERATION"].startswith("C")
    assert result["wrappers"] == ["ConfigurableMoE" if wrapped else OURS] * 3
    assert result["backends"][:2] == [OURS] * 2
    assert result["kernels"] == [True, True, False]


def test_the_off_switch(python: Path, double: dict[str, str]) -> None:
    result = scenario(python, double, "by_itself", TRTLLM_B12X="0")
    assert result["backends"] == [HOSTS] * 3
    assert result["patches"] == []
    assert result["log"] == []
    result = scenario(python, double, "after_import", TRTLLM_B12X="0")
    assert (result["backends"], result["patches"]) == ([HOSTS] * 3, [])


def test_a_load_balancer_keeps_the_hosts_class(python: Path, double: dict[str, str]) -> None:
    result = scenario(python, double, "balanced")
    assert (result["backend"], result["method"]) == (HOSTS, "NVFP4CutlassFusedMoEMethod")
    assert result["reasons"] == {"LOAD_BALANCER": 1}


def test_ranks_of_a_ray_session(python: Path, base: Path, machine: dict[str, str]) -> None:
    folder = build("B", base / "doubles" / "B")
    result = scenario(python, {**machine, "PYTHONPATH": f"{folder}:{base / 'sources'}"}, "ray_ranks")
    for rank, model in enumerate(result["models"]):
        assert model["backends"] == [OURS] * 3
        assert f"rank {rank}: 2 of 3 MoE layers on b12x, decode below 64 tokens (NVFP4)" in model["log"]


def test_custom_module_dirs(own_python: Path, base: Path, machine: dict[str, str]) -> None:
    """Where no ``.pth`` is read, the folder that the package brings for the option reaches the workers."""
    folder = build("A", base / "doubles" / "A")
    variables = {**machine, "PYTHONPATH": f"{folder}:{base / 'sources'}"}
    (site(own_python) / "trtllm_b12x.pth").unlink()
    assert scenario(own_python, variables, "mpi_worker")["backends"] == [HOSTS] * 3
    command = [str(own_python), "-m", "trtllm_b12x", "switch"]
    printed = subprocess.run(command, env=variables, cwd=base, capture_output=True, text=True, check=True).stdout.strip()
    assert [path.name for path in Path(printed).parent.iterdir()] == [Path(printed).name]  # it comes first on sys.path
    result = scenario(own_python, variables, "custom_module_dirs", printed)
    assert result["backends"] == [OURS] * 3
    assert result["classes"] == ["TrtllmB12xSwitch"]


@pytest.mark.parametrize("order", ["", "reversed"])
def test_what_happens_to_a_plain_subclass(python: Path, double: dict[str, str], order: str) -> None:
    result = scenario(python, double, "naive", *([order] if order else []))
    assert result["naive"] == "Unsupported moe backend"
    assert result["isinstance"]
    assert result["classes"] == [True, True]
    keywords = {"is_sf_swizzled", "output_dtype", "moe_output", "x", "x_sf", "token_selected_experts", "token_final_scales"}
    if double["GENERATION"].startswith("C"):
        assert result["naive call"] == "torch.bfloat16"
        assert result["arrived"] == ["workspace", "MoERunContext"]
    else:
        assert result["naive call"] == "Invalid output type Byte"  # nobody told it the output's type
        assert keywords <= set(result["arrived"])


def test_every_backend_quantization_and_card(python: Path, double: dict[str, str]) -> None:
    result = scenario(python, double, "table")
    assert len(result["rows"]) == 2 * 4 * 5 * 3
    without_kernel = ("CuteDslFusedMoE",) if result["has_get_moe_cls"] else ()
    for payload, sm, backend, algo, alone, promoted in result["rows"]:
        expected = alone
        if alone == "CuteDslB12xFusedMoE" and payload == "12":
            expected = HOSTS  # its kernels would not compile
        elif algo == "NVFP4" and sm in (120, 121) and payload == "13" and alone in (HOSTS, *without_kernel):
            expected = OURS
        assert promoted == expected, (payload, sm, backend, algo, alone)


def test_models_that_read_the_backends_name(python: Path, double: dict[str, str]) -> None:
    """Decoder layers ask the TRTLLM backend for unfinalized output: whoever serves them, a call ends as without us, or better."""
    result = scenario(python, double, "decoders")
    assert len(result["rows"]) == 4 * 5
    for model, backend, alone, promoted, expected, found in result["rows"]:
        case = (double["GENERATION"], model, backend)
        if backend == "TRTLLM" or alone not in (HOSTS, "CuteDslFusedMoE"):
            assert found == expected, case  # from C1 on the host itself gives CUTLASS here, and the model does not know
        else:
            assert promoted == OURS, case
            assert all(error < 0.1 for error in found), (case, found)
    without_kernel = [row for row in result["rows"] if row[1:3] == ["CUTEDSL", "CuteDslFusedMoE"]]
    assert len(without_kernel) == (4 if double["GENERATION"] == "A" else 0)
    assert result["stderr"].count("set moe_config.backend: CUTLASS") == 1


def test_only_lora_on_the_experts_keeps_b12x_off(python: Path, double: dict[str, str]) -> None:
    result = scenario(python, double, "lora")
    assert result["attention"] == [OURS, 1]
    alone, with_us = result["experts"]
    assert with_us == alone  # from C1 on the host refuses them itself


def test_behind_an_alltoall(python: Path, double: dict[str, str]) -> None:
    """Late 1.3 and later tell a backend at once; earlier ones at the first call."""
    result = scenario(python, double, "alltoall", TRTLLM_B12X_KERNELS="triton")
    told = double["GENERATION"] != "A"
    assert result["loaded"] == (0 if told else 1)
    assert result["promoted"] == 0
    assert result["reasons"] == {"ALLTOALL": 1}
    assert result["sent"] == ["torch.uint8"] * 2


def test_padded_and_empty_chunks(python: Path, double: dict[str, str]) -> None:
    """A rank without tokens in a chunk sends its first chunk again (B), or one of zeros; all of it runs on the kernels."""
    generation = double["GENERATION"]
    if generation == "A":  # whose double cuts no attention-DP batches
        return
    result = scenario(python, double, "uneven", TRTLLM_B12X_KERNELS="triton")
    assert result["even"] == [[9, 128], True, 1, [9, 9], [9, 9]]
    assert result["padded"] == [[5, 128], True, 1, [9, 9], [9, 9]]
    chunks, last = (4, [1, 25]) if generation == "B" else (7, [1, 14])
    assert result["empty"] == [[3, 128], True, chunks, [1, last[1] + (generation != "B")], last]


@pytest.mark.parametrize(  # those before do not know it; AUTO is CUTLASS before it gets to a resolver
    ("double", "backend"),
    list(itertools.product(("C1", "C2"), ("CUTLASS", "AUTO", "TRTLLM"))),
    indirect=["double"],
)
def test_what_the_host_has_no_implementation_for(python: Path, double: dict[str, str], backend: str) -> None:
    """MXFP8 on SM12x: hosts that know the format refuse the layer; it is served at every count, in graphs too, and loaded
    however a host hands it on."""
    found = scenario(python, {**double, "TRTLLM_B12X_KERNELS": "triton,grouped"}, "mxfp8", backend)
    assert "no MoE implementation can serve this layer" in found["host"] or backend == "AUTO"  # CUTLASS, before it gets here
    assert (found["class"], found["families"]) == (OURS, ["triton", "grouped"])
    assert max(found["errors"] + found["captured"] + found["constants"]) < 0.005
    assert re.search(r"no kernel serves the MoE layer of 4 experts.* taken away", found["nobody"])
    if backend == "CUTLASS":
        assert found["built"] == [OURS, ["swiglu_alpha", "swiglu_beta", "swiglu_limit"]]
    assert found["measured"] == [0, 1]
    assert re.search(r"measured in .* s: triton 1-39, then grouped$", found["crossover"])
    assert found["stacked"]
    assert "nvidia-modelopt's MXFP8 exports of Llama 4 and gpt-oss have them along the rows" in found["along rows"]
    assert found["parts"] == [False, True]


def test_the_numbers_are_the_embedded_hosts(python: Path, double: dict[str, str], tmp_path: Path) -> None:
    import torch

    from tests.sequences import SEQUENCES

    file = tmp_path / "expected.pt"
    torch.save({name: make() for name, make in SEQUENCES.items()}, file)
    assert scenario(python, double, "numbers", str(file))["wrong"] == []


def test_the_embedded_hosts_own_tests_hold(python: Path, double: dict[str, str]) -> None:
    files = SUITE if double["GENERATION"].startswith("C") else KEYWORD_SUITE
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", "."]
    result = subprocess.run(
        [*command, "-m", "not embedded" if files is KEYWORD_SUITE else "not embedded and not keywords", *files],
        env=double,
        cwd=double["PYTHONPATH"].split(":")[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert "skipped" not in result.stdout.splitlines()[-1]


def test_compile_finds_no_graph_break(python: Path, double: dict[str, str]) -> None:
    result = scenario(python, double, "compiled")
    assert result["equal"]
    assert result["kernel"]


def test_the_autotuner(python: Path, double: dict[str, str]) -> None:
    result = scenario(python, double, "tuning")
    assert result["alone"] == "IndexError"
    assert result["guarded"] == "((4, 2), (-1,), (3,))"
    assert result["cleared"]
    assert result["kernel_calls"] == [0, 1]  # while it tunes, CUTLASS sees the small counts
    assert result["missed"] == [0, 0, 2]  # and has tactics for them: 40 tokens were never tuned, for either GEMM


def test_the_crossover_is_measured_once_the_host_has_tuned_and_never_under_capture(python: Path, double: dict[str, str]) -> None:
    found = scenario(python, double, "warming_up")
    for tuner, graphs in itertools.product(("on", "off"), repeat=2):
        result = found[f"{tuner} {graphs}"]
        measured = [event for event in result["events"] if event[0] == "measured"]
        assert all(event[2:] == [False, False] for event in measured)
        first = "warm" if graphs == "on" else "request"
        assert [event[1] for event in measured] == (["attention", first] if tuner == "on" else [first]), (tuner, graphs)
        assert result["layers"] == 2
        assert 0 < result["gap"] < 0.2  # the host's own path, in this generation's form, computes the layer
        served = [event for event in result["events"] if event[0] in ("captured", "request")]
        assert served == [[what, tokens, int(tokens <= 8)] for what, tokens, _ in served], (tuner, graphs)
        assert len(served) == (14 if graphs == "on" else 5)
        assert all(event[2] == 0 for event in result["events"] if event[0] == "tuning")


# ---- what must not be there, and what must not matter --------------------------------------------------------------------


def test_a_host_of_another_shape_is_left_alone(python: Path, base: Path, machine: dict[str, str]) -> None:
    folder = build("B", base / "doubles" / "odd")
    package = folder / "tensorrt_llm/_torch/modules/fused_moe"
    quantization = (package / "quantization.py").read_text()
    (package / "quantization.py").write_text(quantization.replace("_reconcile_and_compute_alphas", "_reconcile"))
    cutlass = (package / "fused_moe_cutlass.py").read_text()
    (package / "fused_moe_cutlass.py").write_text(
        cutlass.replace("output_dtype: torch.dtype | None = None,", "out_dtype: torch.dtype | None = None,").replace(
            "            output_dtype or x.dtype,", "            out_dtype or x.dtype,"
        )
    )
    variables = {**machine, "PYTHONPATH": f"{folder}:{base / 'sources'}"}
    doctor = subprocess.run([python, "-m", "trtllm_b12x", "doctor"], env=variables, capture_output=True, text=True)
    assert doctor.returncode == 1
    words = " ".join(doctor.stdout.split())
    assert "HOST: no adapter fits TensorRT-LLM double" in words
    assert "CutlassFusedMoE.run_moe: no parameter output_dtype" in words
    code = (
        "import importlib; c = importlib.import_module('tensorrt_llm._torch.modules.fused_moe.create_moe');"
        "from tests.hosts.scenarios import model_config; early = c.get_moe_cls;"
        "print(early(model_config()).__name__, early(model_config()).__name__);"
        "import trtllm_b12x; names = [c.get_moe_cls, c.create_moe_backend];"
        "print(trtllm_b12x.status().patches, [hasattr(name, '__wrapped__') for name in names])"
    )
    result = subprocess.run([python, "-c", code], env=variables, capture_output=True, text=True)
    assert result.stdout.splitlines() == [f"{HOSTS} {HOSTS}", "() [False, False]"], (
        result.stderr
    )  # the names are the host's again
    assert result.stderr.count("no adapter fits") == 1


RENAMED = ["_reconcile_and_compute_alphas", "_interleave_w2_weight_scale", "load_weight_shard"]


@pytest.mark.parametrize("name", RENAMED)
def test_one_renamed_function_is_enough(python: Path, base: Path, machine: dict[str, str], tmp_path: Path, name: str) -> None:
    """A staged host less one hook must not pass for one that does not stage: its numbers would be wrong."""
    folder = build("B", tmp_path / "double")
    for file in (folder / "tensorrt_llm/_torch/modules/fused_moe").glob("*.py"):
        text = file.read_text().replace(name, f"{name}_")
        file.write_text(text.replace(f"import TensorParallelMode, {name}_", f"import TensorParallelMode, {name} as {name}_"))
    variables = {**machine, "PYTHONPATH": f"{folder}:{base / 'sources'}"}
    code = (
        "import importlib; c = importlib.import_module('tensorrt_llm._torch.modules.fused_moe.create_moe');"
        "from tests.hosts.scenarios import model_config; print(c.get_moe_cls(model_config()).__name__);"
        "import trtllm_b12x; print(trtllm_b12x.status().generation)"
    )
    result = subprocess.run([python, "-c", code], env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.split() == [HOSTS, "unsupported"], result.stderr
    assert result.stderr.count(name) == 1


def test_one_renamed_field_is_left_alone_or_refused(python: Path, base: Path, machine: dict[str, str], tmp_path: Path) -> None:
    """Whatever is read of a layer or of a call's record, every third name (``RENAMED=all``): no host crashes that did not."""
    variables = {**machine, "PYTHONPATH": str(base / "sources")}
    outcomes = scenario(python, variables, "renamed", "C2", str(tmp_path))["outcomes"]
    worse = {name: answers for name, answers in outcomes.items() if answers[0] != answers[1] and answers[1]}
    assert not worse
    left = {name for name, (with_us, _) in outcomes.items() if with_us in ("C2 0", "unsupported 0")}
    assert len(left) >= len(outcomes) - 2, outcomes  # the others are the double's own keywords


OTHERS = {
    # Early 1.2.
    "run_moe is not told of an all-to-all": (
        "A",
        [
            ("configurable_moe", '            kwargs["enable_alltoall"] = self.enable_alltoall\n', ""),
            ("fused_moe_cutlass", "        enable_alltoall: bool | None = None,\n", ""),
            ("fused_moe_cutlass", "            enable_alltoall=bool(enable_alltoall),\n", ""),
        ],
    ),
    # A class per quantization: the family's name is where it was, its signatures too, and nothing that is built is equal to it.
    "CUTLASS means another class": (
        "C2",
        [
            ("moe_resolution", "frozenset({CutlassFusedMoE})", "frozenset({CutlassNvfp4})"),
            ("moe_resolution", "    CutlassFusedMoE,\n", "    CutlassNvfp4,\n"),
            ("moe_resolution", "IMPL_PRIORITY: ", "class CutlassNvfp4(CutlassFusedMoE): ...\n\n\nIMPL_PRIORITY: "),
            ("moe_resolution", "FALLBACK_IMPL: Any = CutlassFusedMoE", "FALLBACK_IMPL: Any = CutlassNvfp4"),
            ("create_moe", "moe_cls in (CutlassFusedMoE, MarlinFusedMoE)", "issubclass(moe_cls, CutlassFusedMoE)"),
        ],
    ),
    "no such table": ("C2", [("moe_resolution", "BACKEND_FAMILY", "FAMILY_OF_BACKEND")]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_generations_are_left_alone_with_one_line(
    python: Path, base: Path, machine: dict[str, str], tmp_path: Path, case: str
) -> None:
    generation, changes = OTHERS[case]
    folder = build(generation, tmp_path / "double")
    for module, old, new in changes:
        file = folder / PACKAGES.get(generation, OLD_PACKAGE) / f"{module}.py"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
    result = scenario(python, {**machine, "PYTHONPATH": f"{folder}:{base / 'sources'}"}, "by_itself")
    assert result["generation"] == "unsupported"
    assert result["promoted"] == 0
    assert OURS not in result["backends"]
    assert [line[:15] for line in result["log"]] == ["no adapter fits"]


def test_a_class_that_cannot_be_built_is_the_hosts(python: Path, base: Path, machine: dict[str, str], tmp_path: Path) -> None:
    folder = build("C2", tmp_path / "double")
    cutlass = folder / "tensorrt_llm/_torch/moe/fused_moe/fused_moe_cutlass.py"
    line = "        super().__init__(eplb=None)\n"
    assert line in cutlass.read_text()
    refuses = f'{line}        assert type(self).__name__ == "CutlassFusedMoE"\n'
    cutlass.write_text(cutlass.read_text().replace(line, refuses))
    result = scenario(python, {**machine, "PYTHONPATH": f"{folder}:{base / 'sources'}"}, "by_itself")
    assert result["backends"] == [HOSTS] * 3
    assert [line.partition(",")[0] for line in result["log"]] == ["promotion is off in this process"]


def test_verify_uses_the_embedded_host(python: Path, double: dict[str, str], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, [random_experts(4, 128, 192)], top_k=2)
    command = [str(python), "-m", "trtllm_b12x", "verify", str(checkpoint), "--require-b12x"]
    result = subprocess.run(command, env=double, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "PASS" in result.stdout


def test_the_interpreters_start(python: Path, machine: dict[str, str]) -> None:
    """The ``.pth`` imports nothing until the host is imported, and then nothing that the interpreter has not imported anyway."""

    def modules(code: str = "pass", **more: str) -> dict[str, int]:
        command = [str(python), "-X", "importtime", "-c", code]
        errors = subprocess.run(command, env={**machine, **more}, capture_output=True, text=True, check=True).stderr
        rows = [line.removeprefix("import time:").split("|") for line in errors.splitlines() if "|" in line]
        return {row[2].strip(): int(row[1]) for row in rows if row[1].strip().isdigit()}

    assert set(modules()) == set(modules(TRTLLM_B12X="0"))
    assert set(modules("import trtllm_b12x.bootstrap")) - set(modules()) == {"trtllm_b12x", "trtllm_b12x.bootstrap"}


@pytest.mark.parametrize("how", ["syntax", "missing", "raising", "unreadable", "cache"])
def test_a_broken_plugin_breaks_nothing(own_python: Path, base: Path, machine: dict[str, str], tmp_path: Path, how: str) -> None:
    python = own_python
    folder = build("A", base / "doubles" / "A")
    variables = {**machine, "PYTHONPATH": f"{folder}:{base / 'sources'}"}
    package = site(python) / "trtllm_b12x"
    bootstrap, selection = package / "bootstrap.py", package / "selection.py"
    prefix: list[str] = []
    if how == "syntax":
        bootstrap.write_text("def (:\n")
    elif how == "missing":
        bootstrap.unlink()
    elif how == "raising":
        text = selection.read_text()
        selection.write_text(text.replace("def patch(module: ModuleType) -> None:", "def patch(module):\n    1 / 0"))
    elif how == "unreadable":
        bootstrap.chmod(0)
        if os.geteuid() == 0:  # root reads everything, unless told not to
            prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    else:
        (tmp_path / "file").touch()
        variables["XDG_CACHE_HOME"] = str(tmp_path / "file")
    for cached in package.glob("__pycache__/bootstrap*"):
        cached.unlink()
    start = subprocess.run([*prefix, python, "-c", "print('alive')"], env=variables, capture_output=True, text=True)
    assert (start.returncode, start.stdout, start.stderr) == (0, "alive\n", "")
    code = (
        "import importlib; c = importlib.import_module('tensorrt_llm._torch.modules.fused_moe.create_moe');"
        "from tests.hosts.scenarios import model_config; print(c.get_moe_cls(model_config()).__name__)"
    )
    result = subprocess.run([*prefix, python, "-c", code], env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [OURS if how == "cache" else HOSTS]
    assert ("is left alone: ZeroDivisionError" in result.stderr) == (how == "raising")


def test_nothing_is_left_after_uninstalling(own_python: Path, base: Path, machine: dict[str, str]) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(own_python)]
    subprocess.run([*pip, "uninstall", "-y", "trtllm-b12x"], check=True)
    assert [path.name for path in site(own_python).iterdir() if "b12x" in path.name] == []
    folder = build("A", base / "doubles" / "A")
    code = (
        "import sys, importlib; c = importlib.import_module('tensorrt_llm._torch.modules.fused_moe.create_moe');"
        "print(hasattr(c.get_moe_cls, '_trtllm_b12x'), [type(f).__name__ for f in sys.meta_path].count('Finder'))"
    )
    # The double's own records are the embedded host's: the package is there as plain files, as no user has it.
    variables = {**machine, "PYTHONPATH": f"{folder}:{base / 'clone'}"}
    result = subprocess.run([own_python, "-c", code], env=variables, capture_output=True, text=True)
    assert result.stdout.split() == ["False", "0"], result.stderr


def test_no_hook_is_left_to_itself(python: Path, double: dict[str, str]) -> None:
    streamed = [] if double["GENERATION"] != "C1" else ["finalize_streamed_expert"]  # C2's
    assert scenario(python, double, "hooks")["orphans"] == streamed
