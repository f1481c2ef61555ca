#!/usr/bin/env python3
"""Trains quern-demo.

  train.py --corpus corpus.jsonl.xz --tokenizer tokenizer.json --out RUN_DIR --minutes 9
  train.py ... --resume RUN_DIR/checkpoint.pt --from-progress 0.5      continues, learning rate and lengths as from the middle of a run
  train.py ... --resume model.safetensors ...                          from weights alone
  train.py ... --smoke                                                 a few small steps on a CPU

Progress runs from 0 to 1 over --minutes; it decides the learning rate and the mixture of row lengths. RUN_DIR receives checkpoint.pt (weights
and optimizer) and log.jsonl. Loss: cross entropy of the next token + 0.3 * the MTP head's, whose target is half the text and half the main
head's own distribution (drafts are accepted when the two heads agree).
"""

import argparse
import json
import os
import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import batches
import config
import model as demo
import optimizer

PIECES = 7  # a step's tokens: 7 * 9216 = 64,512
MTP_WEIGHT = 0.3
MUON_RATE, EMBEDDING_RATE, PLAIN_RATE = 0.02, 2e-3, 2e-3


def rate_at(progress, step):
    """A warm-up, a plateau, then down in a straight line."""
    warm = min(1.0, (step + 1) / 100)
    return warm * max(0.02, min(1.0, (1 - progress) / 0.5))


def length_shares(progress):
    """How often each of batches.LENGTHS is drawn."""
    if progress < 0.2:
        return 0.8, 0.2, 0.0
    if progress < 0.45:
        return 0.35, 0.4, 0.25
    return 0.2, 0.3, 0.5


@demo.Compiled
def head_losses(hidden, mtp_hidden, embedding, next_tokens, second_tokens, weights, second_weights, distill):
    """Weighted sums over whole rows laid end to end: next-token loss, MTP loss, and how often the draft equals the main head's choice.
    hidden, mtp_hidden [rows * length, hidden]."""
    logits = F.linear(hidden, embedding).float()
    log_p = logits.log_softmax(-1)
    main = -(weights * log_p.gather(-1, next_tokens[:, None])[:, 0]).sum()
    log_q = F.linear(mtp_hidden, embedding).float().log_softmax(-1)
    log_p_later = log_p.detach().roll(-1, 0)  # the main head one token on; a row's last weights are 0
    to_text = -log_q.gather(-1, second_tokens[:, None])[:, 0]
    to_main = -(log_p_later.exp() * log_q).sum(-1)
    mtp = (second_weights * ((1 - distill) * to_text + distill * to_main)).sum()
    agree = (second_weights * (log_q.argmax(-1) == log_p_later.argmax(-1))).sum()
    return main, mtp, agree


def training_step(model, tokens, weights, distill, num_groups):
    """tokens, weights [rows, length + 2] on the device; leaves gradients. Returns (main loss, MTP loss, agreement), tensors."""
    next_tokens, second_tokens = tokens[:, 1:-1], tokens[:, 2:]
    w1 = weights[:, 1:-1].float()
    w2 = weights[:, 2:].float().clone()
    w2[:, -1] = 0
    w1_total, w2_total = w1.sum(), w2.sum()
    hidden = model.hidden(demo.chunk_major(tokens[:, :-2]))
    mtp_hidden = model.mtp_hidden(hidden, demo.chunk_major(next_tokens))
    chunks = (tokens.shape[1] - 2) // 64
    embedding = model.tensor("model.embed_tokens.weight").to(model.dtype)
    flat = [demo.time_major(hidden, chunks).flatten(0, 1), demo.time_major(mtp_hidden, chunks).flatten(0, 1)]
    rest = [x.flatten() for x in (next_tokens, second_tokens, w1, w2)]
    totals = [0.0, 0.0, 0.0]
    for parts in zip(*(x.chunk(num_groups) for x in flat + rest)):
        losses = head_losses(parts[0], parts[1], embedding, *parts[2:], distill)
        totals = [a + b for a, b in zip(totals, losses)]
    main, mtp, agree = totals[0] / w1_total, totals[1] / w2_total, totals[2] / w2_total
    (main + MTP_WEIGHT * mtp).backward()
    return main.detach(), mtp.detach(), agree.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--resume")
    parser.add_argument("--from-progress", type=float, default=0.0)
    parser.add_argument("--to-progress", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()

    started = time.time()
    cuda = torch.cuda.is_available() and not args.smoke
    device = "cuda" if cuda else "cpu"
    pieces, max_steps, workers = (PIECES, args.max_steps, args.workers) if cuda else (1, min(args.max_steps, 6), 1)
    os.makedirs(args.out, exist_ok=True)
    stream = batches.Stream(args.corpus, args.tokenizer, workers, args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    demo.Compiled.enabled = cuda and not args.no_compile
    model = demo.Model(config.CONFIG).to(device)
    muon_names, decayed, plain = optimizer.split_parameters(model)
    muon = optimizer.Muon([model.tensor(n) for n in muon_names])
    adam = torch.optim.AdamW([
        {"params": [model.tensor(n) for n in decayed], "rate": EMBEDDING_RATE, "weight_decay": 0.05},
        {"params": [model.tensor(n) for n in plain], "rate": PLAIN_RATE, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95), fused=cuda)
    step = tokens_seen = 0
    if args.resume:
        if args.resume.endswith(".safetensors"):
            model.load_checkpoint(load_file(args.resume))
        else:
            saved = torch.load(args.resume, map_location=device)
            model.load_checkpoint(saved["model"])
            muon.load_state(saved["muon"])
            adam.load_state_dict(saved["adam"])
            step, tokens_seen = saved["step"], saved["tokens_seen"]

    def save():
        target = os.path.join(args.out, "checkpoint.pt")
        torch.save({"model": model.checkpoint(), "muon": muon.state(), "adam": adam.state_dict(), "step": step, "tokens_seen": tokens_seen},
                   target + ".new")
        os.replace(target + ".new", target)

    log = open(os.path.join(args.out, "log.jsonl"), "a", encoding="utf-8")
    first_step, credit, sums, reported = step, [0.0] * len(batches.LENGTHS), [], time.time()
    saved_at = reported
    begin = None
    while step - first_step < max_steps:
        span = args.to_progress - args.from_progress
        if begin is None and step - first_step >= 3:
            begin = time.time()  # what is compiled first does not count
        progress = args.from_progress + (span * (time.time() - begin) / (args.minutes * 60) if begin else 0.0)
        if progress >= args.to_progress:
            break
        # The length that is furthest behind its share.
        shares = length_shares(progress) if cuda else (0.5, 0.5, 0.0)
        credit = [c + s for c, s in zip(credit, shares)]
        index = max(range(len(credit)), key=lambda i: credit[i])
        credit[index] -= 1
        tokens, weights = stream.batch(batches.LENGTHS[index], pieces)
        if not cuda:  # two rows of 128 tokens: the same code, in seconds
            tokens, weights = tokens[:2, :130], weights[:2, :130]
        tokens = torch.from_numpy(tokens.astype("int64")).to(device, non_blocking=True)
        weights = torch.from_numpy(weights).to(device, non_blocking=True)
        losses = training_step(model, tokens, weights, 0.5, pieces)
        scale = rate_at(progress, step)
        muon.step(MUON_RATE * scale)
        for group in adam.param_groups:
            group["lr"] = group["rate"] * scale
        adam.step()
        model.zero_grad(set_to_none=True)
        step += 1
        tokens_seen += tokens.shape[0] * (tokens.shape[1] - 2)
        sums.append(torch.stack(losses))
        if step % 50 == 0 or not cuda or step - first_step in (1, 2, 3, 5, 10, 20):
            main_loss, mtp_loss, agree = torch.stack(sums).mean(0).tolist()
            now = time.time()
            record = {"step": step, "tokens": tokens_seen, "progress": round(progress, 4), "loss": round(main_loss, 4), "mtp_loss": round(mtp_loss, 4),
                      "agree": round(agree, 4), "rate": round(scale, 4), "ms_per_step": round(1000 * (now - reported) / len(sums), 1),
                      "seconds": round(now - started, 1), "queued": [q.qsize() for q in stream.queues]}
            print(json.dumps(record), flush=True)
            log.write(json.dumps(record) + "\n")
            log.flush()
            sums, reported = [], now
            if main_loss != main_loss:
                raise SystemExit("the loss is not a number")
            if now - saved_at > 60:
                save()
                saved_at = now
    save()
    stream.close()
    print(f"{step} steps, {tokens_seen:,} tokens, {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
