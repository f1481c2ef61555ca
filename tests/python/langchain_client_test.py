#!/usr/bin/env python3
"""LangChain, by langchain-openai (chats and Responses) and langchain-anthropic, against a running quern."""

import unittest

import conformance

conformance.require("langchain_core", "langchain_openai", "langchain_anthropic")
from langchain_anthropic import ChatAnthropic  # noqa: E402
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402


@tool
def weather(city: str, days: int = 1) -> str:
    """The weather of the next days"""
    return f"sunny in {city} for {days} days"


@tool
def now() -> str:
    """The time"""
    return "noon"


MESSAGES = [SystemMessage("You are brief."), HumanMessage("Say hello to the wörld.")]


def text_of(message):
    return message.content if isinstance(message.content, str) else "".join(b.get("text", "") for b in message.content if isinstance(b, dict) and b.get("type") == "text")


class LangChain:
    """What every model class has to do; `model` makes one."""

    def model(self, max_tokens):
        raise NotImplementedError

    def test_invoke(self):
        answer = self.model(40).invoke(MESSAGES)
        self.assertIsInstance(answer, AIMessage)
        self.assertGreater(answer.usage_metadata["input_tokens"], 0)
        self.assertEqual(answer.usage_metadata["total_tokens"], answer.usage_metadata["input_tokens"] + answer.usage_metadata["output_tokens"])
        if conformance.SCRIPTED:
            self.assertEqual(text_of(answer), conformance.ANSWER)

    def test_stream_equals_invoke(self):
        whole, streamed = self.model(40).invoke(MESSAGES), None
        for chunk in self.model(40).stream(MESSAGES):
            streamed = chunk if streamed is None else streamed + chunk
        self.assertEqual(text_of(streamed), text_of(whole))
        self.assertEqual(streamed.usage_metadata["output_tokens"], whole.usage_metadata["output_tokens"])

    def test_tools(self):
        model = self.model(200).bind_tools([weather, now])
        whole, streamed = model.invoke(MESSAGES), None
        for chunk in model.stream(MESSAGES):
            streamed = chunk if streamed is None else streamed + chunk
        self.assertEqual([(c["name"], c["args"]) for c in streamed.tool_calls], [(c["name"], c["args"]) for c in whole.tool_calls])
        self.assertFalse(whole.invalid_tool_calls)
        if not conformance.SCRIPTED:
            return
        self.assertEqual([(c["name"], c["args"]) for c in whole.tool_calls], [("weather", conformance.WEATHER_ARGUMENTS), ("now", {})])
        for calling in (whole, streamed):
            results = [ToolMessage({"weather": weather, "now": now}[c["name"]].invoke(c["args"]), tool_call_id=c["id"]) for c in calling.tool_calls]
            self.assertEqual(text_of(model.invoke(MESSAGES + [calling] + results)), conformance.ANSWER)

    def test_batch(self):
        self.assertEqual(len(self.model(4).batch([MESSAGES] * 4)), 4)


class OpenAiChats(LangChain, unittest.TestCase):
    def model(self, max_tokens):
        return ChatOpenAI(base_url=conformance.ROOT + "/v1", api_key=conformance.API_KEY, model="", max_tokens=max_tokens, temperature=0, max_retries=0, stream_usage=True)


class OpenAiResponses(LangChain, unittest.TestCase):
    def model(self, max_tokens):
        return ChatOpenAI(base_url=conformance.ROOT + "/v1", api_key=conformance.API_KEY, model="", max_tokens=max_tokens, temperature=0, max_retries=0,
                          use_responses_api=True)


class AnthropicMessages(LangChain, unittest.TestCase):
    def model(self, max_tokens):
        return ChatAnthropic(base_url=conformance.ROOT, api_key=conformance.API_KEY, model="", max_tokens=max_tokens, temperature=0, max_retries=0)


if __name__ == "__main__":
    conformance.main(__doc__)
