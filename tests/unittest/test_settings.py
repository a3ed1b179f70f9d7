# SPDX-License-Identifier: Apache-2.0
"""Settings: one table, warnings for what is none, never an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtllm_b12x.core import settings


@pytest.mark.parametrize(
    ("switch", "values", "default", "expected"),
    [
        (settings.ENABLED, {"0": False, "1": True}, True, "0 or 1"),
        (settings.FREEZE, {"0": False, "1": True}, False, "0 or 1"),
        (settings.LOG, {"debug": "DEBUG", "ERROR": "ERROR"}, "INFO", "DEBUG, INFO, WARNING or ERROR"),
    ],
)
def test_every_value_and_the_default(
    switch: settings.Switch[Any], values: dict[str, Any], default: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(switch.name, raising=False)
    assert switch() == default
    for text, value in values.items():
        monkeypatch.setenv(switch.name, f" {text} ")
        assert switch() == value
    monkeypatch.setenv(switch.name, "nonsense")
    assert switch() == default
    assert settings.complaints() == [f"{switch.name} must be {expected}; got nonsense, and {switch.default} is used"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("false", False), ("OFF", False), (" No ", False), ("true", True), ("on", True), ("YES", True), ("", True)],
)
def test_what_people_write_for_off_and_on(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("TRTLLM_B12X", text)
    monkeypatch.setenv("TRTLLM_B12X_LOG", "debug")
    assert settings.ENABLED() == value
    assert settings.LOG() == "DEBUG"
    assert settings.complaints() == []


def test_kernels_in_an_order_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    every = ("cuda", "b12x", "triton", "gemm", "grouped")
    must = "TRTLLM_B12X_KERNELS must be one or more of cuda, b12x, triton, gemm, grouped"
    for text, listed, valid in (
        ("", every, True),
        (" Grouped, b12x,", ("grouped", "b12x"), True),
        ("triton,triton", ("triton",), True),
        ("tritn,grouped", every, False),
        (",", every, False),
    ):
        monkeypatch.setenv("TRTLLM_B12X_KERNELS", text)
        assert settings.KERNELS() == listed
        assert settings.complaints() == ([] if valid else [f"{must}; got {text}, and cuda,b12x,triton,gemm,grouped is used"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        (" AUTO ", None),
        ("1", 1),
        (" 96 ", 96),
        ("0", "invalid"),
        ("9000", "invalid"),
        ("-3", "invalid"),
        ("on", "invalid"),
        ("a.json", Path("a.json")),
        ("./Where", Path("Where")),
        ("nowhere.json", "invalid"),
        ("/some/Where", "invalid"),
    ],
)
def test_the_crossover(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, value: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "Where"):
        Path(name).touch()
    monkeypatch.setenv(settings.CROSSOVER.name, text)
    assert settings.CROSSOVER() == (None if value == "invalid" else value)
    must = "TRTLLM_B12X_CROSSOVER must be auto, a token count such as 64 (at most 8192), or an existing file"
    assert settings.complaints() == ([f"{must}; got {text}, and auto is used"] if value == "invalid" else [])


def test_unknown_names_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_B12X_GATHERBF16", "1")
    monkeypatch.setenv("TRTLLM_B12XY", "not ours")
    (complaint,) = settings.complaints()
    assert complaint.startswith("TRTLLM_B12X_GATHERBF16 is not a setting of trtllm_b12x; there are TRTLLM_B12X, ")


def test_the_page_on_serving_holds_the_table() -> None:
    rows = [f"| `{s.name}` | {', '.join(f'`{v}`' for v in s.values)} | `{s.default}` | {s.meaning} |" for s in settings.SWITCHES]
    text = "\n".join(["| variable | values | default | meaning |", "|---|---|---|---|", *rows])
    assert text in (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
