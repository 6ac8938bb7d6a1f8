"""`scripts/build_site.py`: pages that load nothing from elsewhere, with links that lead somewhere."""

import importlib.util
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("build_site", ROOT / "scripts" / "build_site.py")
site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site)
LOADED = {"src", "srcset", "data", "poster", "background"}  # and href of <link>


class Page(HTMLParser):
    """What a page loads, where it leads, its pictures' alternatives and its tags."""

    def __init__(self, path: Path):
        super().__init__()
        self.loads, self.leads, self.alts, self.tags, self.ids = [], [], [], [], set()
        self.text = path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.add(value)
            if name in LOADED or (tag == "link" and name == "href"):
                self.loads.append(value)
            elif name == "href":
                self.leads.append(value)
        if tag == "img":
            self.alts.append(dict(attrs).get("alt", ""))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("course") / "_site"
    return {path.relative_to(out).as_posix(): Page(path) for path in site.build(out)}, out


def elsewhere(page: Page) -> list[str]:
    """All that the page would ask a server for."""
    styles = re.findall(r"url\(|@import", page.text.partition("</style>")[0])
    return [url for url in page.loads if not url.startswith("data:")] + styles


def test_every_notebook_has_a_page_and_the_index_leads_to_it(built):
    pages, _ = built
    names = {path.stem + ".html" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert names <= set(pages)
    assert names <= set(pages["index.html"].leads)


def test_no_page_loads_anything_or_runs_a_script(built):
    pages, _ = built
    assert {name: found for name, page in pages.items() if (found := elsewhere(page))} == {}
    assert not any({"script", "iframe", "link"} & set(page.tags) for page in pages.values())


def test_the_check_sees_a_picture_and_a_font_from_elsewhere(tmp_path):
    path = tmp_path / "page.html"
    path.write_text('<style>@import "https://a.example/f.css";</style><img src="https://a.example/p.png">')
    assert len(elsewhere(Page(path))) == 2


def test_every_relative_link_leads_to_a_page_of_the_site(built):
    pages, out = built
    for name, page in pages.items():
        for link in page.leads:
            target = link.partition("#")[0]
            if target and not target.startswith(("https:", "http:", "mailto:")):
                assert ((out / name).parent / target).is_file(), f"{name} leads to {link}"


def dead_anchors(pages: dict[str, Page]) -> list[str]:
    """Links to a place on a page that has no such place."""
    found = []
    for name, page in pages.items():
        for link in page.leads:
            target, _, anchor = link.partition("#")
            if anchor and not target.startswith(("https:", "http:", "mailto:")):
                path = os.path.normpath(os.path.join(os.path.dirname(name), target)) if target else name
                if anchor not in pages[path].ids:
                    found.append(f"{name}: {link}")
    return found


def test_every_anchor_of_a_relative_link_is_on_its_page(built):
    pages, _ = built
    anchored = [link for page in pages.values() for link in page.leads if ".html#" in link]
    assert any(link.endswith("docs-audit.md.html#what-is-asked-in-order") for link in anchored)
    assert dead_anchors(pages) == []
    page = pages["source/docs-audit.md.html"]
    kept, page.ids = page.ids, set()
    assert dead_anchors(pages)  # the check sees a lost anchor
    page.ids = kept


def test_no_page_asks_its_reader_to_fill_in_an_owner(built):
    pages, _ = built
    assert not [name for name, page in pages.items() if "OWNER" in page.text]


def test_pictures_have_words_and_pages_a_width_and_a_dark_side(built):
    pages, _ = built
    numbered = [page for name, page in pages.items() if name[0].isdigit()]
    assert all(page.alts and all(page.alts) for page in numbered)
    for page in pages.values():
        assert 'name="viewport"' in page.text and "prefers-color-scheme: dark" in page.text


def test_a_directory_that_is_no_site_is_left_alone(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(SystemExit, match="so it is no site"):
        site.build(tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"
