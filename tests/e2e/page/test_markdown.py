"""From a model's text to markup, in a real browser: nothing in it can run, and live equals stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

ATTACKS = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror=window.pwned=1>",
    "<svg onload=window.pwned=1>",
    "<svg><script>window.pwned=1</script></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.pwned=1>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "<iframe src='javascript:parent.pwned=1'></iframe>",
    "<a href='javascript:window.pwned=1'>x</a>",
    "<details open ontoggle=window.pwned=1>",
    "<body onload=window.pwned=1>",
    "<form action='https://evil.example'><input name=key autofocus onfocus=window.pwned=1></form>",
    "<style>@import 'https://evil.example/x.css'</style>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<base href=https://evil.example/>",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<object data='https://evil.example'></object><embed src='https://evil.example'>",
    "[x](javascript:window.pwned=1)",
    "[x](JaVaScRiPt:window.pwned=1)",
    "[x](java\nscript:window.pwned=1)",
    "[x](&#106;avascript:window.pwned=1)",
    "[x](data:text/html,<script>window.pwned=1</script>)",
    "[x](vbscript:window.pwned=1)",
    "[x](/logout)",
    '[x](https://evil.example/"onmouseover="window.pwned=1)',
    "[x](https://evil.example 'title\" onmouseover=\"window.pwned=1')",
    "![x](https://evil.example/pixel.png)",
    "![x](javascript:window.pwned=1)",
    '!["onerror="window.pwned=1](https://evil.example/x.png)',
    "<javascript:window.pwned=1>",
    "`<script>window.pwned=1</script>`",
    "```html\n<script>window.pwned=1</script>\n```",
    '```"><img src=x onerror=window.pwned=1>\ncode\n```',
    "| <img src=x onerror=window.pwned=1> |\n|---|\n| <script>window.pwned=1</script> |",
    '<noscript><p title="</noscript><img src=x onerror=window.pwned=1>">',
    "<p id=app class=hljs style='position:fixed;inset:0'>over everything</p>",
    "<br onclick=window.pwned=1><kbd onclick=window.pwned=1>k</kbd>",
]

SETUP = """async () => {
    const { Document, blocksOf } = await import("/static/js/markdown.js");
    const out = document.createElement("div");
    document.body.append(out);
    const show = (blocks) => {
        out.replaceChildren(...blocks.map(({ html }) => {
            const element = document.createElement("div");
            element.innerHTML = html;
            return element;
        }));
        return out;
    };
    const live = (source, cuts) => {
        const document = new Document();
        const seen = [];
        for (const cut of cuts) seen.push(document.update(source.slice(0, cut), false));
        return [...seen, document.update(source, true)];
    };
    Object.assign(window, { blocksOf, show, live });
}"""


@pytest.fixture(scope="module")
def reader(browser: Browser, page_files: str) -> Iterator[Page]:
    page = browser.new_page()
    page.goto(page_files)
    page.evaluate(SETUP)
    yield page
    page.close()


def html_of(reader: Page, source: str) -> str:
    return reader.evaluate("(source) => show(blocksOf(source)).innerHTML", source)


INSPECT = """async (source) => {
    const out = show(blocksOf(source));
    const elements = [...out.querySelectorAll("*")];
    for (const element of elements) for (const type of ["click", "mouseover", "focus"])
        element.dispatchEvent(new Event(type, { bubbles: true }));
    await new Promise((resolve) => setTimeout(resolve, 20));
    return {
        pwned: window.pwned ?? null,
        tags: elements.map(({ localName }) => localName),
        attributes: elements.flatMap((element) => element.getAttributeNames()),
        addresses: elements.filter((e) => e.hasAttribute("href")).map((e) => e.protocol),
    };
}"""


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_in_a_text_can_run_or_call_home(reader: Page, attack: str) -> None:
    calls: list[str] = []
    reader.on("request", lambda request: calls.append(request.url) if "evil" in request.url else None)
    for source in (attack, f"before {attack} after", f"> {attack}", f"- {attack}", f"# {attack}"):
        found: dict[str, Any] = reader.evaluate(INSPECT, source)
        assert found["pwned"] is None
        assert not {"script", "style", "img", "svg", "iframe", "form", "input", "base", "link", "meta"} & set(
            found["tags"]
        )
        assert {"href", "class", "rel", "target", "align", "start"} >= set(found["attributes"])
        assert {"https:", "http:", "mailto:"} >= set(found["addresses"])
    assert calls == []


def test_the_browser_itself_refuses_markup_that_was_not_cleaned(reader: Page) -> None:
    refused = """() => {
        try { document.createElement("div").innerHTML = "<b>x</b>"; } catch (error) { return error.name; }
        return "accepted";
    }"""
    assert reader.evaluate(refused) == "TypeError"


def test_tags_are_shown_as_the_text_they_are(reader: Page) -> None:
    text = reader.evaluate("(source) => show(blocksOf(source)).innerText", "Use <div> or <b>bold</b>.")
    assert text.strip() == "Use <div> or <b>bold</b>."


def test_links_open_apart_and_tell_nothing(reader: Page) -> None:
    html = html_of(reader, "[docs](https://example.com/a?b=1&c=2)")
    assert 'href="https://example.com/a?b=1&amp;c=2"' in html
    assert 'target="_blank"' in html
    assert 'rel="noopener noreferrer nofollow"' in html


def test_a_picture_becomes_a_link(reader: Page) -> None:
    html = html_of(reader, "![a cat](https://example.com/cat.png)")
    assert "<img" not in html
    assert ">a cat</a>" in html


def test_tables_keep_their_alignment(reader: Page) -> None:
    assert '<td align="right">9</td>' in html_of(reader, "| a | b |\n|---|--:|\n| x | 9 |")


def test_code_in_a_known_language_is_coloured_and_other_code_is_not(reader: Page) -> None:
    assert "hljs-keyword" in html_of(reader, "```python\ndef f(): pass\n```")
    assert "hljs-" not in html_of(reader, "```klingon\ndef f(): pass\n```")


FRAGMENTS = [
    "A paragraph with *some* **weight**",
    "\n",
    "\n\n",
    "- a point\n",
    "  - a lower one\n",
    "1. first\n",
    "\n   still the first\n",
    "# A heading\n",
    "---\n",
    "> said\n",
    "```python\n",
    "def f(x):\n    return x\n",
    "```\n",
    "| a | b |\n|---|--:|\n",
    "| 1 | 2 |\n",
    "`code`",
    "<div>\n",
    "[a link](https://example.com)",
    "[named]\n\n[named]: https://example.com\n",
    "é漢字🙂",
    "    indented\n",
    "***",
    "\\",
]
SOURCES = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(source=SOURCES, data=st.data())
def test_a_text_that_came_in_pieces_ends_as_the_whole(reader: Page, source: str, data: st.DataObject) -> None:
    size = reader.evaluate("(source) => source.length", source)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=8)))
    same = """([source, cuts]) => {
        const html = (blocks) => blocks.map((block) => String(block.html));
        return JSON.stringify(html(live(source, cuts).at(-1))) === JSON.stringify(html(blocksOf(source)));
    }"""
    assert reader.evaluate(same, [source, cuts])


@quick
@given(source=SOURCES, data=st.data())
def test_only_the_last_block_changes_while_text_arrives(
    reader: Page, source: str, data: st.DataObject
) -> None:
    size = reader.evaluate("(source) => source.length", source)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=8)))
    kept = """([source, cuts]) => {
        const steps = live(source, cuts).slice(0, -1);
        return steps.every((blocks, step) =>
            step === 0 || steps[step - 1].slice(0, -1).every((block, index) => blocks[index] === block));
    }"""
    assert reader.evaluate(kept, [source, cuts])


def test_a_very_long_open_block_is_plain_text_until_it_closes(reader: Page) -> None:
    source = "**word** " * 3000
    growing, final = reader.evaluate(
        "(source) => live(source, [source.length]).map((blocks) => String(blocks[0].html).slice(0, 40))",
        source,
    )
    assert growing.startswith("<p>**word**")
    assert final.startswith("<p><strong>word</strong>")
