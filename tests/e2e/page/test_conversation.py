"""The page against a real server and a real model: what a person does with it, and what it must not lose."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.e2e.page.conftest import KNOWN_ANSWERS
from tests.e2e.server import ServerProcess

pytestmark = pytest.mark.browser

LONG = "Write a very long story about a lighthouse keeper. Do not stop."


@pytest.fixture
def chat(page: Page, server: ServerProcess) -> Iterator[Page]:
    """The page, open, without conversations, and ready for a message."""
    delete_all(server)
    page.add_init_script(KNOWN_ANSWERS)
    page.goto(server.url)
    expect(page.get_by_label("Your message")).to_be_visible()
    expect(page.locator(".notice")).to_have_count(0, timeout=60_000)
    yield page
    # What the test left running ends with it.
    delete_all(server)


def call(server: ServerProcess, path: str, method: str = "GET") -> Any:
    with urllib.request.urlopen(urllib.request.Request(server.url + path, method=method)) as answer:
        return json.load(answer)


def delete_all(server: ServerProcess) -> None:
    for conversation in call(server, "/v1/conversations?limit=100")["data"]:
        call(server, f"/v1/conversations/{conversation['id']}", "DELETE")


def say(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def last_answer(page: Page) -> Any:
    return page.locator(".answer").last


def wait_until_done(page: Page) -> None:
    expect(last_answer(page)).to_have_attribute("data-phase", "ended", timeout=120_000)


def wait_until_writing(page: Page, words: int = 8) -> str:
    """The text shown once there are some words of it and more are coming."""
    count = "(document.querySelector('.answer:last-child .prose')?.innerText ?? '').split(/\\s+/).length"
    page.wait_for_function(f"(words) => {count} > words", arg=words, timeout=60_000)
    expect(last_answer(page)).to_have_attribute("data-phase", "writing")
    return last_answer(page).locator(".prose").inner_text()


def stored_text(server: ServerProcess, page: Page) -> str:
    """The last answer as the server has it."""
    conversation = page.evaluate("decodeURIComponent(location.hash.slice(1))")
    items = call(server, f"/v1/conversations/{conversation}/items?order=desc&limit=1")["data"]
    return "".join(part["text"] for part in items[0]["content"])


def shown_as(page: Page, source: str) -> str:
    """How the page shows a text, as one string of markup."""
    return page.evaluate(
        """async (source) => {
            const { blocksOf } = await import("/static/js/markdown.js");
            return blocksOf(source).map(({ html }) => `<div class="block">${html}</div>`).join("");
        }""",
        source,
    )


def shown(page: Page) -> str:
    return last_answer(page).locator(".prose").inner_html()


def test_an_answer_is_streamed_and_says_paris(chat: Page, server: ServerProcess) -> None:
    say(chat, "What is the capital of France?")
    expect(chat.locator(".question")).to_have_text(re.compile("What is the capital of France?"))
    wait_until_done(chat)
    expect(last_answer(chat)).to_contain_text("Paris")
    assert shown(chat) == shown_as(chat, stored_text(server, chat))
    expect(last_answer(chat).locator(".usage")).to_have_text(
        re.compile(r"^\d+ tokens read, \d+ from the cache · \d+ written · first after \d+\.\d\d s")
    )
    expect(chat.get_by_role("status")).to_have_text("The answer is complete.")


def test_a_later_turn_reads_the_history_from_the_cache(chat: Page) -> None:
    say(chat, "What is the capital of France?")
    wait_until_done(chat)
    say(chat, "And of Italy?")
    expect(chat.locator(".answer")).to_have_count(2)
    wait_until_done(chat)
    read, cached = re.findall(r"\d+", last_answer(chat).locator(".usage").inner_text())[:2]
    assert 0 < int(read) - int(cached) < 20
    assert int(cached) > 20


def test_shift_enter_makes_a_line_and_enter_sends(chat: Page) -> None:
    area = chat.get_by_label("Your message")
    area.fill("First line")
    area.press("Shift+Enter")
    area.type("second line")
    expect(chat.locator(".question")).to_have_count(0)
    area.press("Enter")
    expect(chat.locator(".question p")).to_have_text("First line\nsecond line", use_inner_text=True)
    expect(area).to_have_value("")


def test_stop_ends_the_answer_and_keeps_what_there_is(chat: Page, server: ServerProcess) -> None:
    say(chat, LONG)
    begun = wait_until_writing(chat)
    chat.get_by_role("button", name="Stop").click()
    wait_until_done(chat)
    expect(last_answer(chat).locator(".note")).to_have_text("Stopped.")
    expect(chat.get_by_role("button", name="Send")).to_be_visible()
    expect(chat.get_by_label("Your message")).to_be_focused()
    assert last_answer(chat).locator(".prose").inner_text().startswith(begun[:20])
    before = shown(chat)
    chat.reload()
    expect(last_answer(chat).locator(".note")).to_be_visible()
    assert shown(chat) == before == shown_as(chat, stored_text(server, chat))


def test_a_reload_in_the_middle_of_an_answer_goes_on_with_it(chat: Page, server: ServerProcess) -> None:
    say(chat, LONG)
    begun = wait_until_writing(chat)
    chat.reload()
    expect(chat.locator(".question")).to_have_text(re.compile("lighthouse"))
    assert wait_until_writing(chat).startswith(begun[:40])
    wait_until_writing(chat, words=len(begun.split()) + 8)
    chat.get_by_role("button", name="Stop").click()
    wait_until_done(chat)
    expect(chat.locator(".question")).to_have_count(1)
    expect(chat.locator(".answer")).to_have_count(1)
    assert shown(chat) == shown_as(chat, stored_text(server, chat))


def test_a_lost_connection_is_told_and_the_answer_goes_on(chat: Page, server: ServerProcess) -> None:
    say(chat, LONG)
    begun = wait_until_writing(chat)
    chat.evaluate("sockets.at(-1).close()")
    expect(chat.locator(".notice")).to_have_text("Connection lost. Trying again…")
    expect(chat.locator(".notice")).to_have_count(0)
    wait_until_writing(chat, words=len(begun.split()) + 8)
    chat.get_by_role("button", name="Stop").click()
    wait_until_done(chat)
    expect(chat.locator(".answer")).to_have_count(1)
    assert shown(chat) == shown_as(chat, stored_text(server, chat))


def test_a_second_tab_sees_the_same_answer(chat: Page, context: BrowserContext) -> None:
    say(chat, LONG)
    wait_until_writing(chat)
    other = context.new_page()
    other.goto(chat.url)
    wait_until_writing(other)
    chat.get_by_role("button", name="Stop").click()
    wait_until_done(chat)
    wait_until_done(other)
    assert shown(other) == shown(chat)


def test_two_conversations_are_answered_at_once(chat: Page) -> None:
    say(chat, LONG)
    wait_until_writing(chat)
    first = chat.url
    chat.get_by_role("button", name="New chat").click()
    say(chat, "What is the capital of France?")
    wait_until_done(chat)
    expect(last_answer(chat)).to_contain_text("Paris")
    assert chat.url != first
    chat.go_back()
    expect(chat).to_have_url(first)
    chat.get_by_role("button", name="Stop").click()
    wait_until_done(chat)
    expect(last_answer(chat).locator(".note")).to_have_text("Stopped.")


def test_markup_in_a_message_is_text(chat: Page) -> None:
    attack = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script> <b>bold</b>'
    say(chat, attack)
    expect(chat.locator(".question p")).to_have_text(attack)
    wait_until_done(chat)
    chat.reload()
    expect(chat.locator(".question p")).to_have_text(attack)
    expect(chat.locator(".entry-title").first).to_contain_text("<img src=x")
    assert chat.evaluate("window.pwned ?? null") is None
    assert chat.locator("#app script, #app img").count() == 0


def test_conversations_are_listed_renamed_and_deleted(chat: Page) -> None:
    say(chat, "What is the capital of France?")
    wait_until_done(chat)
    expect(chat.locator(".entry-title")).to_have_text(["What is the capital of France?"])
    chat.get_by_role("button", name="New chat").click()
    expect(chat.locator(".question")).to_have_count(0)
    say(chat, "Say hello.")
    wait_until_done(chat)
    expect(chat.locator(".entry-title")).to_have_text(["Say hello.", "What is the capital of France?"])

    chat.get_by_role("button", name="Rename").click()
    chat.keyboard.type("Greetings")
    chat.keyboard.press("Enter")
    expect(chat.locator(".entry-title").first).to_have_text("Greetings")
    chat.reload()
    expect(chat.locator("h1.title")).to_have_text("Greetings")
    expect(chat.locator(".question")).to_have_count(1)

    chat.get_by_role("button", name="Delete").click()
    chat.get_by_role("button", name="Keep it").click()
    expect(chat.locator(".entry")).to_have_count(2)
    chat.get_by_role("button", name="Delete").click()
    chat.locator("dialog").get_by_role("button", name="Delete").click()
    expect(chat.locator(".entry-title")).to_have_text(["What is the capital of France?"])
    chat.reload()
    expect(chat.locator(".entry-title")).to_have_text(["What is the capital of France?"])


def test_a_refused_message_comes_back_with_the_reason(chat: Page) -> None:
    long = "word " * 9000
    say(chat, long)
    expect(chat.get_by_role("alert")).to_contain_text("Not sent.")
    expect(chat.get_by_label("Your message")).to_have_value(long.strip())
    expect(chat.locator(".question")).to_have_count(0)
    say(chat, "Say hello.")
    wait_until_done(chat)
    expect(chat.get_by_role("alert")).to_have_count(0)


def test_what_was_typed_survives_a_reload(chat: Page) -> None:
    chat.get_by_label("Your message").fill("half a thought")
    chat.reload()
    expect(chat.get_by_label("Your message")).to_have_value("half a thought")


def test_a_reader_who_scrolled_up_stays_there_until_asked(chat: Page) -> None:
    chat.set_viewport_size({"width": 700, "height": 320})
    say(chat, LONG)
    scroller = "document.querySelector('.scroller')"
    at_the_end = f"() => {scroller}.scrollHeight - {scroller}.scrollTop - {scroller}.clientHeight < 48"
    chat.wait_for_function(f"() => {scroller}.scrollHeight > {scroller}.clientHeight + 150")
    chat.wait_for_function(at_the_end)
    chat.locator(".scroller").hover()
    chat.mouse.wheel(0, -120)
    expect(chat.get_by_role("button", name="Latest")).to_be_visible()
    place = chat.evaluate(f"{scroller}.scrollTop")
    height = chat.evaluate(f"{scroller}.scrollHeight")
    chat.wait_for_function(f"(height) => {scroller}.scrollHeight > height", arg=height)
    assert chat.evaluate(f"{scroller}.scrollTop") == place
    chat.get_by_role("button", name="Latest").click()
    chat.wait_for_function(at_the_end)
    expect(chat.get_by_role("button", name="Latest")).to_have_count(0)


def test_the_page_says_that_the_model_is_loading(page: Page, server: ServerProcess) -> None:
    def loading(route: Route) -> None:
        route.fulfill(status=503, json={"status": "loading", "stage": "weights", "fraction": 0.4})

    page.route("**/readyz", loading)
    page.goto(server.url)
    expect(page.locator(".notice")).to_have_text("Loading the model… 40%")
    page.get_by_label("Your message").fill("Hello")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page.unroute("**/readyz")
    expect(page.locator(".notice")).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_the_page_asks_for_a_key_and_goes_on_with_the_right_one(page: Page, server: ServerProcess) -> None:
    """The server of these tests has no key; its refusals are put in front of it."""
    refusal = {
        "error": {"message": "An API key is needed.", "code": "invalid_api_key", "type": "x", "param": None}
    }

    def check_key(route: Route) -> None:
        if route.request.post_data_json["key"] == "right":
            page.unroute("**/v1/models")
            route.fulfill(status=200, json={"object": "login", "signed_in": True})
        else:
            route.fulfill(status=401, json=refusal)

    page.route("**/v1/models", lambda route: route.fulfill(status=401, json=refusal))
    page.route("**/login", check_key)
    page.goto(server.url)
    field = page.get_by_label("API key")
    field.fill("wrong")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("That key is not known here.")
    field.fill("right")
    field.press("Enter")
    expect(page.get_by_label("Your message")).to_be_visible()
    expect(page.locator(".notice")).to_have_count(0)
    kept = page.evaluate("JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie])")
    assert "right" not in kept


def test_a_phone_shows_the_contents_on_demand(chat: Page) -> None:
    say(chat, "Say hello.")
    wait_until_done(chat)
    chat.set_viewport_size({"width": 390, "height": 780})
    assert chat.evaluate("document.documentElement.scrollWidth") <= 390
    expect(chat.locator(".entry")).not_to_be_visible()
    chat.get_by_role("button", name="Open the list of conversations").click()
    expect(chat.locator(".entry")).to_be_visible()
    chat.locator(".entry").click()
    expect(chat.locator(".entry")).not_to_be_visible()
