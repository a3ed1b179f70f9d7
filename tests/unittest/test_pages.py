# SPDX-License-Identifier: Apache-2.0
"""README, guide and docs: links and anchors lead somewhere, sentences are short, the front page is one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import blocks, models
from trtllm_b12x.core import settings
from trtllm_b12x.decision import RejectReason

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
REPORTS = sorted(ROOT.glob("docs/flashinfer-*.md"))
"""What one would paste into an issue there."""
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def sentences(text: str) -> list[str]:
    """Split paragraphs, items and headings into sentences, without code, tables and what a run wrote."""
    text = re.sub(r"```.*?```|<!--.*?-->|^\|.*?$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?=[-#]|\d+\. )", text)
    return [sentence for part in parts for sentence in re.split(r"(?<=[.!?:])\s+", " ".join(part.split()))]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page.name}: {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in REPORTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_has_more_than_thirty_words(page: Path) -> None:
    long = [sentence for sentence in sentences(page.read_text(encoding="utf-8")) if len(sentence.split()) > 30]
    assert not long


def test_the_rules_see_what_is_wrong() -> None:
    assert sentences("# A b\n\n- One. Two\n  lines\n- " + "word " * 31)[-1].split() == ["-", *["word"] * 31]
    assert "".join(sentences("```\ncode\n```\n| a | b |\n<!-- x -->")) == ""
    assert anchors("## Does it serve my `model`?\n```\n# no\n```") == {"does-it-serve-my-model"}


PLACEHOLDERS = re.compile(r"\b(?:BACKEND|FORMAT|SIZES|REASON|NAME|RUNNER|NUMBER)\b")
"""Words of docs/trouble.md that a log line replaces."""
FILLED_IN = {f"{engine} keeps all its experts": "{engine} keeps {what}" for engine in ("vLLM", "SGLang")}
"""A line of docs/trouble.md whose source has a field in the place of a known word."""


def test_symptoms_are_lines_that_the_package_logs() -> None:
    """First column of docs/trouble.md: quoted lines stand in the source, quoted reasons are members."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "trtllm_b12x").rglob("*.py"))
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "trouble.md").read_text(encoding="utf-8"), re.MULTILINE)
    quoted = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    lines = [span for span in quoted if " " in span]
    assert len(lines) > 9
    for line in lines:
        parts = [part for part in PLACEHOLDERS.split(FILLED_IN.get(line, line)) if part.strip(" :)")]
        assert all(part.rstrip(": ") in source for part in parts), line
    reasons = {span for span in quoted if re.fullmatch(r"[A-Z_]{4,}", span)}
    assert {"TRITON", "KERNEL_PLAN_FAILED"} <= reasons <= set(RejectReason.__members__)


def test_switches_of_pages_are_those_of_the_package() -> None:
    known = {switch.name for switch in settings.SWITCHES}
    for page in PAGES:
        assert set(re.findall(r"TRTLLM_B12X\w*(?<!_)", page.read_text(encoding="utf-8"))) <= known, page.name


def test_sizes() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 130
    assert len(readme.encode()) <= 9000
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 60
    assert len((ROOT / "MOE_DEVELOPER_GUIDE.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_a_block_is_written_anew_and_an_unknown_one_is_named() -> None:
    page = "a\n<!-- {0}: begin, written by python -m benchmarks.results -->\nearlier\n<!-- {0}: end -->\nb\n"
    text = blocks.fill(page.format("warmup"), {}, blocks.BLOCKS)
    assert blocks.NOT_MEASURED in text
    assert "earlier" not in text
    assert blocks.fill(text, {}, blocks.BLOCKS) == text
    with pytest.raises(ValueError, match="no block nothing"):
        blocks.fill(page.format("nothing"), {}, blocks.BLOCKS)


def test_models_are_served_as_the_rules_say() -> None:
    answers = {name: models.answer(model) for model in models.MODELS for name in model.names}
    prefill = "prefill on CUTLASS, `gemm` or `grouped`"
    assert answers["nvidia/Qwen3-30B-A3B-FP4"] == f"yes: decode on `cuda`, `b12x` or `triton`, {prefill}"
    assert answers["nvidia/Gemma-4-26B-A4B-NVFP4"].startswith("yes: decode on `cuda` or `triton`,")
    for name in ("nvidia/Qwen3.6-35B-A3B-NVFP4", "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V4-Flash"):
        assert answers[name] == "yes: decode on `cuda` or `triton`, prefill on CUTLASS or `gemm`"
    assert answers["MiniMax-M3-MXFP8"] == "yes: decode on `cuda` or `triton`, prefill on `gemm` or `grouped`"
    assert answers["RedHatAI/gemma-4-26B-A4B-it-NVFP4"].startswith("no: TensorRT-LLM's weight mapper")
    fp8 = replace(models.MODELS[0], shape=replace(models.MODELS[0].shape, quant_algo="FP8"))
    assert models.answer(fp8) == "no: QUANTIZATION"
