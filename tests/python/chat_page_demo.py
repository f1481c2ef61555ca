#!/usr/bin/env python3
"""The chat page with `quern serve` and the demo model behind it: asks a sum, then a question that needs a tool, and gives the tool's result.

  chat_page_demo.py --quern PROGRAM --model models/quern-demo --chromium PROGRAM [--screenshot docs/images/chat-page.png]

Fails when an answer is wrong. Exit status 77 (CTest: skipped) without Chromium. The picture is taken of this conversation.
"""

import argparse
import json
import os
import re
import subprocess
import sys

from chromium import Browser

TOOLS = [{"type": "function", "function": {"name": "translate", "description": "Translate a text", "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}, "language": {"type": "string"}}, "required": ["text", "language"]}}},
    {"type": "function", "function": {"name": "get_weather", "description": "Get the current weather of a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


def expect(what, found, wanted):
    print(f"{what}: {found!r}")
    if found != wanted:
        sys.exit(f"{what}: expected {wanted!r}")


def ask(tab, text):
    answers = tab.js("document.querySelectorAll('.assistant').length")
    tab.js("document.querySelector('#input').focus()")
    tab.type(text)
    tab.key("Enter")
    tab.wait(f"document.querySelectorAll('.assistant').length > {answers}")
    tab.wait("document.querySelector('#send').textContent === 'Send'")


def converse(tab, url, screenshot):
    tab.resize(1000, 680)
    tab.open(url)
    tab.wait("document.title !== 'quern'")
    last = "document.querySelector('.assistant:last-child .content').innerText"
    tab.click("#open-settings")
    tab.js("document.querySelector('#set-temperature').value = '0'")
    tab.click("#close-settings")
    ask(tab, "What is 17 + 25?")
    expect("sum", tab.js(last), "17 + 25 = 42")
    figures = tab.js("document.querySelector('.assistant:last-child .figures').innerText")
    print("figures:", figures)
    if not re.search(r"tok/s · first token after .* cached", figures):
        sys.exit(f"the figures are not complete: {figures}")
    tab.click("#new-chat")
    tab.click("#open-settings")
    tab.js("document.querySelector('#set-tools').value = " + json.dumps(json.dumps(TOOLS)))
    tab.click("#close-settings")
    ask(tab, "Is it raining in Santiago?")
    expect("function", tab.js("document.querySelector('.call code')?.innerText"), "get_weather")
    expect("arguments", tab.js("JSON.parse(document.querySelector('.call pre').innerText)"), {"city": "Santiago"})
    tab.click(".call textarea")
    tab.type('{"weather": "rainy", "temperature": 12}')
    tab.click(".calls button")
    tab.wait("document.querySelectorAll('.assistant').length === 2")
    tab.wait("document.querySelector('#send').textContent === 'Send'")
    expect("answer", tab.js(last), "It is 12 degrees and rainy in Santiago.")
    if tab.complaints:
        sys.exit(f"the console is not silent: {tab.complaints}")
    if screenshot:
        tab.js("document.activeElement.blur()")
        with open(screenshot, "wb") as file:
            file.write(tab.screenshot())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--quern", "--model"):
        parser.add_argument(name, required=True)
    parser.add_argument("--chromium", default="")
    parser.add_argument("--screenshot")
    arguments = parser.parse_args()
    if not arguments.chromium or not os.path.exists(arguments.chromium):  # also where it went after CMake had found it
        print("SKIPPED: there is no Chromium, so the chat page was NOT tested (Debian: apt-get install chromium)", file=sys.stderr)
        sys.exit(77)
    server = subprocess.Popen([arguments.quern, "serve", arguments.model, "--port", "0", "--max-num-seqs", "4", "--max-model-len", "4096", "--threads", "2",
                               "--kv-cache-memory-bytes", "128M", "--served-model-name", "quern-demo", "--disable-access-log"],
                              stderr=subprocess.PIPE, text=True)
    browser = None
    try:
        url = next(found.group(1) for line in server.stderr if (found := re.search(r"a page to talk to it: (http://\S+)", line)))
        browser = Browser(arguments.chromium)
        converse(browser.new_tab(), url, arguments.screenshot)
    finally:
        if browser:
            browser.close()
        server.terminate()
        server.communicate()
    if server.returncode != 0:
        sys.exit(f"the server ended with {server.returncode}")


if __name__ == "__main__":
    main()
