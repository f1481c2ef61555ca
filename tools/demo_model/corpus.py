#!/usr/bin/env python3
"""Collects the training text of quern-demo from Debian packages whose texts are in the public domain or under a permissive licence.

  corpus.py WORK_DIR [--out corpus.jsonl.xz]

Downloads the packages (apt-get download) into WORK_DIR, unpacks them there (dpkg -x; nothing is installed), extracts plain text, cuts it
into blocks of about 4,000 characters at paragraph ends and writes one JSON object a line: {"source", "block", "split", "text"}.
A block is held out ("test"), and never trained on, when the SHA-256 of its text begins with a number divisible by 100 (see split_of).
"""

import argparse
import collections
import glob
import gzip
import hashlib
import json
import lzma
import os
import re
import subprocess
import zlib
from html.parser import HTMLParser

PACKAGES = [
    "bible-kjv", "bible-kjv-text", "miscfiles", "postgresql-doc-15", "python3.11-doc", "r-cran-janeaustenr", "sqlite3-doc",
    "wordnet-base",
]
BLOCK_CHARS = 4000
HELD_OUT_ONE_IN = 100


def split_of(text):
    """"test" for one block in a hundred, chosen by the block's content alone."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return "test" if number % HELD_OUT_ONE_IN == 0 else "train"


def fetch(work_dir):
    """Downloads what is missing and unpacks each package into WORK_DIR/root/PACKAGE."""
    os.makedirs(work_dir, exist_ok=True)
    for package in PACKAGES:
        if not glob.glob(os.path.join(glob.escape(work_dir), f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=work_dir, check=True)
        root = os.path.join(work_dir, "root", package)
        if not os.path.isdir(root):
            deb = glob.glob(os.path.join(glob.escape(work_dir), f"{package}_*.deb"))[0]
            os.makedirs(root)
            subprocess.run(["dpkg", "-x", deb, root], check=True)
    return os.path.join(work_dir, "root")


class HtmlText(HTMLParser):
    """The readable text of a page; headers, navigation and scripts are left out."""

    SKIPPED = {"script", "style", "head", "nav", "svg"}
    BREAKS = {"p", "div", "h1", "h2", "h3", "h4", "li", "tr", "br", "dt", "dd", "pre", "table", "ul", "ol"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.skipping, self.pre = [], 0, 0

    def handle_starttag(self, tag, attrs):
        self.skipping += tag in self.SKIPPED
        self.pre += tag == "pre"
        if tag in self.BREAKS:
            self.parts.append("\n\n" if tag in ("p", "h1", "h2", "h3", "pre", "table") else "\n")

    def handle_endtag(self, tag):
        self.skipping -= tag in self.SKIPPED and self.skipping > 0
        self.pre -= tag == "pre" and self.pre > 0
        if tag in self.BREAKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.skipping:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))


def text_of_html(path):
    parser = HtmlText()
    with open(path, encoding="utf-8", errors="replace") as file:
        parser.feed(file.read())
    text = re.sub(r"[ \t]+\n", "\n", "".join(parser.parts))
    return re.sub(r"\n ", "\n", text)


def join_wrapped_lines(text):
    """Paragraphs of a hard-wrapped book as single lines."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(" ".join(line.strip() for line in paragraph.split("\n")) for paragraph in paragraphs)


def r_strings(path):
    """The strings of each object in R's lazy-load data base: zlib streams behind a 4-byte length, holding serialized vectors."""
    with open(path, "rb") as file:
        raw = file.read()
    at = 0
    while at + 6 < len(raw):
        inflate = zlib.decompressobj()
        try:
            data = inflate.decompress(raw[at + 4:])
        except zlib.error:
            at += 1
            continue
        at = len(raw) - len(inflate.unused_data)
        strings, pos = [], 0
        while True:  # a CHARSXP: flags (type 9 in the low byte), length, bytes
            pos = data.find(b"\x00\x09", pos)
            if pos < 2 or pos + 6 > len(data):
                break
            length = int.from_bytes(data[pos + 2:pos + 6], "big")
            if data[pos - 2] == 0 and length < 100000 and pos + 6 + length <= len(data):
                strings.append(data[pos + 6:pos + 6 + length].decode("utf-8", "replace"))
                pos += 6 + length
            else:
                pos += 2
        yield strings


def documents(root):
    """Yields (source, text)."""
    bible = subprocess.run(
        [f"{root}/bible-kjv/usr/bin/bible", "-f", "-p", f"{root}/bible-kjv-text/usr/lib/", "gen1:1-rev22:21"], check=True, stdout=subprocess.PIPE)
    verses = re.sub(r"^\S+ ", "", bible.stdout.decode("latin-1"), flags=re.M)
    yield "bible-kjv-text", re.sub(r"\n(?=\S)", "\n", verses)

    for strings in r_strings(f"{root}/r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"):
        if len(strings) > 1000:
            yield "r-cran-janeaustenr", join_wrapped_lines("\n".join(strings))
    for name in ("us-constitution", "us-declaration"):
        with gzip.open(f"{root}/miscfiles/usr/share/state/{name}.gz", "rt", encoding="utf-8", errors="replace") as file:
            yield "miscfiles", join_wrapped_lines(file.read())

    for path in sorted(glob.glob(f"{root}/python3.11-doc/**/*.txt", recursive=True)):
        if "_sources" in path and "license" not in path:
            with open(path, encoding="utf-8", errors="replace") as file:
                yield "python3.11-doc", file.read()
    for package in ("postgresql-doc-15", "sqlite3-doc"):
        for path in sorted(glob.glob(f"{root}/{package}/**/*.html", recursive=True)):
            if os.path.basename(path) not in ("bookindex.html", "release.html", "doclist.html", "keyword_index.html", "sitemap.html"):
                yield package, text_of_html(path)

    for part in ("noun", "verb", "adj", "adv"):
        lines = []
        with open(f"{root}/wordnet-base/usr/share/wordnet/data.{part}", encoding="utf-8") as file:
            for line in file:
                if line.startswith("  ") or " | " not in line:
                    continue
                head, gloss = line.split(" | ", 1)
                fields = head.split(" ")
                words = [re.sub(r"\(\w+\)", "", fields[4 + 2 * i]).replace("_", " ") for i in range(int(fields[3], 16))]
                lines.append(f"{', '.join(words)}: {gloss.strip()}")
        lines.sort(key=lambda line: hashlib.sha256(line.encode()).digest())
        yield "wordnet-base", "\n".join(lines)


def clean(text):
    text = text.replace("\r", "").replace("\f", "\n").replace("\t", "    ").replace("\u00a0", " ")
    text = re.sub(r"[=\-~^*_#+]{9,}", "--------", text)
    text = re.sub(r"[ ]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def blocks_of(text):
    """Cuts at line ends, at a paragraph's end where there is one near."""
    at = 0
    while at < len(text):
        end = at + BLOCK_CHARS
        if end + BLOCK_CHARS // 4 >= len(text):
            end = len(text)
        else:
            cut = text.find("\n\n", end, end + BLOCK_CHARS // 2)
            if cut < 0:
                cut = text.find("\n", end, end + BLOCK_CHARS)
            end = cut if cut > 0 else end
        block = text[at:end].strip("\n")
        if len(block) > 200:
            yield block
        at = end


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work_dir")
    parser.add_argument("--out", default="corpus.jsonl.xz")
    args = parser.parse_args()
    sizes, seen, number = collections.Counter(), set(), 0
    with lzma.open(args.out, "wt", encoding="utf-8", preset=6) as out:
        for source, text in documents(fetch(args.work_dir)):
            for block in blocks_of(clean(text)):
                digest = hashlib.sha256(block.encode()).digest()
                if digest in seen:
                    continue
                seen.add(digest)
                split = split_of(block)
                sizes[source, split] += len(block)
                out.write(json.dumps({"source": source, "block": number, "split": split, "text": block}, ensure_ascii=False) + "\n")
                number += 1
    for (source, split), size in sorted(sizes.items()):
        print(f"{source:20} {split:5} {size / 1e6:8.3f} M characters")


if __name__ == "__main__":
    main()
