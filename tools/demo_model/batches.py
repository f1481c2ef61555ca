"""Training batches: worker processes that generate, tokenise and pack rows without end.

A row is length + 2 tokens with a weight for each: 10 for answers and plain text, 1 for the prompts of tasks (in tenths). Its documents stand
one behind the other, parted by <|endoftext|>. Rows travel in pieces of PIECE_TOKENS tokens, one queue a length.
"""

import json
import lzma
import multiprocessing
import os
import queue
import random
import time

import numpy

import chat_format
import tasks

LENGTHS = (512, 1024, 4608)
PIECE_TOKENS = 9216  # 18, 9 or 2 rows
ANSWER, PROMPT = 10, 1
SHARE_OF_TEXT_ROWS = 0.35
SHARE_OF_RECALL = {512: 0.35, 1024: 0.55, 4608: 0.75}
CHARS_PER_TOKEN = 3.6


class Corpus:
    """The blocks of one split in their order."""

    def __init__(self, path, split):
        self.texts, self.sources = [], []
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                record = json.loads(line)
                if record["split"] == split:
                    self.texts.append(record["text"])
                    self.sources.append(record["source"])

    def window(self, rng, num_tokens):
        """About num_tokens tokens of running text, beginning and ending between words."""
        chars = int(num_tokens * CHARS_PER_TOKEN)
        number = rng.randrange(len(self.texts))
        text = self.texts[number]
        begin = text.find("\n", rng.randrange(max(1, len(text) - min(chars, len(text) // 2)))) + 1
        parts = [text[begin:]]
        have = len(parts[0])
        while have < chars:
            number = (number + 1) % len(self.texts)
            parts.append(self.texts[number])
            have += len(parts[-1]) + 2
        text = "\n\n".join(parts)
        end = max(text.rfind(" ", 0, chars), text.rfind("\n", 0, chars))
        return text[:end if end > 0 else chars].strip()


class RowMaker:
    def __init__(self, corpus, tokenizer, seed):
        self.corpus, self.tokenizer = corpus, tokenizer
        self.rng = random.Random(seed)
        self.end_of_text = tokenizer.token_to_id("<|endoftext|>")

    def small_conversation(self):
        rng, pick = self.rng, self.rng.random()
        if pick < 0.24:
            return tasks.arithmetic(rng)
        if pick < 0.42:
            return tasks.list_task(rng)
        if pick < 0.52:
            return tasks.json_answer(rng)
        if pick < 0.62:
            return tasks.chat(rng)
        if pick < 0.90:
            return tasks.tool_call(rng)
        return tasks.recall(rng, rng.randint(60, 300), lambda n: self.corpus.window(rng, n))

    def append(self, conversation, tokens, weights):
        parts = chat_format.segments(conversation.messages, conversation.tools, conversation.thinking)
        for encoding, (_, is_answer) in zip(self.tokenizer.encode_batch_fast([text for text, _ in parts]), parts):
            tokens += encoding.ids
            weights += [ANSWER if is_answer else PROMPT] * len(encoding.ids)
        tokens.append(self.end_of_text)
        weights.append(PROMPT)

    def row(self, length):
        rng, tokens, weights = self.rng, [], []
        if rng.random() < SHARE_OF_TEXT_ROWS:
            while len(tokens) < length + 2:
                ids = self.tokenizer.encode(self.corpus.window(rng, length + 2 - len(tokens) + 40)).ids
                tokens += ids
                weights += [ANSWER] * len(ids)
            return tokens[:length + 2], weights[:length + 2]
        if rng.random() < SHARE_OF_RECALL[length]:
            budget = int(length * rng.uniform(0.25, 0.97))
            self.append(tasks.recall(rng, budget, lambda n: self.corpus.window(rng, n)), tokens, weights)
        while len(tokens) < length + 2:
            self.append(self.small_conversation(), tokens, weights)
        return tokens[:length + 2], weights[:length + 2]

    def piece(self, length):
        """(tokens, weights): uint16 and uint8 [rows, length + 2]."""
        rows = [self.row(length) for _ in range(PIECE_TOKENS // length)]
        return numpy.array([r[0] for r in rows], numpy.uint16), numpy.array([r[1] for r in rows], numpy.uint8)


def work(corpus_file, tokenizer_file, seed, queues):
    """Fills the queues without end. A full queue is passed over: a worker that waited for one length would starve the others."""
    from tokenizers import Tokenizer  # after the fork
    os.nice(5)
    maker = RowMaker(Corpus(corpus_file, "train"), Tokenizer.from_file(tokenizer_file), seed)
    ready = {}
    while True:
        order = sorted(range(len(queues)), key=lambda i: queues[i].qsize() + maker.rng.random() * 8)
        for index in order:
            if index not in ready:
                ready[index] = maker.piece(LENGTHS[index])
            try:
                queues[index].put_nowait(ready[index])
            except queue.Full:
                continue
            del ready[index]
            break
        else:
            time.sleep(0.005)


class Stream:
    """Starts the workers; batch(length, pieces) gives tokens and weights [rows, length + 2]."""

    def __init__(self, corpus_file, tokenizer_file, num_workers, seed, capacity=56):
        context = multiprocessing.get_context("fork")
        self.queues = [context.Queue(capacity) for _ in LENGTHS]
        self.workers = [
            context.Process(target=work, args=(corpus_file, tokenizer_file, seed * 1000 + i, self.queues), daemon=True) for i in range(num_workers)]
        for worker in self.workers:
            worker.start()

    def batch(self, length, num_pieces):
        source = self.queues[LENGTHS.index(length)]
        pieces = [source.get(timeout=180) for _ in range(num_pieces)]
        return numpy.concatenate([p[0] for p in pieces]), numpy.concatenate([p[1] for p in pieces])

    def close(self):
        for worker in self.workers:
            worker.terminate()
