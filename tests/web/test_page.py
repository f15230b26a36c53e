"""The page in a real browser: bars move, a limit holds, the dead vanish, everybody can use it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from kvtide.units import MIB

pytestmark = pytest.mark.web

AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
SHOTS = os.environ.get("SCREENSHOTS")


def until(browser, true, what, seconds=30):
    return WebDriverWait(browser, seconds, poll_frequency=0.05).until(lambda _: true(), what)


def row(browser, name):
    found = browser.find_elements(By.CSS_SELECTOR, f"tr[data-instance='{name}']")
    return found[0] if found else None


def cell(browser, name, kind):
    return row(browser, name).find_element(By.CLASS_NAME, f"is-{kind}").text


def width(browser, kind):
    """Of the device's bar, in pixels."""
    script = f"""
        const found = document.querySelectorAll(".device > .bar > .{kind}");
        return [...found].reduce((sum, e) => sum + e.getBoundingClientRect().width, 0);
    """
    return browser.execute_script(script)


def hue(browser, name):
    """The class of an instance's colour: who was seen first has the first one."""
    script = """
        const items = [...document.querySelectorAll(".legend li")];
        return items.find((e) => e.textContent === arguments[0]).firstChild.classList[1];
    """
    return browser.execute_script(script, name)


def console_errors(browser):
    return [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]


def serious(browser):
    """What axe-core finds that keeps somebody from using the page."""
    browser.execute_script(AXE.read_text())
    found = browser.execute_async_script(
        "const done = arguments[0]; axe.run(document).then(done, (e) => done(String(e)))"
    )
    assert found["passes"]
    bad = [(v["id"], v["impact"], [n["html"] for n in v["nodes"]]) for v in found["violations"]]
    return [v for v in bad if v[1] in ("serious", "critical")]


@pytest.fixture
def page(browser, served, world):
    world.engine("chat").hold(40, 60, 4)
    world.engine("code", limit_bytes=128 * MIB).hold(10, 0, 0)
    console_errors(browser)  # those of the test before
    browser.get(served.address)
    until(browser, lambda: row(browser, "code"), "both instances are shown")
    yield browser
    found = console_errors(browser)
    # A page whose server is gone would ask for it again and again, into the next test's console.
    browser.get("about:blank")
    assert found == []


def test_bars_and_figures_follow_what_engines_do(page, world):
    assert cell(page, "chat", "used") == "40 MiB"
    assert cell(page, "chat", "cached") == "60 MiB"
    before = width(page, "hue1")
    world.engines["code"].hold(80, 10, 0)
    until(page, lambda: cell(page, "code", "used") == "80 MiB", "the figure has moved")
    until(page, lambda: width(page, "hue1") > 5 * before, "the bar has moved")
    label = page.find_element(By.CSS_SELECTOR, ".device > .bar").get_attribute("aria-label")
    assert "code 90 MiB" in label
    texts = [e.text for e in page.find_elements(By.CSS_SELECTOR, "#events td:last-child")]
    assert any("grows by 80MiB" in text for text in texts), texts


def test_a_limit_set_by_keyboard_alone_holds_in_the_ledger(page, world):
    assert "token" not in page.current_url
    field = row(page, "chat").find_element(By.TAG_NAME, "input")
    field.click()
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("96MiB", Keys.ENTER)
    notice = page.find_element(By.ID, "notice")
    until(page, lambda: "96MiB" in notice.text, "the page says that it is done")
    assert world.engines["chat"].instance.limit_bytes == 96 * MIB
    marks = "return document.querySelectorAll(\"tr[data-instance='chat'] .limit\").length"
    until(page, lambda: page.execute_script(marks) >= 1, "the limit is marked")


def test_a_limit_changed_elsewhere_meanwhile_is_not_overwritten(page, world):
    page.execute_script("document.querySelector(\"tr[data-instance='chat']\").dataset.revision=7")
    # As if the page had not been told yet: its next view would mend it, so at once.
    page.execute_script(
        """
        const row = document.querySelector("tr[data-instance='chat']");
        row.dataset.revision = 7;
        row.querySelector("input").value = "64MiB";
        row.querySelector("form").requestSubmit();
        """
    )
    notice = page.find_element(By.ID, "notice")
    until(page, lambda: "revision" in notice.text, "the page says that it is stale")
    assert world.engines["chat"].instance.limit_bytes is None
    # The browser itself logs the refusal; that is no fault of the page.
    assert all("409" in line["message"] for line in console_errors(page))


def test_without_the_token_nothing_changes(page, world):
    token = page.find_element(By.ID, "token")
    token.clear()
    token.send_keys("guess")
    field = row(page, "chat").find_element(By.TAG_NAME, "input")
    field.clear()
    field.send_keys("96MiB", Keys.ENTER)
    notice = page.find_element(By.ID, "notice")
    until(page, lambda: "token" in notice.text, "the page says why")
    assert world.engines["chat"].instance.limit_bytes is None
    page.execute_script("sessionStorage.clear()")
    assert all("401" in line["message"] for line in console_errors(page))


def test_an_instance_that_ends_vanishes(page, world):
    world.end("chat")
    until(page, lambda: row(page, "chat") is None, "its row is gone")
    until(page, lambda: width(page, "hue0") == 0, "its part of the bar is gone")
    texts = [e.text for e in page.find_elements(By.CSS_SELECTOR, "#events td:last-child")]
    assert any("is gone" in text for text in texts)


def test_axe_finds_nothing_serious(page, world):
    world.engines["chat"].hold(60, 60, 4)
    until(page, lambda: cell(page, "chat", "used") == "60 MiB", "the figure has moved")
    assert serious(page) == []
    if SHOTS:
        page.save_screenshot(str(Path(SHOTS) / f"paper-{page.kvtide_scheme}.png"))


def test_all_controls_can_be_reached_by_tab(page):
    reached = []
    page.find_element(By.TAG_NAME, "body").click()
    for _ in range(14):
        page.switch_to.active_element.send_keys(Keys.TAB)
        active = page.switch_to.active_element
        reached.append(
            active.get_attribute("aria-label") or active.text or active.get_attribute("id")
        )
    assert any(r.startswith("Limit of chat") for r in reached), reached
    assert any(r.startswith("Set the limit of code") for r in reached), reached


def test_trim_asks_the_engine(page, world):
    row(page, "chat").find_element(By.CLASS_NAME, "trim").click()
    notice = page.find_element(By.ID, "notice")
    # This one is on paper and does not answer.
    until(page, lambda: "chat gave back 0 B" in notice.text, "the page says what came of it")
    ledger = world.ledger
    assert ledger.is_trimming(world.engines["chat"].instance.key)


def edit(page, name):
    row(page, name).find_element(By.CLASS_NAME, "terms").click()
    return {
        term: page.find_element(By.ID, f"terms-{term}")
        for term in ("limit", "min", "priority", "headroom")
    }


def test_terms_are_edited_by_keyboard_alone(page, world):
    row(page, "code").find_element(By.CLASS_NAME, "terms").send_keys(Keys.ENTER)
    dialog = page.find_element(By.ID, "terms")
    assert page.find_element(By.ID, "terms-title").text == "Terms of code"
    assert page.switch_to.active_element.get_attribute("id") == "terms-limit"
    for text in ("none", "32MiB", "-2", "16MiB"):
        page.switch_to.active_element.send_keys(Keys.CONTROL, "a")
        page.switch_to.active_element.send_keys(text, Keys.TAB)
    assert page.switch_to.active_element.text == "Set"
    page.switch_to.active_element.send_keys(Keys.ENTER)
    until(page, lambda: not dialog.is_displayed(), "the dialog is gone")
    (terms,) = (i.terms for i in world.ledger.snapshot().instances if i.name == "code")
    assert terms == (None, 32 * MIB, -2, 16 * MIB)
    shown = "min 32 MiB, priority -2, headroom 16 MiB"
    until(page, lambda: cell(page, "code", "terms") == shown, "the row shows them")
    marks = "return document.querySelectorAll(\"tr[data-instance='code'] .min\").length"
    assert page.execute_script(marks) == 1
    assert page.switch_to.active_element.get_attribute("aria-label").startswith("Edit the terms")


def test_terms_changed_elsewhere_meanwhile_are_not_overwritten(page, world):
    fields = edit(page, "chat")
    world.ledger.set_terms("chat", lambda terms: terms._replace(priority=7))
    until(page, lambda: cell(page, "chat", "terms") == "priority 7", "the page knows already")
    assert fields["priority"].get_attribute("value") == "0"
    fields["min"].clear()
    fields["min"].send_keys("8MiB", Keys.ENTER)
    said = page.find_element(By.ID, "terms-notice")
    until(page, lambda: "revision" in said.text, "the dialog says that it is stale")
    fields["min"].send_keys(Keys.ESCAPE)
    until(page, lambda: not page.find_element(By.ID, "terms").is_displayed(), "it is left")
    (terms,) = (i.terms for i in world.ledger.snapshot().instances if i.name == "chat")
    assert (terms.min_bytes, terms.priority) == (0, 7)
    assert edit(page, "chat")["priority"].get_attribute("value") == "7"
    assert all("409" in line["message"] for line in console_errors(page))


def test_terms_that_cannot_be_had_say_why_beside_the_fields(page, world):
    fields = edit(page, "chat")
    fields["min"].clear()
    fields["min"].send_keys("1TiB", Keys.ENTER)
    said = page.find_element(By.ID, "terms-notice")
    until(page, lambda: "budget" in said.text, "the dialog says why")
    assert serious(page) == []
    page.find_element(By.ID, "terms-leave").click()
    assert not page.find_element(By.ID, "terms").is_displayed()
    assert all("404" in line["message"] for line in console_errors(page))
