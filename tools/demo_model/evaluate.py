#!/usr/bin/env python3
"""Evaluates quern-demo: tasks, perplexity and acceptance of drafts on held-out text.

  evaluate.py --weights checkpoint.pt|model.safetensors --corpus corpus.jsonl.xz --tokenizer tokenizer.json [--out eval.json] [--scale 1.0]

Answers are generated greedily, the whole sequence anew for each token (no cache: the plainest way to be right). Acceptance: the MTP head's
first draft at each position of the generated text, made from (h_t, x_{t+1}), against the main head's next choice.
"""

import argparse
import collections
import json
import math
import time

import torch
from tokenizers import Tokenizer

import batches
import config
import model as demo
import questions

MAX_BATCH_TOKENS = 200_000


def load_weights(path):
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file
        return {name: tensor.float() for name, tensor in load_file(path).items()}
    return torch.load(path, map_location="cpu")["model"]


class Runner:
    def __init__(self, model, tokenizer, device):
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.im_end = tokenizer.token_to_id("<|im_end|>")
        self.end_of_text = tokenizer.token_to_id("<|endoftext|>")
        self.num_defined = tokenizer.get_vocab_size()

    def hidden(self, sequences):
        """Hidden states, time-major [batch, time, hidden], and the padded tokens and the number of chunks."""
        longest = max(map(len, sequences))
        tokens = torch.zeros(len(sequences), longest + -longest % 64, dtype=torch.long)
        for row, sequence in zip(tokens, sequences):
            row[:len(sequence)] = torch.tensor(sequence)
        tokens = tokens.to(self.device)
        chunked = demo.chunk_major(tokens)
        hidden = self.model.hidden(chunked)
        return hidden, tokens, len(chunked)

    @torch.no_grad()
    def next_tokens(self, sequences):
        hidden, _, chunks = self.hidden(sequences)
        last = torch.tensor([len(s) - 1 for s in sequences], device=self.device)
        rows = demo.time_major(hidden, chunks)[torch.arange(len(sequences), device=self.device), last]
        return self.model.logits(rows)[:, :self.num_defined].argmax(-1).tolist()

    def generate(self, prompts, max_new, stop=True):
        """prompts: lists of ids -> lists of generated ids, the end of the turn included."""
        generated = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        while order:
            room = 1
            while room < len(order) and (room + 1) * (len(prompts[order[room]]) + max_new) <= MAX_BATCH_TOKENS:
                room += 1
            live, order = order[:room], order[room:]
            for _ in range(max_new):
                for i, token in zip(live, self.next_tokens([prompts[i] + generated[i] for i in live])):
                    generated[i].append(token)
                if stop:
                    live = [i for i in live if generated[i][-1] not in (self.im_end, self.end_of_text)]
                if not live:
                    break
        return generated

    @torch.no_grad()
    def acceptance(self, prompts, generated):
        """(accepted, drafts) over positions t where x_{t+1} is the prompt's last token or a generated one and x_{t+2} is generated."""
        accepted = drafts = 0
        pairs = sorted(zip(prompts, generated), key=lambda p: len(p[0]))
        size = max(1, MAX_BATCH_TOKENS // 2 // max(len(p) + len(g) for p, g in pairs))
        for at in range(0, len(pairs), size):
            part = pairs[at:at + size]
            hidden, tokens, chunks = self.hidden([p + g for p, g in part])
            following = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
            mtp = demo.time_major(self.model.mtp_hidden(hidden, demo.chunk_major(following)), chunks)
            for row, (prompt, answer) in zip(mtp, part):
                first, last = len(prompt) - 2, len(prompt) + len(answer) - 3
                if first < 0 or last < first:
                    continue
                draft = self.model.logits(row[first:last + 1])[:, :self.num_defined].argmax(-1).tolist()
                accepted += sum(a == b for a, b in zip(draft, answer))
                drafts += len(draft)
        return accepted, drafts

    @torch.no_grad()
    def text_scores(self, ids, window=1024):
        """Consecutive windows, each scored from its second token: (nats, tokens, agreement of drafts with the main head's choice, drafts)."""
        nats, count, agree, drafts = 0.0, 0, 0, 0
        windows = [ids[i:i + window] for i in range(0, len(ids), window) if len(ids[i:i + window]) > 2]
        for at in range(0, len(windows), 32):
            part = windows[at:at + 32]
            hidden, tokens, chunks = self.hidden(part)
            following = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
            mtp = demo.time_major(self.model.mtp_hidden(hidden, demo.chunk_major(following)), chunks)
            hidden = demo.time_major(hidden, chunks)
            for row, mtp_row, sequence in zip(hidden, mtp, part):
                n = len(sequence)
                logits = self.model.logits(row[:n - 1]).float()
                target = torch.tensor(sequence[1:], device=self.device)
                nats += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
                count += n - 1
                choice = logits[1:].argmax(-1)
                draft = self.model.logits(mtp_row[:n - 2]).argmax(-1)
                agree += (choice == draft).sum().item()
                drafts += n - 2
        return nats, count, agree, drafts


def evaluate(runner, corpus, scale):
    report = {}
    encode = lambda text: runner.tokenizer.encode(text).ids
    by_source = collections.defaultdict(list)
    for source, text in zip(corpus.sources, corpus.texts):
        by_source[source].append(text)
    totals = [0.0, 0, 0, 0]
    for source, texts in sorted(by_source.items()):
        part = runner.text_scores(encode("\n\n".join(texts[:max(1, int(8 * scale))])))
        totals = [a + b for a, b in zip(totals, part)]
        print(f"text {source}: perplexity {math.exp(part[0] / part[1]):.2f}, drafts agree {part[2] / part[3]:.3f}", flush=True)
    report["perplexity"] = round(math.exp(totals[0] / totals[1]), 3)
    report["agreement_on_text"] = round(totals[2] / totals[3], 4)
    prompts = [encode(text)[:192] for text in corpus.texts[:max(2, int(64 * scale))]]
    generated = runner.generate(prompts, 96, stop=False)
    accepted, drafts = runner.acceptance(prompts, generated)
    report["acceptance_text_continued"] = round(accepted / drafts, 4)
    print(json.dumps(report), flush=True)
    sets = [("recall_256", 200, 40), ("recall_1k", 200, 40), ("recall_4k", 160, 40), ("arithmetic", 600, 90), ("tool_call", 300, 110),
            ("tool_answer", 150, 70), ("json", 200, 120), ("list", 300, 90), ("chat", 200, 60)]
    structured = [0, 0]
    examples = []
    for kind, count, max_new in sets:
        started = time.time()
        asked = questions.questions(kind, max(2, int(count * scale)), corpus)
        prompts = [encode(q["prompt"]) for q in asked]
        generated = runner.generate(prompts, max_new)
        tally = collections.defaultdict(lambda: [0, 0])
        ended = 0
        wrong = []
        for question, ids in zip(asked, generated):
            text = runner.tokenizer.decode(ids, skip_special_tokens=False)
            right = questions.is_right(question, text)
            ended += ids[-1] == runner.im_end
            for key in ("all", question["kind"], "thinking" if question["thinking"] else "direct"):
                tally[key][0] += right
                tally[key][1] += 1
            if not right:
                wrong.append({"prompt": question["prompt"][-200:], "expected": question["expected"], "got": text})
        accepted, drafts = runner.acceptance(prompts, generated)
        if kind in ("tool_call", "json"):
            structured[0] += accepted
            structured[1] += drafts
        report[kind] = {"right": round(tally["all"][0] / tally["all"][1], 4), "count": len(asked), "ended": round(ended / len(asked), 4),
                        "acceptance": round(accepted / max(1, drafts), 4), "prompt_tokens": round(sum(map(len, prompts)) / len(prompts)),
                        "parts": {k: f"{a}/{b}" for k, (a, b) in sorted(tally.items()) if k != "all"}}
        examples += wrong[:4]
        print(kind, json.dumps(report[kind]), f"{time.time() - started:.1f} s", flush=True)
    report["acceptance_structured"] = round(structured[0] / max(1, structured[1]), 4)

    print(json.dumps({k: v for k, v in report.items() if not isinstance(v, dict)}))
    return report, examples


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out")
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = demo.Model(config.CONFIG, torch.bfloat16 if device == "cuda" else torch.float32)
    # Round the weights once, as the exported file does.
    model.load_checkpoint({name: tensor.bfloat16().float() for name, tensor in load_weights(args.weights).items()})
    model.to(device)
    runner = Runner(model, Tokenizer.from_file(args.tokenizer), device)
    report, examples = evaluate(runner, batches.Corpus(args.corpus, "test"), args.scale)
    for example in examples[:24]:
        print("WRONG:", json.dumps(example))
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"report": report, "wrong": examples}, file, indent=1)


if __name__ == "__main__":
    main()
