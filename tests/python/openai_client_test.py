#!/usr/bin/env python3
"""The unchanged `openai` client, its chats and completions, against a running quern. What the model answers matters only where the server is scripted."""

import json
import unittest
import urllib.request

import conformance

conformance.require("openai")
import openai  # noqa: E402

MESSAGES = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Say hello to the wörld."}]


class OpenAiClient(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(base_url=conformance.ROOT + "/v1", api_key=conformance.API_KEY, max_retries=0, timeout=600)
        self.model = self.client.models.list().data[0].id

    def chat(self, **kwargs):
        return self.client.chat.completions.create(**{"model": self.model, "messages": MESSAGES, "max_tokens": 24, "seed": 7, **kwargs})

    def test_models(self):
        self.assertEqual(self.client.models.retrieve(self.model).id, self.model)
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("no-such-model")

    def test_chat(self):
        answer = self.chat()
        self.assertEqual(answer.object, "chat.completion")
        choice = answer.choices[0]
        self.assertEqual(choice.message.role, "assistant")
        self.assertIn(choice.finish_reason, ("stop", "length"))
        self.assertTrue(choice.message.content or choice.message.reasoning_content)
        self.assertGreater(answer.usage.prompt_tokens, 0)
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
        self.assertLessEqual(answer.usage.completion_tokens, 24)
        self.assertIsNotNone(answer.usage.prompt_tokens_details.cached_tokens)
        self.assertLessEqual(answer.usage.completion_tokens_details.reasoning_tokens, answer.usage.completion_tokens)

    def test_stream_equals_whole_answer(self):
        whole = self.chat(temperature=0)
        content, reasoning, finish, usage, first = "", "", None, None, None
        for chunk in self.chat(temperature=0, stream=True, stream_options={"include_usage": True}):
            self.assertEqual(chunk.object, "chat.completion.chunk")
            if chunk.usage is not None:
                self.assertEqual(chunk.choices, [])
                usage = chunk.usage
                continue
            delta = chunk.choices[0].delta
            first = first or delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            finish = chunk.choices[0].finish_reason or finish
        self.assertEqual(first.role, "assistant")
        self.assertEqual(content, whole.choices[0].message.content or "")
        self.assertEqual(reasoning, whole.choices[0].message.reasoning_content or "")
        self.assertEqual(finish, whole.choices[0].finish_reason)
        self.assertEqual(usage.completion_tokens, whole.usage.completion_tokens)
        self.assertEqual(usage.prompt_tokens, whole.usage.prompt_tokens)

    def test_stream_that_is_left_early(self):
        stream = self.chat(stream=True, max_tokens=256, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        self.assertTrue(self.chat(max_tokens=1).choices)

    def test_choices_and_logprobs(self):
        answer = self.chat(n=2, logprobs=True, top_logprobs=3, max_tokens=5)
        self.assertEqual([choice.index for choice in answer.choices], [0, 1])
        for choice in answer.choices:
            self.assertGreater(len(choice.logprobs.content), 0)
            for entry in choice.logprobs.content:
                self.assertLessEqual(entry.logprob, 0)
                self.assertEqual(len(entry.top_logprobs), 3)
                self.assertEqual(bytes(entry.bytes).decode("utf-8", "replace"), entry.token)

    def test_stop_and_thinking_switch(self):
        answer = self.chat(stop=["zzz", "\n\n\n\n"], extra_body={"chat_template_kwargs": {"enable_thinking": False}, "top_k": 5})
        self.assertNotIn("zzz", answer.choices[0].message.content or "")

    def test_content_parts(self):
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        self.assertTrue(self.chat(messages=[{"role": "user", "content": parts}], max_tokens=2).choices)

    TOOLS = [
        {"type": "function", "function": {"name": "weather", "description": "The weather of the next days", "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}},
        {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}},
    ]

    def test_tool_calls(self):
        whole = self.chat(tools=self.TOOLS, temperature=0, max_tokens=200).choices[0]
        calls, finish = {}, None
        for chunk in self.chat(tools=self.TOOLS, temperature=0, max_tokens=200, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or []:
                call = calls.setdefault(piece.index, {"id": piece.id, "name": piece.function.name, "arguments": ""})
                call["arguments"] += piece.function.arguments or ""
            finish = chunk.choices[0].finish_reason or finish
        self.assertEqual(finish, whole.finish_reason)
        whole_calls = whole.message.tool_calls or []
        self.assertEqual([(c["name"], c["arguments"]) for c in calls.values()], [(c.function.name, c.function.arguments) for c in whole_calls])
        for call in whole_calls:
            self.assertIsInstance(json.loads(call.function.arguments), dict)
            self.assertTrue(call.id)
        if not conformance.SCRIPTED:
            return
        self.assertEqual(finish, "tool_calls")
        self.assertEqual([json.loads(c.function.arguments) for c in whole_calls], [{"city": "São \"Paulo\"", "days": 3}, {}])
        self.assertIsNone(whole.message.content)
        # The calls and their results go back as the client has them.
        history = MESSAGES + [whole.message.model_dump(exclude_none=True)]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in reversed(whole_calls)]
        answer = self.chat(messages=history, tools=self.TOOLS, max_tokens=200).choices[0]
        self.assertEqual(answer.finish_reason, "stop")
        self.assertIn("Hello", answer.message.content)

    def test_forced_and_forbidden_tool_calls(self):
        forced = self.chat(tools=self.TOOLS, tool_choice={"type": "function", "function": {"name": "now"}}, max_tokens=60).choices[0]
        self.assertEqual(forced.message.tool_calls[0].function.name, "now")
        self.assertFalse(self.chat(tools=self.TOOLS, tool_choice="none", max_tokens=24).choices[0].message.tool_calls)
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(tools=self.TOOLS, tool_choice={"type": "function", "function": {"name": "unheard"}})
        self.assertEqual(caught.exception.param, "tool_choice")

    def test_completions(self):
        answer = self.client.completions.create(model=self.model, prompt=["One", "Two"], max_tokens=4, logprobs=2, echo=True)
        self.assertEqual(len(answer.choices), 2)
        self.assertTrue(answer.choices[1].text.startswith("Two"))
        logprobs = answer.choices[0].logprobs
        self.assertIsNone(logprobs.token_logprobs[0])
        self.assertEqual(len(logprobs.tokens), len(logprobs.text_offset))
        text = "".join(chunk.choices[0].text for chunk in self.client.completions.create(
            model=self.model, prompt="One", max_tokens=4, temperature=0, stream=True))
        whole = self.client.completions.create(model=self.model, prompt="One", max_tokens=4, temperature=0)
        self.assertEqual(text, whole.choices[0].text)

    def test_token_ids_as_prompt(self):
        request = urllib.request.Request(conformance.ROOT + "/tokenize", json.dumps({"prompt": "Hello there"}).encode(),
                                         {"Content-Type": "application/json", "Authorization": "Bearer " + conformance.API_KEY})
        with urllib.request.urlopen(request) as response:
            ids = json.load(response)["tokens"]
        answer = self.client.completions.create(model=self.model, prompt=ids, max_tokens=2)
        self.assertEqual(answer.usage.prompt_tokens, len(ids))

    def test_fields_of_vllm(self):
        answer = self.chat(max_tokens=4, logit_bias={"5": -100}, extra_body={
            "prompt_logprobs": 2, "return_token_ids": True, "min_tokens": 2, "priority": 1, "cache_salt": "s", "include_stop_str_in_output": True,
            "truncate_prompt_tokens": 20, "skip_special_tokens": False, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.05})
        self.assertEqual(answer.usage.prompt_tokens, min(20, answer.usage.prompt_tokens))
        self.assertEqual(len(answer.prompt_logprobs), answer.usage.prompt_tokens)
        self.assertIsNone(answer.prompt_logprobs[0])
        self.assertEqual(len(answer.prompt_token_ids), answer.usage.prompt_tokens)
        for i, told in enumerate(answer.prompt_logprobs[1:], 1):
            own = told[str(answer.prompt_token_ids[i])]
            self.assertLessEqual(own["logprob"], 0)
            self.assertGreaterEqual(own["rank"], 1)
        self.assertEqual(len(answer.choices[0].token_ids), answer.usage.completion_tokens)

    def test_request_ids(self):
        raw = self.client.chat.completions.with_raw_response.create(model=self.model, messages=MESSAGES, max_tokens=2, extra_headers={"X-Request-Id": "mine-1"})
        self.assertEqual(raw.headers["x-request-id"], "mine-1")
        self.assertEqual(raw.parse().id, "chatcmpl-mine-1")
        self.assertTrue(self.chat(max_tokens=1)._request_id)

    def test_errors_arrive_as_the_clients_exceptions(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(temperature=-1)
        self.assertEqual(caught.exception.param, "temperature")
        with self.assertRaises(openai.NotFoundError) as caught:
            self.chat(model="no-such-model")
        self.assertEqual(caught.exception.code, "model_not_found")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(max_tokens=100_000_000)
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        if conformance.API_KEY != "none":
            with self.assertRaises(openai.AuthenticationError):
                openai.OpenAI(base_url=conformance.ROOT + "/v1", api_key=conformance.API_KEY + "x", max_retries=0).models.list()


if __name__ == "__main__":
    conformance.main(__doc__)
