#!/usr/bin/env python3
"""The unchanged `anthropic` client against a running quern. What the model answers matters only where the server is scripted."""

import unittest

import conformance

conformance.require("anthropic")
import anthropic  # noqa: E402

TOOLS = [{"name": "weather", "description": "The weather of the next days", "input_schema": conformance.WEATHER},
         {"name": "now", "description": "The time", "input_schema": conformance.NOTHING}]
THINKING = {"type": "enabled", "budget_tokens": 1024}
QUESTION = [{"role": "user", "content": "Say hello to the wörld."}]


class Messages(unittest.TestCase):
    def setUp(self):
        self.client = anthropic.Anthropic(base_url=conformance.ROOT, api_key=conformance.API_KEY, max_retries=0, timeout=600)
        self.options = {"model": "", "max_tokens": 24, "messages": QUESTION, "extra_body": {"temperature": 0}}

    def ask(self, **kwargs):
        return self.client.messages.create(**{**self.options, **kwargs})

    def test_message(self):
        message = self.ask(system="You are brief.")
        self.assertEqual(message.role, "assistant")
        self.assertIn(message.stop_reason, ("end_turn", "max_tokens"))
        self.assertEqual([block.type for block in message.content], ["text"])
        self.assertGreater(message.usage.input_tokens + message.usage.cache_read_input_tokens, 0)
        if conformance.SCRIPTED:
            self.assertEqual(message.content[0].text, conformance.ANSWER)

    def test_thinking(self):
        message = self.ask(thinking=THINKING, max_tokens=200)
        self.assertEqual(message.content[0].type, "thinking")
        self.assertTrue(message.content[0].signature)
        if conformance.SCRIPTED:
            self.assertEqual(message.content[0].thinking, conformance.THOUGHT)
            self.assertEqual(message.content[1].text, conformance.ANSWER)

    def test_stream_equals_the_whole_message(self):
        for arguments in ({}, {"thinking": THINKING}, {"thinking": THINKING, "tools": TOOLS}, {"tools": TOOLS, "max_tokens": 12}):
            arguments = {**self.options, "max_tokens": 200, **arguments}
            whole = self.client.messages.create(**arguments)
            kinds = []
            with self.client.messages.stream(**arguments) as stream:
                for event in stream:
                    kinds.append(event.type)
                final = stream.get_final_message()
            self.assertEqual(kinds[0], "message_start")
            self.assertEqual(kinds[-1], "message_stop")

            def told(message):
                return [{k: v for k, v in block.model_dump().items() if k not in ("id", "parsed_output")} for block in message.content]
            self.assertEqual(told(final), told(whole))
            self.assertEqual(final.stop_reason, whole.stop_reason)
            self.assertEqual(final.usage.output_tokens, whole.usage.output_tokens)

    def test_tools_and_their_results_in_any_order(self):
        first = self.ask(tools=TOOLS, max_tokens=200, thinking=THINKING)
        uses = [block for block in first.content if block.type == "tool_use"]
        if conformance.SCRIPTED:
            self.assertEqual([(use.name, use.input) for use in uses], [("weather", conformance.WEATHER_ARGUMENTS), ("now", {})])
            self.assertEqual(first.stop_reason, "tool_use")
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in reversed(uses)]
        history = QUESTION + [{"role": "assistant", "content": first.content}, {"role": "user", "content": [{"type": "text", "text": "Go on."}] + results}]
        answer = self.ask(messages=history, tools=TOOLS, max_tokens=200, thinking=THINKING)
        self.assertIn(answer.stop_reason, ("end_turn", "max_tokens", "tool_use"))
        self.assertTrue(answer.content)

    def test_tool_choice(self):
        forced = self.ask(tools=TOOLS, tool_choice={"type": "tool", "name": "now"}, max_tokens=60)
        self.assertEqual(forced.content[0].name, "now")
        self.assertEqual(forced.content[0].type, "tool_use")
        none = self.ask(tools=TOOLS, tool_choice={"type": "none"})
        self.assertNotIn("tool_use", [block.type for block in none.content])

    def test_stop_sequences(self):
        message = self.ask(stop_sequences=["wörld", "world"], max_tokens=100)
        if conformance.SCRIPTED:
            self.assertEqual(message.stop_reason, "stop_sequence")
            self.assertEqual(message.stop_sequence, "world")
            self.assertEqual(message.content[0].text, "Hello 🙂 ")

    def test_the_assistants_words_are_continued(self):
        self.assertTrue(self.ask(messages=QUESTION + [{"role": "assistant", "content": "Hello"}]).content)

    def test_count_tokens(self):
        counted = self.client.messages.count_tokens(model="", messages=QUESTION, tools=TOOLS, system="You are brief.").input_tokens
        usage = self.ask(tools=TOOLS, system="You are brief.").usage
        self.assertEqual(counted, usage.input_tokens + usage.cache_read_input_tokens)

    def test_a_stream_that_is_left_early(self):
        with self.client.messages.stream(**{**self.options, "max_tokens": 200}) as stream:
            next(iter(stream))
        self.assertTrue(self.ask().content)

    def test_errors_arrive_as_the_clients_exceptions(self):
        image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}]}]
        for arguments, words in [({"messages": image}, "messages[0].content[0].type"), ({"max_tokens": 0}, "max_tokens"),
                                 ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"), ({"max_tokens": 100_000_000}, "maximum context length")]:
            with self.assertRaises(anthropic.BadRequestError) as caught:
                self.ask(**arguments)
            self.assertIn(words, caught.exception.message)
            self.assertEqual(caught.exception.body["error"]["type"], "invalid_request_error")
            self.assertTrue(caught.exception.request_id)
        with self.assertRaises(anthropic.NotFoundError):
            self.ask(model="no-such-model")


if __name__ == "__main__":
    conformance.main(__doc__)
