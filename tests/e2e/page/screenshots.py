"""Pictures of the page for the README, from a running server: python -m tests.e2e.page.screenshots [URL]

It holds a short conversation on that server, and deletes nothing there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.e2e.page.conftest import FLAGS, KNOWN_ANSWERS, find_chromium

FOLDER = Path(__file__).parents[3] / "docs" / "img"
EARLIER = ("Hello!", "Suggest a name for a sailing boat", "Why is the sky blue?")
QUESTIONS = (
    "What is the capital of France?",
    "Which river runs through it?",
    "Show me how to read a text file in Python.",
)
DESK = {"width": 1200, "height": 800}
PHONE = {"width": 390, "height": 800}


def ask(page: Page, question: str) -> None:
    page.get_by_label("Your message").fill(question)
    page.keyboard.press("Enter")
    expect(page.locator(".answer").last).to_have_attribute("data-phase", "ended", timeout=120_000)


def main(url: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        page = browser.new_page(viewport=DESK, device_scale_factor=2, color_scheme="light")
        page.add_init_script(KNOWN_ANSWERS)
        page.goto(url)
        expect(page.locator(".notice")).to_have_count(0, timeout=120_000)
        for question in EARLIER:
            ask(page, question)
            page.get_by_role("button", name="New chat").click()
        for question in QUESTIONS:
            ask(page, question)
        page.locator(".scroller").evaluate("element => (element.scrollTop = 0)")
        page.wait_for_timeout(300)
        page.screenshot(path=FOLDER / "page-light.png")
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=FOLDER / "page-dark.png")
        page.set_viewport_size(PHONE)
        page.wait_for_timeout(300)
        page.screenshot(path=FOLDER / "page-phone.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
