"""The HTML page: complete in itself, valid, folded, escaped, and what a browser makes of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.models import hf
from tests.render.browser import CHROMIUM, DRIVER, Browser
from tpplan import Report
from tpplan.cost import Setting
from tpplan.cost.curves import with_companions
from tpplan.render.html import render_html
from tpplan.render.paths import folded_text
from tpplan.render.tree import module_tree

# the reports they read take longer to make than to read: once, in one process
pytestmark = pytest.mark.xdist_group("html")

VOID = {"br", "col", "input", "link", "meta", "wbr"}
SECTIONS = ["figures", "modules", "collectives", "timeline", "memory", "scaling"]


class Page(HTMLParser):
    """A page's elements; fails where they are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def with_others(model: nn.Module, plan: Any, tp: int, *, tps: tuple[int, ...]) -> Report:
    report = tpplan.dry_run(model, plan, tp, 1, 16)
    return Report.of(with_companions(model, Setting(tpplan.load_plan(plan), tp), report, tps))


@pytest.fixture(scope="module")
def report() -> Report:
    return with_others(hf(device="meta", num_hidden_layers=7), "llama.yaml", 2, tps=(1, 2, 4, 16))


@pytest.fixture(scope="module")
def large() -> Report:
    """Llama-3.1-405B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape, **heads, head_dim=128, dtype="bfloat16"))
    return tpplan.dry_run(model, "llama.yaml", 8, 1, 8192)


@pytest.mark.turns(24)
def test_nothing_is_fetched(report: Report) -> None:
    text = report.to_html()
    page = Page(text)
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            target = attributes.get(name, "#")
            assert target.startswith(("#", "data:")), (tag, name, target)
    assert not re.findall(r"url\((?!#)|@import|https?://", text)
    assert not re.findall(r"\bfetch\(|XMLHttpRequest|WebSocket|import\(", text)
    (policy,) = (a["content"] for _, a in page.elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_the_parts_are_there_in_order(report: Report) -> None:
    page = Page(report.to_html())
    found = [a["id"] for tag, a in page.elements if tag == "section"]
    assert found == SECTIONS
    for kind in ("exact", "tracked", "modelled"):
        assert any(a.get("href") == f"#about-{kind}" for _, a in page.elements)
    titles = {a.get("data-title") for _, a in page.elements}
    assert {"takes · modelled", "optimizer · exact", "peak · tracked"} <= titles
    charts = [a for tag, a in page.elements if tag == "svg"]
    assert len(charts) == 2 + 1 + 3
    assert "tpplan dry-run llama.yaml --model CONFIG --tp 2" in page.text
    assert f"tpplan {tpplan.__version__}, torch {torch.__version__}" in page.text


def test_references_within_the_page(report: Report) -> None:
    page = Page(report.to_html())
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        wanted = attributes.get("aria-labelledby", "").split()
        if attributes.get("href", "").startswith("#"):
            wanted.append(attributes["href"][1:])
        assert set(wanted) <= set(ids)
    tags = Counter(tag for tag, _ in page.elements)
    assert tags["h1"] == tags["main"] == 1


def test_companions(report: Report) -> None:
    assert [(r.compiled.tp, r.compiled.sequence_parallel) for r in report.companions] == [
        (1, False),
        (4, True),
        (2, False),
    ]
    assert list(report.refused) == ["tp 16"]
    page = Page(report.to_html())
    for name in ("no parallelism", "TP, tp 2", "TP+SP, tp 2, checkpointing"):
        assert f"{name}: " in page.text
    assert report.refused["tp 16"] in page.text
    assert "nothing to compare" in render_html(report, ())


@pytest.mark.turns(24)
def test_equal_layers_are_one_row(large: Report) -> None:
    text = large.to_html()
    assert len(text.encode()) < 200_000
    page = Page(text)
    assert "×126" in page.text
    paths = [a["data-path"] for _, a in page.elements if "data-path" in a]
    assert paths.count("model.layers.*.self_attn.q_proj.weight") == 1
    assert len(paths) == len(set(paths)) < 30
    assert "model.layers.1." not in text
    assert "405.85 B" in page.text


def test_sums_of_the_tree(large: Report) -> None:
    root = module_tree(large.compiled, "model")
    assert root.bytes_per_rank == large.memory.parameters_per_rank


def test_one_rank() -> None:
    page = Page(tpplan.dry_run(hf(device="meta"), "llama.yaml", 1, 1, 8).to_html())
    assert "there is one rank" in page.text


@pytest.mark.turns(12)
def test_ties_and_layers_that_differ() -> None:
    changes: dict[str, Any] = {"tie_word_embeddings": True, "num_hidden_layers": 4}
    model = hf(device="meta", **changes)
    del model.model.layers[1].self_attn.q_proj.bias
    model.model.layers[1].self_attn.q_proj.register_parameter("bias", None)
    page = Page(tpplan.dry_run(model, "llama.yaml", 2, 1, 8).to_html())
    assert "0, 2–3 ×3" in page.text
    assert "tied to model.embed_tokens.weight" in page.text
    assert "lm_head.weight is the same parameter" in page.text


def test_the_command_says_how_it_was_trained() -> None:
    training: dict[str, Any] = {"optimizer": "sgd", "max_norm": None, "checkpointing": True}
    model = hf(device="meta")
    report = tpplan.dry_run(model, "llama.yaml", 2, 1, 8, sequence_parallel=False, **training)
    wanted = "tpplan dry-run llama.yaml --model CONFIG --tp 2 --batch 1 --seq 8 "
    wanted += "--no-sequence-parallel --optimizer=sgd --clip=0 --checkpointing "
    assert wanted + "--hardware h100-nvlink" in Page(report.to_html()).text


def test_lists_of_equal_layers_are_short() -> None:
    layers = [f"block.{i}.attn.{p}" for i in range(24) for p in "kv"]
    assert folded_text(f"input of {', '.join(layers)}: gathered, once") == (
        "input of block.*.attn.k (24 of them), block.*.attn.v (24 of them): gathered, once"
    )
    assert folded_text("needs torch 2.13.0, p > 0.1") == "needs torch 2.13.0, p > 0.1"


EVIL = "<script>alert('&amp;')</script>\"><img src=x onerror=alert(1)>"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(EVIL, nn.Linear(8, 16))
        self.out = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.out(getattr(self, EVIL)(x))
        return x + changed


def test_hostile_names_are_text() -> None:
    evil = type("</title></style>" + EVIL, (nn.Sequential,), {})(Block(), Block())
    rules = {f"*.{EVIL}": "colwise", "*.out": "rowwise"}
    plan = {"tpplan": 1, "rules": rules, "description": EVIL}
    report = tpplan.dry_run(evil, plan, 2, 1, 8, inputs=torch.zeros(1, 8, 8))
    page = Page(report.to_html(command=EVIL))
    assert EVIL in page.text
    tags = Counter(tag for tag, _ in page.elements)
    assert tags["script"] == tags["style"] == 1
    assert tags["img"] == 0


# --- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no Chromium with its driver")
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


# what reaches beyond the page's edge, but for what scrolls by itself; a chart's texts
# that overlap, or are wider than what they are on
OUTSIDE = """
return [...document.body.querySelectorAll('*')]
  .filter(e => !e.closest('.scroll') && !e.matches('.skip') && e.checkVisibility())
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.tagName + ' ' + e.textContent.slice(0, 60));
"""
OVERLAPPING = """
const found = [];
for (const svg of document.querySelectorAll('svg')) {
  const texts = [...svg.querySelectorAll('text')];
  texts.forEach((a, i) => texts.slice(i + 1).forEach(b => {
    const p = a.getBoundingClientRect(), q = b.getBoundingClientRect();
    if (p.left < q.right && q.left < p.right && p.top + 2 < q.bottom && q.top + 2 < p.bottom)
      found.push(a.textContent + ' / ' + b.textContent);
  }));
}
for (const block of document.querySelectorAll('.timeline g:has(text)')) {
  const text = block.querySelector('text').getBoundingClientRect();
  const boxes = [...block.querySelectorAll('rect')].map(r => r.getBoundingClientRect());
  if (!boxes.some(box => box.left <= text.left && text.right <= box.right))
    found.push(block.textContent);
}
return found;
"""


def test_in_a_browser(browser: Browser, report: Report, large: Report, tmp_path: Path) -> None:
    for name, made in (("report", report), ("large", large)):
        file = tmp_path / f"{name}.html"
        file.write_text(made.to_html(), encoding="utf-8")
        browser.open("about:blank")
        browser.log("browser")
        browser.requests()
        browser.open(file.as_uri())
        for width in (1280, 375):
            browser.devtools(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=900,
                deviceScaleFactor=1,
                mobile=width < 500,
            )
            for opened in ("false", "true"):
                browser.run(f"document.querySelectorAll('details').forEach(d => d.open = {opened})")
                found = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
                assert found[0] <= found[1] == width, (name, opened)
                assert browser.run(OUTSIDE) == []
            assert browser.run(OVERLAPPING) == []
        assert browser.requests() == [file.as_uri()]
        assert browser.log("browser") == []


def test_the_filter(browser: Browser, large: Report, tmp_path: Path) -> None:
    file = tmp_path / "large.html"
    file.write_text(large.to_html(), encoding="utf-8")
    browser.open(file.as_uri())
    shown = "return [...document.querySelectorAll('.tree .row .name')]"
    shown += ".filter(e => e.checkVisibility()).map(e => e.textContent)"
    every = browser.run(shown)
    typed = "const f = document.getElementById('tree-filter'); f.value = '{}';"
    typed += "f.dispatchEvent(new Event('input'))"
    browser.run(typed.format("self_attn proj"))
    assert browser.run(shown) == [f"{n}_proj.weight" for n in "qkvo"]
    assert browser.run("return document.getElementById('tree-found').textContent") == "4 rows"
    browser.run(typed.format(""))
    assert browser.run(shown) == every
