#!/usr/bin/env python3
"""The unchanged `openai` client and its Responses against a running quern. What the model answers matters only where the server is scripted."""

import json
import unittest

import conformance

conformance.require("openai")
import openai  # noqa: E402

TOOLS = [{"type": "function", "name": "weather", "description": "The weather of the next days", "parameters": conformance.WEATHER, "strict": False},
         {"type": "function", "name": "now", "description": "The time", "parameters": conformance.NOTHING, "strict": False}]
QUESTION = "Say hello to the wörld."


class Responses(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(base_url=conformance.ROOT + "/v1", api_key=conformance.API_KEY, max_retries=0, timeout=600)
        self.model = self.client.models.list().data[0].id

    def respond(self, **kwargs):
        return self.client.responses.create(**{"model": self.model, "input": QUESTION, "max_output_tokens": 24, "temperature": 0, **kwargs})

    def test_response(self):
        response = self.respond(instructions="You are brief.", metadata={"k": "v"}, user="u")
        self.assertIn(response.status, ("completed", "incomplete"))
        self.assertEqual(response.metadata, {"k": "v"})
        self.assertEqual(response.instructions, "You are brief.")
        self.assertEqual(response.usage.total_tokens, response.usage.input_tokens + response.usage.output_tokens)
        self.assertLessEqual(response.usage.output_tokens_details.reasoning_tokens, response.usage.output_tokens)
        self.assertIsNotNone(response.usage.input_tokens_details.cached_tokens)
        if conformance.SCRIPTED:
            self.assertEqual(response.output_text, conformance.ANSWER)
            self.assertEqual(response.output[0].content[0].text, conformance.THOUGHT)
            self.assertEqual(response.status, "completed")

    def test_stream_equals_the_whole_response(self):
        whole = self.respond(max_output_tokens=200, tools=TOOLS)
        with self.client.responses.stream(model=self.model, input=QUESTION, max_output_tokens=200, temperature=0, tools=TOOLS) as stream:
            text, reasoning, arguments, last = "", "", "", -1
            for event in stream:
                self.assertEqual(event.sequence_number, last + 1)
                last = event.sequence_number
                if event.type == "response.output_text.delta":
                    text += event.delta
                    self.assertTrue(event.snapshot.endswith(event.delta))  # the client's own accumulation
                elif event.type == "response.reasoning_text.delta":
                    reasoning += event.delta
                elif event.type == "response.function_call_arguments.delta":
                    arguments += event.delta
            final = stream.get_final_response()
        self.assertEqual(text, whole.output_text)
        self.assertEqual(final.output_text, whole.output_text)
        self.assertEqual(reasoning, "".join(part.text for item in whole.output if item.type == "reasoning" for part in item.content))
        self.assertEqual(arguments, "".join(item.arguments for item in whole.output if item.type == "function_call"))
        self.assertEqual([item.type for item in final.output], [item.type for item in whole.output])
        self.assertEqual(final.usage.output_tokens, whole.usage.output_tokens)
        self.assertEqual(final.status, whole.status)

    def test_function_calls_and_their_outputs_in_any_order(self):
        first = self.respond(tools=TOOLS, max_output_tokens=200)
        calls = [item for item in first.output if item.type == "function_call"]
        for call in calls:
            self.assertIsInstance(json.loads(call.arguments), dict)
        if conformance.SCRIPTED:
            self.assertEqual([(c.name, json.loads(c.arguments)) for c in calls], [("weather", conformance.WEATHER_ARGUMENTS), ("now", {})])
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in reversed(calls)]
        outputs = outputs or [{"role": "user", "content": "And?"}]
        stateful = self.respond(tools=TOOLS, previous_response_id=first.id, input=outputs, max_output_tokens=200)
        history = [{"role": "user", "content": QUESTION}] + [item.model_dump(exclude_none=True) for item in first.output] + outputs
        stateless = self.respond(tools=TOOLS, input=history, store=False, max_output_tokens=200)
        self.assertEqual(stateful.usage.input_tokens, stateless.usage.input_tokens)
        self.assertEqual(stateful.output_text, stateless.output_text)
        if conformance.SCRIPTED:
            self.assertEqual(stateful.output_text, conformance.ANSWER)

    def test_tool_choice(self):
        named = self.respond(tools=TOOLS, tool_choice={"type": "function", "name": "now"}, max_output_tokens=60)
        self.assertEqual(named.output[0].name, "now")
        none = self.respond(tools=TOOLS, tool_choice="none")
        self.assertFalse([item for item in none.output if item.type == "function_call"])
        one = self.respond(tools=TOOLS, parallel_tool_calls=False, max_output_tokens=200)
        self.assertLessEqual(len([item for item in one.output if item.type == "function_call"]), 1)

    def test_stored_responses(self):
        response = self.respond()
        again = self.client.responses.retrieve(response.id)
        self.assertEqual(again.output_text, response.output_text)
        self.assertEqual(self.client.responses.input_items.list(response.id).data[0].content[0].text, QUESTION)
        self.client.responses.delete(response.id)
        with self.assertRaises(openai.NotFoundError):
            self.client.responses.retrieve(response.id)
        with self.assertRaises(openai.NotFoundError):
            self.respond(previous_response_id=response.id)
        with self.assertRaises(openai.NotFoundError):
            self.client.responses.retrieve(self.respond(store=False).id)

    def test_input_tokens(self):
        arguments = {"model": self.model, "input": QUESTION, "instructions": "You are brief.", "tools": TOOLS}
        counted = self.client.responses.input_tokens.count(**arguments).input_tokens
        self.assertEqual(counted, self.client.responses.create(**arguments, max_output_tokens=2).usage.input_tokens)

    def test_thinking_switched_off(self):
        response = self.respond(reasoning={"effort": "none"})
        self.assertEqual(response.usage.output_tokens_details.reasoning_tokens, 0)
        self.assertFalse([item for item in response.output if item.type == "reasoning"])

    def test_an_answer_that_is_cut_off_is_incomplete(self):
        response = self.respond(max_output_tokens=2, extra_body={"ignore_eos": True})
        self.assertEqual(response.status, "incomplete")
        self.assertEqual(response.incomplete_details.reason, "max_output_tokens")

    def test_errors(self):
        for arguments, field in [({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"background": True}, "background"),
                                 ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "low"}]}]}, "input[0].content[0].type")]:
            with self.assertRaises(openai.BadRequestError) as caught:
                self.respond(**arguments)
            self.assertEqual(caught.exception.param, field)
            self.assertTrue(caught.exception.request_id)

    def test_request_ids(self):
        raw = self.client.responses.with_raw_response.create(model=self.model, input="hi", max_output_tokens=2, extra_headers={"X-Request-Id": "mine"})
        self.assertEqual(raw.headers["x-request-id"], "mine")


if __name__ == "__main__":
    conformance.main(__doc__)
