"""Settings: one table, warnings for what is none, never an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_b12x.core import settings


@pytest.mark.parametrize("switch", [s for s in settings.SWITCHES if s is not settings.KERNELS], ids=lambda s: s.name)
def test_every_value_and_the_default(switch: settings.Switch[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert switch.name.startswith("TRTLLM_B12X")
    monkeypatch.delenv(switch.name, raising=False)
    assert switch() == switch.values[switch.default]
    for text, value in switch.values.items():
        monkeypatch.setenv(switch.name, f" {text} ")
        assert switch() == value
    monkeypatch.setenv(switch.name, "nonsense")
    assert switch() == switch.values[switch.default]
    (complaint,) = settings.complaints()
    assert complaint == f"{switch.name} must be {switch.expected}; got nonsense, and {switch.default} is used"


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
    names = {name: name for name in ("b12x", "other", "third")}
    order = settings.Order("TRTLLM_B12X_KERNELS", names, ",".join(names), "")
    monkeypatch.setattr(settings, "SWITCHES", (order,))
    monkeypatch.delenv(settings.CROSSOVER.name)
    for text, listed, complaints in (
        ("", ("b12x", "other", "third"), 0),
        (" Third, b12x,", ("third", "b12x"), 0),
        ("tritn,other,other", ("other",), 1),
        ("tritn", ("b12x", "other", "third"), 1),
    ):
        monkeypatch.setenv(order.name, text)
        assert order.listed() == listed
        assert len(settings.complaints()) == complaints
        assert all(complaint.endswith(f"and {','.join(listed)} is used") for complaint in settings.complaints())
    must = "TRTLLM_B12X_KERNELS must be one or more of b12x, other, third"
    assert settings.complaints() == [f"{must}; got tritn, and b12x,other,third is used"]


@pytest.mark.parametrize(
    ("text", "value", "first"),
    [
        ("", "auto", None),
        (" AUTO ", "auto", None),
        ("1", "1", 1),
        (" 96 ", "96", 96),
        ("0", "auto", None),
        ("9000", "auto", None),
        ("-3", "auto", None),
        ("on", "auto", None),
        ("off", "auto", None),
        ("a.json", "a.json", None),
        ("./Where", "./Where", None),
        ("nowhere.json", "auto", None),
        ("/some/Where", "auto", None),
    ],
)
def test_the_crossover(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, value: str, first: int | None) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "Where"):
        Path(name).touch()
    monkeypatch.setenv(settings.CROSSOVER.name, text)
    assert settings.CROSSOVER() == value
    assert settings.CROSSOVER.first(settings.CROSSOVER()) == first
    wrong = value == "auto" and text.strip().lower() not in ("", "auto")
    must = "TRTLLM_B12X_CROSSOVER must be auto, a token count such as 64 (at most 8192), or a file that is there"
    assert settings.complaints() == ([f"{must}; got {text}, and auto is used"] if wrong else [])


def test_unknown_names_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_B12X_GATHERBF16", "1")
    monkeypatch.setenv("TRTLLM_B12XY", "not ours")
    (complaint,) = settings.complaints()
    assert complaint.startswith("TRTLLM_B12X_GATHERBF16 is no setting of trtllm_b12x; there are TRTLLM_B12X, ")


def test_the_readme_holds_the_table() -> None:
    assert settings.table() in (Path(__file__).parents[2] / "README.md").read_text()
