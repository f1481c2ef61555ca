#!/usr/bin/env python3
"""Two `quern serve` with the demo model behind HAProxy, as docs/scaling.md describes it: conversations stay where their prefix is, streams are not
held back, and whoever loses a replica goes on at the other.

  replicas_test.py --quern PROGRAM --model models/quern-demo --config packaging/haproxy/quern.cfg [--haproxy PROGRAM]

Exit status 77 (CTest: skipped) without HAProxy.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

SYSTEM = "You are a patient assistant who answers in full sentences. " * 12


def expect(what, condition, details=""):
    print(f"{'ok  ' if condition else 'FAIL'} {what} {details}", flush=True)
    if not condition:
        sys.exit(1)


def free_port():
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Replica:
    def __init__(self, quern, model, folder, name):
        self.command = [quern, "serve", model, "--device", "cpu", "--threads", "1", "--max-num-seqs", "4", "--served-model-name", "demo",
                        "--disable-log-stats", "--disable-access-log", "--kv-cache-memory-bytes", "64M"]
        self.port, self.log = free_port(), os.path.join(folder, name + ".log")
        self.process = None

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command + ["--port", str(self.port)], stderr=log, stdout=log)

    def wait_until_ready(self):
        while True:
            if self.process.poll() is not None:
                sys.exit(f"quern ended with {self.process.returncode}:\n" + open(self.log).read())
            with contextlib.suppress(OSError):
                if call(self.port, "GET", "/ready")[0] == 200:
                    return
            time.sleep(0.1)

    def end(self, sig):
        self.process.send_signal(sig)
        return self.process.wait()

    def running(self):
        text = call(self.port, "GET", "/metrics")[2]
        line = next(line for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))
        return float(line.split()[-1])


def call(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, json.dumps(body) if body is not None else None, {"content-type": "application/json", **(headers or {})})
    response = connection.getresponse()
    text = response.read().decode()
    return response.status, response.headers.get("x-quern-replica"), text


class Conversation:
    """A chat that is told by `headers` or `fields`, or by nothing but its first message."""

    def __init__(self, port, first, headers=None, fields=None, system=SYSTEM):
        self.port, self.headers, self.fields = port, headers, fields or {}
        self.messages = ([{"role": "system", "content": system}] if system else [])
        self.next, self.replicas, self.cached, self.answers = first, [], [], []

    def body(self, text):
        return {"model": "demo", "temperature": 0, "max_tokens": 40, "messages": self.messages + [{"role": "user", "content": text}], **self.fields}

    def turn(self, text=None):
        text = text or self.next
        status, replica, answer = call(self.port, "POST", "/v1/chat/completions", self.body(text), self.headers)
        expect("a turn is answered", status == 200, answer if status != 200 else f"by {replica}")
        answer = json.loads(answer)
        content = answer["choices"][0]["message"]["content"] or ""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": content}]
        self.replicas.append(replica)
        self.answers.append(content)
        self.cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        self.next = "And what is 3 + 4?"


class Stream:
    def __init__(self, conversation, max_tokens):
        self.connection = http.client.HTTPConnection("127.0.0.1", conversation.port)
        body = {**conversation.body("Count as far as you can."), "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json", **(conversation.headers or {})})
        self.response = self.connection.getresponse()
        expect("a stream begins", self.response.status == 200)

    def read_event(self):
        while line := self.response.readline():
            if line.startswith(b"data: "):
                return line.decode()
        return None

    def ends_well(self):
        last = None
        with contextlib.suppress(http.client.HTTPException, OSError):
            while event := self.read_event():
                last = event
        return last is not None and last.strip() == "data: [DONE]"


def conversations_stay(port):
    told = [Conversation(port, f"What is {i} + 25?") for i in range(10)]
    told += [Conversation(port, f"What is {i} + 3?", system=None) for i in range(2)]
    told += [Conversation(port, "Hello!", headers={"X-Session-Id": f"session {i}"}) for i in range(4)]
    told += [Conversation(port, "Hello!", fields={"prompt_cache_key": f"key {i}"}) for i in range(4)]
    for _ in range(3):
        for conversation in told:
            conversation.turn()
    for conversation in told[:10] + told[12:]:
        expect("a conversation stays at its replica", len(set(conversation.replicas)) == 1, "".join(conversation.replicas))
        expect("and finds what it has cached there", conversation.cached[2] > 64, conversation.cached)
    for conversation in told[10:12]:
        expect("also one without a system message", len(set(conversation.replicas)) == 1, "".join(conversation.replicas))
    expect("both replicas have conversations", {c.replicas[0] for c in told} == {"a", "b"})
    return told


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quern", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--haproxy")
    options = parser.parse_args()
    if not options.haproxy:
        print("SKIPPED: there is no haproxy (apt-get install haproxy); replicas were not tested")
        sys.exit(77)

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        replicas = {name: Replica(options.quern, options.model, folder, name) for name in "ab"}
        for replica in replicas.values():
            replica.start()
            stack.callback(lambda r=replica: r.process.kill() if r.process.poll() is None else None)
        port = free_port()
        text = open(options.config).read()
        for old, new in ((8000, port), (8001, replicas["a"].port), (8002, replicas["b"].port)):
            expect("the configuration has the address", text.count(f"127.0.0.1:{old}\n") + text.count(f"127.0.0.1:{old} ") == 1, old)
            text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
        config = os.path.join(folder, "haproxy.cfg")
        open(config, "w").write(text)
        for replica in replicas.values():
            replica.wait_until_ready()
        log = open(os.path.join(folder, "haproxy.log"), "wb")
        proxy = subprocess.Popen([options.haproxy, "-f", config, "-db"], stderr=log, stdout=log)
        stack.callback(proxy.kill)
        while True:
            if proxy.poll() is not None:
                sys.exit("haproxy ended:\n" + open(os.path.join(folder, "haproxy.log")).read())
            with contextlib.suppress(OSError):
                if call(port, "GET", "/ready")[0] == 200:
                    break
            time.sleep(0.1)

        told = conversations_stay(port)
        at_a = next(c for c in told if c.replicas[0] == "a")
        at_b = next(c for c in told if c.replicas[0] == "b")

        stream = Stream(at_a, 1000)
        for _ in range(3):
            expect("an event", stream.read_event() is not None)
        expect("events arrive while the answer is being made", replicas["a"].running() >= 1)
        at_a_next = at_a.next
        foreseen = json.loads(call(replicas["a"].port, "POST", "/v1/chat/completions", at_a.body(at_a_next))[2])["choices"][0]["message"]["content"] or ""

        expect("replica a is killed", replicas["a"].end(signal.SIGKILL) == -signal.SIGKILL)
        at_a.turn()
        expect("its conversation goes on at b", at_a.replicas[-1] == "b")
        expect("with the same words", at_a.answers[-1] == foreseen, repr(foreseen))
        expect("a stream that was cut does not look complete", not stream.ends_well())
        for conversation in told:
            conversation.turn()
            expect("everybody is served by b", conversation.replicas[-1] == "b")

        replicas["a"].start()
        replicas["a"].wait_until_ready()
        while at_a.replicas[-1] != "a":  # once its check has passed
            at_a.turn()
        at_b.turn()
        expect("the others stayed", at_b.replicas[-1] == "b")

        stream = Stream(at_b, 300)
        expect("an event", stream.read_event() is not None)
        replicas["b"].process.send_signal(signal.SIGTERM)
        expect("a replica that stops ends the stream that runs", stream.ends_well())
        expect("and then itself", replicas["b"].process.wait() == 0)
        at_b.turn()
        expect("what comes later goes to a", at_b.replicas[-1] == "a")
    print("passed")


if __name__ == "__main__":
    main()
