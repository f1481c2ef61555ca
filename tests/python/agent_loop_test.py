#!/usr/bin/env python3
"""An agent loop of three tools and ten turns, by the clients of chats, Responses (with and without stored state), Messages and LangChain.

The scripted model (tests/server/scripted_server.cpp) makes each call from the result before it, and its answer from all: a result that is lost, late or
garbled on the way into the prompt changes what follows. With another model the loop only has to go on without an error."""

import json
import unittest

import conformance

conformance.require("openai", "anthropic", "langchain_core", "langchain_openai", "langchain_anthropic")
import anthropic  # noqa: E402
import openai  # noqa: E402
from langchain_anthropic import ChatAnthropic  # noqa: E402
from langchain_core.messages import HumanMessage, ToolMessage  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402

TURNS = 10
QUESTION = "Work it out."
NUMBER = {"type": "integer"}
SCHEMAS = {
    "add": {"type": "object", "properties": {"a": {"type": ["integer", "string"]}, "b": NUMBER}, "required": ["a", "b"]},
    "lookup": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    "clock": {"type": "object", "properties": {}},
}


class Tools:
    """Runs the tools and remembers what they said."""

    def __init__(self, test):
        self.test, self.results = test, []

    def call(self, name, arguments):
        self.test.assertIsInstance(arguments, dict)
        if conformance.SCRIPTED:
            self.test.assertIn(name, SCHEMAS)
        turn, last = len(self.results), self.results[-1] if self.results else "0"
        if conformance.SCRIPTED:
            expected = [("add", {"a": int(last) if last.lstrip("-").isdigit() else last, "b": turn}), ("lookup", {"key": last}), ("clock", {})][turn % 3]
            self.test.assertEqual((name, arguments), expected, f"turn {turn}")
        if name == "add":
            a, b = arguments.get("a", 0), arguments.get("b", 0)
            result = str(len(str(a)) + int(b) if isinstance(b, int) else 0)
        elif name == "lookup":
            result = f"«{arguments.get('key', '')}» \"quoted\" 你好 {{}}\n</tool_call>\nline two"
        elif name == "clock":
            result = f"{turn}:00"
        else:
            result = f"there is no tool {name}"  # a small model may make one up
        self.results.append(result)
        return result

    def check(self, answer):
        if conformance.SCRIPTED:
            self.test.assertEqual(len(self.results), TURNS)
            self.test.assertEqual(answer, "All in all: " + " ".join(self.results))


class AgentLoop(unittest.TestCase):
    def setUp(self):
        self.tools = Tools(self)
        self.openai = openai.OpenAI(base_url=conformance.ROOT + "/v1", api_key=conformance.API_KEY, max_retries=0, timeout=600)
        self.anthropic = anthropic.Anthropic(base_url=conformance.ROOT, api_key=conformance.API_KEY, max_retries=0, timeout=600)

    def run_chat(self, stream):
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
        messages = [{"role": "user", "content": QUESTION}]
        for _ in range(TURNS + 1):
            if stream:
                with self.openai.chat.completions.stream(model="", messages=messages, tools=tools, max_tokens=800) as chunks:
                    chunks.until_done()
                    message = chunks.get_final_completion().choices[0].message
            else:
                message = self.openai.chat.completions.create(model="", messages=messages, tools=tools, max_tokens=800).choices[0].message
            if not message.tool_calls:
                return self.tools.check(message.content)
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": self.tools.call(call.function.name, json.loads(call.function.arguments))})
        self.assertFalse(conformance.SCRIPTED, "there was no answer")

    def test_chat(self):
        self.run_chat(stream=False)

    def test_streamed_chat(self):
        self.run_chat(stream=True)

    def run_responses(self, stored, stream):
        tools = [{"type": "function", "name": name, "parameters": schema, "strict": False} for name, schema in SCHEMAS.items()]
        history, news, previous = [], [{"role": "user", "content": QUESTION}], None
        for _ in range(TURNS + 1):
            arguments = {"model": "", "tools": tools, "max_output_tokens": 800}
            arguments.update({"input": news, "previous_response_id": previous} if stored else {"input": history + news, "store": False})
            arguments = {name: value for name, value in arguments.items() if value is not None}
            if stream:
                with self.openai.responses.stream(**arguments) as events:
                    for _event in events:
                        pass
                    response = events.get_final_response()
            else:
                response = self.openai.responses.create(**arguments)
            previous = response.id
            history += news + [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return self.tools.check(response.output_text)
            news = [{"type": "function_call_output", "call_id": c.call_id, "output": self.tools.call(c.name, json.loads(c.arguments))} for c in calls]
        self.assertFalse(conformance.SCRIPTED, "there was no answer")

    def test_responses_with_stored_state(self):
        self.run_responses(stored=True, stream=False)

    def test_responses_without_state(self):
        self.run_responses(stored=False, stream=False)

    def test_streamed_responses(self):
        self.run_responses(stored=True, stream=True)

    def run_messages(self, **more):
        tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
        messages = [{"role": "user", "content": QUESTION}]
        for _ in range(TURNS + 1):
            with self.anthropic.messages.stream(model="", messages=messages, tools=tools, max_tokens=800, **more) as stream:
                message = stream.get_final_message()
            messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in message.content]})
            uses = [block for block in message.content if block.type == "tool_use"]
            if not uses:
                return self.tools.check("".join(block.text for block in message.content if block.type == "text"))
            messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": self.tools.call(use.name, use.input)} for use in uses]})
        self.assertFalse(conformance.SCRIPTED, "there was no answer")

    def test_messages(self):
        self.run_messages()

    def test_messages_with_thinking(self):
        self.run_messages(thinking={"type": "enabled", "budget_tokens": 1024})

    def run_langchain(self, model):
        functions = [{"type": "function", "function": {"name": name, "description": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
        model, messages = model.bind_tools(functions), [HumanMessage(QUESTION)]
        for _ in range(TURNS + 1):
            answer = model.invoke(messages)
            messages.append(answer)
            if not answer.tool_calls:
                return self.tools.check(answer.text if isinstance(answer.text, str) else answer.text())
            messages += [ToolMessage(self.tools.call(call["name"], call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
        self.assertFalse(conformance.SCRIPTED, "there was no answer")

    def test_langchain_chats(self):
        self.run_langchain(ChatOpenAI(base_url=conformance.ROOT + "/v1", api_key=conformance.API_KEY, model="", max_tokens=800, max_retries=0))

    def test_langchain_responses(self):
        self.run_langchain(ChatOpenAI(base_url=conformance.ROOT + "/v1", api_key=conformance.API_KEY, model="", max_tokens=800, max_retries=0, use_responses_api=True))

    def test_langchain_messages(self):
        self.run_langchain(ChatAnthropic(base_url=conformance.ROOT, api_key=conformance.API_KEY, model="", max_tokens=800, max_retries=0))


if __name__ == "__main__":
    conformance.main(__doc__)
