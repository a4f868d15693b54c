"""The pages as a site: all of them are in it, and no link leads nowhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.docs.pages import DOCS, ROOT
from tpplan.language.schema import SCHEMA_FILE

PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def test_it_is_built(tmp_path: Path) -> None:
    """Strictly: a page that the navigation has not, a broken link or anchor is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = {path.with_suffix(".md").name for path in tmp_path.glob("*.html")}
    assert set(PAGES) <= made


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert sorted(re.findall(r"[\w-]+\.md", text)) == PAGES
    assert yaml.safe_load(text)["docs_dir"] == DOCS.name


def test_the_readme_leads_there() -> None:
    readme = (ROOT / "README.md").read_text()
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", readme))
    assert linked <= set(PAGES)
    assert {"guide.md", "plan-language.md", "troubleshooting.md"} <= linked
    assert str(SCHEMA_FILE.relative_to(ROOT)) in readme
