#!/usr/bin/env python3
"""The chat page in a headless Chromium.

  chat_page_test.py --server PROGRAM --chromium PROGRAM      PROGRAM is page_server, which a test tells what to answer

Exit status 77 (CTest: skipped) without Chromium. Every test also asserts that the console stayed silent and that no other host was asked.
"""

import argparse
import json
import os
import subprocess
import sys
import unittest
import urllib.request

from chromium import SHIFT, Browser

SERVER = CHROMIUM = ""
WEATHER = [{"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
CALL = "I should look.\n</think>\n\nOne moment.\n<tool_call>\n<function=weather>\n<parameter=city>\nSão Paulo\n</parameter>\n</function>\n</tool_call>"


class Server:
    def __init__(self, *arguments):
        self.process = subprocess.Popen([SERVER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}/"

    def tell(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the server has ended")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class ChatPage(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = Browser(CHROMIUM)

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()

    def setUp(self):
        self.server = None
        self.tab = self.browser.new_tab()
        self.expected_complaints = ()  # texts of which each complaint has one

    def tearDown(self):
        self.tab.js("new Promise((resolve) => setTimeout(resolve, 0))")  # what is on its way has arrived
        complaints = [text for text in self.tab.complaints if not any(expected in text for expected in self.expected_complaints)]
        others = [url for url in self.tab.requests if not url.startswith((self.server.url, "about:"))]
        self.tab.close()
        self.server.close()
        self.assertEqual(complaints, [])
        self.assertEqual(others, [])

    # What a person does.

    def open(self, *arguments):
        self.server = Server(*arguments)
        self.visit()

    def visit(self):
        self.tab.open(self.server.url)
        self.tab.wait("document.title !== 'quern'")  # the model is known

    def ask(self, text):
        self.tab.js("document.querySelector('#input').focus()")
        self.tab.type(text)
        self.tab.key("Enter")
        self.tab.wait("document.querySelector('#log .assistant:last-child') !== null")

    def wait_for_answer(self):
        self.tab.wait("document.querySelector('#send').textContent === 'Send'")

    def text(self, selector):
        return self.tab.js(f"document.querySelector({json.dumps(selector)})?.innerText")

    def texts(self, selector):
        return self.tab.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.innerText)")

    def count(self, selector):
        return self.tab.js(f"document.querySelectorAll({json.dumps(selector)}).length")

    def focused(self):
        return self.tab.js("document.activeElement.id || document.activeElement.textContent")

    def set_settings(self, **values):
        if not self.tab.js("document.querySelector('#settings').open"):
            self.tab.click("#open-settings")
        for name, value in values.items():
            self.tab.js(f"(() => {{ const field = document.querySelector('#set-{name}'); field.value = {json.dumps(value)};"
                        " field.dispatchEvent(new Event('input', {bubbles: true})); })()")
        self.tab.click("#close-settings")

    # Answers

    def test_an_answer_appears_while_it_is_made_with_reasoning_folded_and_figures(self):
        self.open()
        self.server.tell(say=["A secret thought.\n</think>\n\nFirst the **bold** part, then the rest."], hold=True)
        self.ask("Say something")
        self.server.tell(permit=3)
        self.tab.wait("document.querySelector('.reasoning summary')?.textContent === 'Thinking…'")
        self.assertEqual(self.text("#send"), "Stop")
        self.server.tell(permit=6)
        self.tab.wait("document.querySelector('.content').innerText.includes('First')")
        partial = self.text(".content")
        self.assertNotIn("rest", partial)
        self.assertFalse(self.tab.js("document.querySelector('.reasoning').open"))
        self.assertNotIn("secret", self.text("#log"))
        self.server.tell(run=True)
        self.wait_for_answer()
        self.assertEqual(self.text(".content"), "First the bold part, then the rest.")
        self.assertTrue(self.text(".content").startswith(partial.rstrip("*… ")[:5]))
        self.assertEqual(self.text(".content strong"), "bold")
        self.assertRegex(self.text(".reasoning summary"), r"^Thought for [\d.]+ m?s$")
        self.assertRegex(self.text(".figures"), r"^\d+ tokens · [\d.]+ tok/s · first token after [\d.]+ m?s · prompt \d+ tokens, 3 cached$")
        self.tab.click(".reasoning summary")
        self.tab.wait("document.querySelector('.reasoning').innerText.includes('A secret thought.')")
        self.assertEqual(self.text("#model-name"), "scripted")
        self.assertEqual(self.text("#model-about"), "4,096 tokens of context")

    def test_stop_ends_the_answer_here_and_on_the_server(self):
        self.open()
        self.server.tell(say=["</think>\n\n" + "word " * 50], hold=True)
        self.ask("Go on for ever")
        self.server.tell(permit=12)
        self.tab.wait("document.querySelector('.content').innerText.includes('word')")
        self.tab.click("#send")
        self.wait_for_answer()
        self.assertTrue(self.server.tell(idle=True)["idle"], "the server goes on with an answer that nobody wants")
        self.assertTrue(self.text(".content").startswith("word"))
        self.assertTrue(self.text(".figures").endswith("stopped"))
        self.server.tell(say=["</think>\n\nNext."], run=True)
        self.ask("And now?")
        self.wait_for_answer()
        self.assertEqual(self.text(".assistant:last-child .content"), "Next.")

    def test_a_tool_call_is_shown_and_its_result_given_back(self):
        self.open()
        self.set_settings(tools=json.dumps(WEATHER))
        self.server.tell(say=[CALL, "Good.\n</think>\n\nIt rains."])
        self.ask("Does it rain?")
        self.wait_for_answer()
        self.assertEqual(self.text(".content"), "One moment.")
        self.assertEqual(self.text(".call code"), "weather")
        self.assertEqual(json.loads(self.text(".call pre")), {"city": "São Paulo"})
        self.tab.click(".call textarea")
        self.tab.type("rain, 19 °C")
        self.tab.click(".calls button")
        self.tab.wait("document.querySelectorAll('.assistant').length === 2")
        self.wait_for_answer()
        self.assertEqual(self.text(".call .result"), "rain, 19 °C")
        self.assertEqual(self.text(".assistant:last-child .content"), "It rains.")
        first, second = self.server.tell(submitted=True)["submitted"]
        self.assertIn("Weather of a city", first["prompt"])
        self.assertIn("rain, 19 °C", second["prompt"])

    def test_a_list_of_tools_that_cannot_be_read_is_told(self):
        self.open()
        self.set_settings(tools="[{]")
        self.assertTrue(self.tab.js("document.querySelector('#settings').open"))
        self.assertNotEqual(self.text("#tools-fault"), "")
        self.tab.key("Escape")
        self.ask("hi")
        self.wait_for_answer()

    def test_parameters_reach_the_request_and_empty_ones_are_the_models(self):
        self.open()
        self.set_settings(temperature="0.25", top_p="0.5", top_k="7", max_tokens="33", seed="42", system="Be brief & <kind>.", thinking="off")
        self.server.tell(say=["Fine."])
        self.ask("hi")
        self.wait_for_answer()
        self.assertEqual(self.text(".content"), "Fine.")
        self.tab.click("#new-chat")
        self.set_settings(**dict.fromkeys(("temperature", "top_p", "top_k", "max_tokens", "seed", "system", "thinking"), ""))
        self.ask("hi")
        self.wait_for_answer()
        first, second = self.server.tell(submitted=True)["submitted"]
        self.assertEqual([first[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")], [0.25, 0.5, 7, 33, 42])
        self.assertIn("Be brief & <kind>.", first["prompt"])
        self.assertNotIn("Be brief", second["prompt"])
        self.assertEqual([second[name] for name in ("temperature", "top_p", "top_k")], [1, 1, 0])
        self.assertGreater(second["max_tokens"], 33)

    def test_what_the_server_refuses_is_told_in_its_words(self):
        self.open()
        self.expected_complaints = ("400",)
        self.set_settings(temperature="-1")  # the form itself refuses
        self.assertTrue(self.tab.js("document.querySelector('#settings').open"))
        self.set_settings(temperature="", max_tokens="5000")
        self.ask("hi")
        self.wait_for_answer()
        self.assertIn("4096", self.text(".message .fault"))

    def test_an_error_within_the_stream_is_told_and_what_came_before_stays(self):
        self.open()
        self.server.tell(say=["</think>\n\nHalf an ans"], fail="the device is gone")
        self.ask("hi")
        self.wait_for_answer()
        self.assertEqual(self.text(".content"), "Half an ans")
        self.assertEqual(self.text(".message .fault"), "the device is gone")

    # Text that wants to be more than text

    def test_text_that_attacks_the_page_stays_text(self):
        attacks = ["<img src=x onerror='pwned=1'>", "<script>pwned=1</script>", "<svg onload=pwned=1>", "[a](javascript:pwned=1)", "[b](data:text/html,<script>pwned=1</script>)",
                   "[c](\x01javascript:pwned=1)", "[d](JaVaScRiPt:pwned=1 \"t\")", "<javascript:pwned=1>", "![e](http://other.example/track.png)",
                   "[<img src=x onerror=pwned=1>](http://other.example/)", "`<b onmouseover=pwned=1>`", "```\"><script>pwned=1</script>\n</code></pre><script>pwned=1</script>\n```",
                   "| <iframe src='http://other.example'> | b |\n|---|---|\n| <style>*{display:none}</style> | <base href='http://other.example/'> |",
                   "http://other.example/\"onmouseover=\"pwned=1", "<a href=http://other.example>x</a> &lt;b&gt; &#x3C;"]
        text = "\n\n".join(attacks)
        call = "<tool_call>\n<function=weather>\n<parameter=city>\n<img src=x onerror=pwned=1>\n</parameter>\n</function>\n</tool_call>"
        self.open("--model", "<img src=x onerror=pwned=1>")
        self.set_settings(tools=json.dumps(WEATHER), system="<script>pwned=1</script>")
        self.server.tell(say=[f"{text}\n</think>\n\n{text}\n{call}"])
        self.ask("<img src=x onerror=pwned=1>")
        self.wait_for_answer()
        self.tab.click(".reasoning summary")
        self.tab.wait("document.querySelectorAll('.reasoning .code').length > 0")
        self.tab.click(".call textarea")
        self.tab.type("<img src=x onerror=pwned=1>")
        self.server.tell(say=["</think>\n\nok"])
        self.tab.click(".calls button")
        self.tab.wait("document.querySelectorAll('.assistant').length === 2")
        self.wait_for_answer()
        self.visit()  # and once more, from storage
        self.tab.click(".reasoning summary")
        self.tab.wait("document.querySelectorAll('.reasoning .code').length > 0")
        self.assertEqual(self.count("#log :is(img, script, svg, iframe, style, base, object, embed, link, input)"), 0)
        self.assertEqual(self.tab.js("typeof pwned"), "undefined")
        self.assertEqual(self.tab.js("[...document.querySelectorAll('*')].flatMap((e) => [...e.attributes]).filter((a) => a.name.startsWith('on')).length"), 0)
        links = self.tab.js("[...document.querySelectorAll('#log a')].map((a) => [new URL(a.href).protocol, a.rel, a.target])")
        self.assertGreater(len(links), 0)
        for protocol, rel, target in links:
            self.assertIn(protocol, ("http:", "https:", "mailto:"))
            self.assertIn("noopener", rel)
            self.assertIn("noreferrer", rel)
            self.assertEqual(target, "_blank")
        for attack in attacks[:3]:
            self.assertIn(attack, self.text(".content"))
        self.assertIn("<img", self.text(".user .text"))
        self.assertIn("<img", self.text("#model-name"))
        self.assertIn("<img", self.text("#chats .open"))
        self.assertIn("<img", self.text(".call .result"))

    def test_the_policy_lets_nothing_be_injected_or_loaded(self):
        self.open()
        with urllib.request.urlopen(self.server.url) as reply:
            policy = {rule.split()[0]: rule.split()[1:] for rule in reply.headers["Content-Security-Policy"].split(";")}
        self.assertEqual(policy["default-src"], ["'none'"])
        for rule in ("script-src", "style-src", "connect-src", "img-src"):
            self.assertEqual(policy[rule], ["'self'"], rule)
        self.assertEqual(policy["frame-ancestors"], ["'none'"])
        self.expected_complaints = ("Content Security Policy", "Trusted", "violates")
        with self.assertRaisesRegex(AssertionError, "Trusted"):
            self.tab.js("document.body.innerHTML = '<b>x</b>'")
        self.tab.js("(() => { const s = document.createElement('style'); s.textContent = 'body {display: none}'; document.head.append(s); })()")
        self.assertNotEqual(self.tab.js("getComputedStyle(document.body).display"), "none")
        self.assertTrue(self.tab.js("fetch('http://127.0.0.1:9/').then(() => false, () => true)"))
        self.tab.requests = [url for url in self.tab.requests if ":9/" not in url]

    # Markdown

    def test_markdown(self):
        cases = {
            "one\ntwo": "<p>one<br>two</p>",
            "a *b* **c** ***d*** ~~e~~ `f*g*`": "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <s>e</s> <code>f*g*</code></p>",
            "snake_case_name and 2*3*4 and 5 * 6 * 7": "<p>snake_case_name and 2<em>3</em>4 and 5 * 6 * 7</p>",
            "**bold *and em* end**": "<p><strong>bold <em>and em</em> end</strong></p>",
            "*open **both": "<p>*open **both</p>",
            r"\*not em\* \\": "<p>*not em* \\</p>",
            "# One\n### Three #\n#no": "<h2>One</h2><h4>Three</h4><p>#no</p>",
            "- a\n- b\n  - c\n    - d\n- e": "<ul><li>a</li><li>b<ul><li>c<ul><li>d</li></ul></li></ul></li><li>e</li></ul>",
            "3. x\n4. y": '<ol start="3"><li>x</li><li>y</li></ol>',
            "1. a\n   - b\n2. c": "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>",
            "1. a\n\n   more\n\n2. b": "<ol><li><p>a</p><p>more</p></li><li>b</li></ol>",
            "text\n- item": "<p>text</p><ul><li>item</li></ul>",
            "> a\n> > b\n\nc": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
            "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
            "see https://a.example/x_(y)_z. Or <https://b.example>.": '<p>see <a href="https://a.example/x_(y)_z">https://a.example/x_(y)_z</a>. Or <a href="https://b.example/">https://b.example</a>.</p>',
            "[t *e*](https://a.example/b \"title\") [n](/relative)": '<p><a href="https://a.example/b">t <em>e</em></a> [n](/relative)</p>',
            "![pic](https://a.example/p.png)": '<p><a href="https://a.example/p.png">pic</a></p>',
            "|a|b|\n|:-:|--:|\n|1|`x\\|y`|\n|2|": "<table><thead><tr><th class=\"center\">a</th><th class=\"right\">b</th></tr></thead><tbody><tr><td class=\"center\">1</td><td class=\"right\"><code>x|y</code></td></tr>"
                                                 "<tr><td class=\"center\">2</td><td class=\"right\"></td></tr></tbody></table>",
            "```py\na = 1\n\n  b\n```\nafter": "[py|a = 1\n\n  b]<p>after</p>",
            "- x\n  ```\n  code\n  ```": "<ul><li>x[|code]</li></ul>",
            "~~~\n```\n~~~": "[|```]",
            "```\nstill open": "[|still open]",
            "a | b": "<p>a | b</p>",
            "``a ` b``": "<p><code>a ` b</code></p>",
            "": "",
        }
        self.open()
        script = """(async () => {
          const { MarkdownView } = await import(new URL('page/markdown.js', document.baseURI));
          return CASES.map((text) => {
            const place = document.createElement('div');
            new MarkdownView(place).show(text);
            for (const block of place.querySelectorAll('.code'))
              block.replaceWith(`[${block.querySelector('span').textContent}|${block.querySelector('code').textContent}]`);
            for (const table of place.querySelectorAll('.table')) table.replaceWith(...table.childNodes);
            for (const link of place.querySelectorAll('a')) { link.removeAttribute('rel'); link.removeAttribute('target'); }
            for (const cell of place.querySelectorAll('[class=""]')) cell.removeAttribute('class');
            return place.innerHTML;
          });
        })()"""
        for text, html in zip(cases, self.tab.js(script.replace("CASES", json.dumps(list(cases))))):
            self.assertEqual(html, cases[text], text)

    def test_markdown_that_grows_is_the_markdown_of_the_whole_and_keeps_its_nodes(self):
        text = "# Title\n\nA *paragraph* with `code`.\n\n- one\n- two\n  - three\n\n```js\nlet x = 1;\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> said\n\nEnd."
        self.open()
        self.assertEqual(self.tab.js("""(async () => {
          const { MarkdownView } = await import(new URL('page/markdown.js', document.baseURI));
          const growing = document.createElement('div'), view = new MarkdownView(growing), faults = [];
          let first = null;
          for (let n = 0; n <= TEXT.length; ++n) {
            view.show(TEXT.slice(0, n));
            const whole = document.createElement('div');
            new MarkdownView(whole).show(TEXT.slice(0, n));
            if (whole.innerHTML !== growing.innerHTML) faults.push(n);
            if (n === 10) first = growing.firstChild;
          }
          if (growing.firstChild !== first) faults.push('the heading was made anew');
          return faults;
        })()""".replace("TEXT", json.dumps(text))), [])

    def test_markdown_ends_on_every_text(self):
        n = 50000
        texts = ["*" * n, "**a" * n, "_a_" * n, "[" * n + "]", "`" * n, "` `` " * n, ">" * n, "- " * n, "  - a\n" * n, "\n".join(" " * (i % 60) + "- x" for i in range(5000)), "|" * n + "\n" + "|-" * n,
                 "a|b\n|-|-|\n" + "|x\n" * 5000, "# " + "#" * n + " x", "http://" * 5000, "<" * n, "![" * n, "\\" * n, "~~" * n, "\n" * n, "```\n" * 5000, "1. " * n, "*a **b " * 10000, " " * n + "x", "- - - - " * 5000 + "x"]
        self.open()
        self.assertEqual(self.tab.js("""(async () => {
          const { MarkdownView } = await import(new URL('page/markdown.js', document.baseURI));
          return TEXTS.map((text) => {
            const place = document.createElement('div');
            try {
              new MarkdownView(place).show(text);
            } catch (fault) {
              throw new Error(`${text.slice(0, 20)}: ${fault}`);
            }
            return place;
          }).length;
        })()""".replace("TEXTS", json.dumps(texts))), len(texts))

    def test_code_can_be_copied(self):
        self.open()
        self.browser.call("Browser.grantPermissions", browserContextId=self.tab.context, permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        self.server.tell(say=["</think>\n\n```sh\necho '<hi>'\nexit\n```"])
        self.ask("code")
        self.wait_for_answer()
        self.tab.click(".code-head button")
        self.tab.wait("document.querySelector('.code-head button').textContent === 'Copied'")
        self.assertEqual(self.tab.js("navigator.clipboard.readText()"), "echo '<hi>'\nexit")

    # Chats

    def test_chats_are_kept_opened_and_deleted(self):
        self.open()
        self.server.tell(say=["</think>\n\nFirst answer.", "</think>\n\nSecond answer."])
        self.ask("First question")
        self.wait_for_answer()
        self.tab.click("#new-chat")
        self.assertEqual(self.count("#log article"), 0)
        self.ask("Second question")
        self.wait_for_answer()
        self.visit()
        self.assertEqual(self.texts("#chats .open"), ["Second question", "First question"])
        self.assertEqual(self.text(".content"), "Second answer.")
        self.tab.click("#chats li:last-child .open")
        self.assertEqual(self.text(".content"), "First answer.")
        self.assertEqual(self.text("[aria-current]"), "First question")
        self.tab.click("#chats li:last-child .remove")
        self.tab.wait("document.querySelectorAll('#chats li').length === 1")
        self.assertIn("First question", self.tab.dialog_texts[0])
        self.visit()
        self.assertEqual(self.texts("#chats .open"), ["Second question"])
        self.assertNotIn("First answer", self.tab.js("JSON.stringify(localStorage)"))

    def test_an_answer_goes_on_while_another_chat_is_read(self):
        self.open()
        self.server.tell(say=["</think>\n\nA long one."], hold=True)
        self.ask("Background")
        self.tab.click("#new-chat")
        self.assertEqual(self.text("#send"), "Send")
        self.server.tell(run=True)
        self.assertTrue(self.server.tell(idle=True)["idle"])
        self.tab.click("#chats .open")
        self.wait_for_answer()
        self.assertEqual(self.text(".content"), "A long one.")

    def test_a_question_is_edited_and_an_answer_made_anew(self):
        self.open()
        self.server.tell(say=["</think>\n\none", "</think>\n\ntwo", "</think>\n\nthree"])
        self.ask("Question A")
        self.wait_for_answer()
        self.tab.js("[...document.querySelectorAll('.assistant button')].find((b) => b.textContent === 'Regenerate').focus()")
        self.tab.key("Enter")
        self.tab.wait("document.querySelector('.content')?.innerText === 'two'")
        self.wait_for_answer()
        self.assertEqual(self.focused(), "send", "the focus is lost with the button")
        self.tab.js("[...document.querySelectorAll('.user button')].find((b) => b.textContent === 'Edit').focus()")
        self.tab.key("Enter")
        self.assertEqual(self.tab.js("document.activeElement.value"), "Question A")
        self.tab.key("End")
        self.tab.type(", or B")
        self.tab.key("Enter")
        self.tab.wait("document.querySelector('.content')?.innerText === 'three'")
        self.wait_for_answer()
        self.assertEqual(self.texts(".user .text"), ["Question A, or B"])
        self.assertEqual(self.count("[aria-label='Earlier answer']"), 0, "another question has other answers")
        prompts = [request["prompt"] for request in self.server.tell(submitted=True)["submitted"]]
        self.assertEqual(prompts[0], prompts[1])
        self.assertIn("Question A, or B", prompts[2])
        self.assertNotIn("two", prompts[2])

    def test_answers_made_anew_are_versions_and_the_chosen_one_counts(self):
        self.open()
        self.server.tell(say=["Thought.\n</think>\n\none", "</think>\n\ntwo", "</think>\n\nthree", "</think>\n\nfour"])
        self.ask("Question")
        self.wait_for_answer()
        for wanted in ("two", "three"):
            self.tab.js("[...document.querySelectorAll('.assistant button')].find((b) => b.textContent === 'Regenerate').click()")
            self.tab.wait(f"document.querySelector('.content')?.innerText === '{wanted}'")
            self.wait_for_answer()
        self.assertIn("3 of 3", self.text(".assistant"))
        self.assertTrue(self.tab.js("document.querySelector(\"[aria-label='Later answer']\").disabled"))
        for wanted in ("two", "one"):
            self.tab.click("[aria-label='Earlier answer']")
            self.assertEqual(self.text(".content"), wanted)
            self.assertEqual(self.tab.js("document.querySelector('.reasoning')?.hidden ?? true"), wanted != "one")
        self.visit()
        self.assertEqual(self.text(".content"), "one")
        self.assertIn("1 of 3", self.text(".assistant"))
        self.ask("More")
        self.wait_for_answer()
        prompt = self.server.tell(submitted=True)["submitted"][-1]["prompt"]
        self.assertIn("one<|im_end|>", prompt)
        self.assertNotIn("two", prompt)
        self.assertEqual(self.count("[aria-label='Earlier answer']"), 0, "what was answered to does not change any more")

    # The server's states

    def test_a_key_is_asked_for_when_the_server_wants_one(self):
        self.expected_complaints = ("401",)
        self.server = Server("--api-key", "right")
        self.tab.open(self.server.url)
        for key in ("wrong", "right"):
            self.tab.wait("document.querySelector('#key-dialog').open")
            self.tab.wait("document.activeElement.id === 'key'")
            self.tab.type(key)
            self.tab.key("Enter")
            self.tab.wait("!document.querySelector('#key-dialog').open || document.querySelector('#key-fault').textContent !== ''")
        self.tab.wait("document.title !== 'quern'")
        self.ask("hi")
        self.wait_for_answer()
        self.assertIn("Hello", self.text(".content"))
        self.assertNotIn("right", self.tab.js("JSON.stringify(localStorage)"))
        self.visit()  # the tab still knows it

    def test_without_a_key_the_page_says_so_and_asks_again(self):
        self.expected_complaints = ("401",)
        self.server = Server("--api-key", "right")
        self.tab.open(self.server.url)
        self.tab.wait("document.querySelector('#key-dialog').open")
        self.tab.key("Escape")
        self.tab.wait("!document.querySelector('#notice-key').hidden")
        self.tab.click("#notice-key")
        self.tab.wait("document.activeElement.id === 'key'")
        self.tab.type("right")
        self.tab.click("#keep-key")
        self.tab.js("document.querySelector('#key').focus()")
        self.tab.key("Enter")
        self.tab.wait("document.title !== 'quern'")
        self.assertIn("right", self.tab.js("JSON.stringify(localStorage)"))

    def test_loading_shows_how_far_it_is(self):
        self.expected_complaints = ("503",)
        self.server = Server("--loading")
        self.server.tell(loading={"phase": "loading_weights", "fraction": 0.42})
        self.tab.open(self.server.url)
        self.tab.wait("document.querySelector('#notice').innerText.includes('The model loads: 42 %')")
        self.assertAlmostEqual(self.tab.js("document.querySelector('#notice-progress').value"), 0.42)
        self.server.tell(loading={"phase": "loading_weights", "fraction": 0.97})
        self.tab.wait("document.querySelector('#notice-progress').value > 0.9")
        self.server.tell(ready=True)
        self.tab.wait("document.title !== 'quern'")
        self.assertTrue(self.tab.js("document.querySelector('#notice').hidden"))
        self.ask("hi")
        self.wait_for_answer()
        self.assertIn("Hello", self.text(".content"))

    # Everybody can use it

    def test_everything_works_from_the_keyboard_alone(self):
        self.open()
        self.server.tell(say=[CALL, "Hm.\n</think>\n\nDone, see `code`.", "</think>\n\n" + "word " * 50])
        self.tab.wait("document.activeElement.id === 'input'")

        def tab_to(goal, modifiers=0):
            self.tab.js("window.passed = new Set(); null")
            while True:
                self.tab.key("Tab", modifiers)
                at = self.focused()
                self.assertFalse(self.tab.js("passed.has(document.activeElement) || !passed.add(document.activeElement)"), f"{goal} is not reached by the Tab key")
                outline = self.tab.js("getComputedStyle(document.activeElement).outlineStyle")
                self.assertNotEqual(outline, "none", f"{at} does not show that it has the focus")
                if at == goal:
                    return

        tab_to("open-settings", SHIFT)
        self.tab.key("Enter")
        self.tab.wait("document.activeElement.id === 'set-system'")
        tab_to("set-tools")
        self.tab.type(json.dumps(WEATHER))
        tab_to("close-settings")
        self.tab.key("Enter")
        self.tab.wait("document.activeElement.id === 'open-settings'")
        tab_to("input")
        self.tab.type("a line")
        self.tab.key("Enter", SHIFT)
        self.tab.type("and another")
        self.assertEqual(self.tab.js("document.querySelector('#input').value"), "a line\nand another")
        self.tab.key("Enter")
        self.tab.wait("document.querySelectorAll('.call textarea').length === 1")
        self.wait_for_answer()
        self.assertIn("The model calls weather.", self.text("#announcer"))
        self.tab.js("document.querySelector('.reasoning summary').focus()")
        self.tab.key("Enter")
        self.tab.wait("document.querySelector('.reasoning').open")
        self.tab.key("Tab")
        self.assertEqual(self.tab.js("document.activeElement.closest('label').innerText"), "What weather gives back")
        self.tab.type("sun")
        self.tab.key("Tab")
        self.tab.key("Enter")
        self.tab.wait("document.querySelectorAll('.assistant').length === 2")
        self.wait_for_answer()
        self.assertIn("The answer is complete. Done", self.text("#announcer"))
        self.server.tell(hold=True)
        self.ask("long")
        self.server.tell(permit=9)
        self.tab.wait("document.querySelector('.assistant:last-child .content').innerText.includes('word')")
        self.tab.key("Escape")
        self.wait_for_answer()
        self.assertEqual(self.focused(), "input")
        self.assertTrue(self.server.tell(idle=True)["idle"])
        self.server.tell(run=True)
        tab_to("new-chat", SHIFT)
        self.tab.key(" ")
        self.assertEqual(self.focused(), "input")
        self.assertEqual(self.count("#log article"), 0)

    def test_every_control_has_a_name(self):
        self.open()
        self.set_settings(tools=json.dumps(WEATHER))
        self.server.tell(say=[CALL])
        self.ask("hi")
        self.wait_for_answer()
        nameless = []
        for node in self.tab.call("Accessibility.getFullAXTree")["nodes"]:
            role, name = node.get("role", {}).get("value"), node.get("name", {}).get("value", "")
            if not node.get("ignored") and role in ("button", "textbox", "combobox", "spinbutton", "checkbox", "link", "region", "dialog", "progressbar", "navigation", "article") and not name:
                nameless.append(role)
        self.assertEqual(nameless, [])

    def test_light_and_dark_follow_the_system_or_the_choice_and_are_readable(self):
        self.open()
        grounds = {}
        for scheme in ("light", "dark"):
            self.tab.prefer(scheme)
            grounds[scheme] = self.tab.js("getComputedStyle(document.body).backgroundColor")
            for pair in (("--text", "--ground"), ("--muted", "--ground"), ("--muted", "--sunken"), ("--text", "--mine"), ("--on-accent", "--accent"), ("--accent", "--ground"), ("--fault", "--ground"), ("--text", "--sunken")):
                self.assertGreaterEqual(self.contrast(*pair), 4.5, f"{pair} in {scheme}")
        self.assertNotEqual(grounds["light"], grounds["dark"])
        for choice in ("light", "dark"):
            self.tab.js(f"(() => {{ const theme = document.querySelector('#theme'); theme.value = '{choice}'; theme.dispatchEvent(new Event('change')); }})()")
            self.assertEqual(self.tab.js("getComputedStyle(document.body).backgroundColor"), grounds[choice])
            self.visit()
            self.assertEqual(self.tab.js("getComputedStyle(document.body).backgroundColor"), grounds[choice])
            self.assertEqual(self.tab.js("document.querySelector('#theme').value"), choice)

    def contrast(self, one, other):
        """WCAG's ratio of two colours."""
        colours = self.tab.js("""[%s, %s].map((name) => {
          const probe = document.createElement('span');
          probe.style.color = `var(${name})`;
          document.body.append(probe);
          const colour = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
          probe.remove();
          return colour;
        })""" % (json.dumps(one), json.dumps(other)))

        def luminance(colour):
            linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        light, dark = sorted((luminance(colours[0]), luminance(colours[1])), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    def test_a_phone_has_room_for_all_of_it(self):
        self.tab.resize(360, 640, mobile=True, scale=2)
        self.open()
        self.server.tell(say=["</think>\n\n" + "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n| " + " | ".join("column" * 3 for _ in range(9)) + " |\n" + "|---" * 9 + "|\n"])
        self.ask("z" * 300)
        self.wait_for_answer()
        self.assertLessEqual(self.tab.js("document.documentElement.scrollWidth"), 360)
        self.assertLessEqual(self.tab.js("document.querySelector('#scroller').scrollWidth"), 360)
        for selector in ("#input", "#send", "#open-sidebar", "#open-settings"):
            box = self.tab.js(f"(() => {{ const r = document.querySelector('{selector}').getBoundingClientRect(); return [r.left, r.right, r.bottom, r.height]; }})()")
            self.assertGreaterEqual(box[0], 0, selector)
            self.assertLessEqual(box[1], 360, selector)
            self.assertLessEqual(box[2], 640, selector)
            self.assertGreaterEqual(box[3], 36, selector)
        self.assertEqual(self.tab.js("getComputedStyle(document.querySelector('#sidebar')).visibility"), "hidden")
        self.tab.click("#open-sidebar")
        self.tab.wait("getComputedStyle(document.querySelector('#sidebar')).visibility === 'visible'")
        self.assertEqual(self.focused(), "new-chat")
        self.tab.key("Escape")
        self.tab.wait("getComputedStyle(document.querySelector('#sidebar')).visibility === 'hidden'")
        self.assertEqual(self.focused(), "open-sidebar")
        self.tab.click("#open-settings")
        self.assertLessEqual(self.tab.js("document.querySelector('#settings').getBoundingClientRect().right"), 360)
        self.tab.key("Escape")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--chromium", default="")
    arguments, rest = parser.parse_known_args()
    SERVER, CHROMIUM = arguments.server, arguments.chromium
    if not os.path.exists(CHROMIUM):  # also where it went after CMake had found it
        print("SKIPPED: there is no Chromium, so the chat page was NOT tested (Debian: apt-get install chromium)", file=sys.stderr)
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *rest])
