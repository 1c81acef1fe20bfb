"""Makes questions about facts in real prose: JSON lines of messages. A fact stands in the first 70 % of a passage, the question behind it.
Without facts, the passages alone: JSON lines of text.

    python3 recipes/real/needles.py --prose data/real/prose --sections A,B,C --characters 6600 --rows 64 --facts 1 --seed 1 > rows.jsonl

Needs Python alone. Sections are those of the FAQ: what is judged comes from others than what is trained on.
"""

import argparse
import html.parser
import json
import pathlib
import random
import re

NAMES = ("Amber Birch Cedar Delta Ember Falcon Garnet Harbor Indigo Juniper Kestrel Lantern Maple Nectar Onyx Pepper Quartz Raven "
         "Saffron Timber").split()


class Text(html.parser.HTMLParser):
    """The text of a page, with a blank after each block."""

    HIDDEN = {"script", "style", "head"}

    def __init__(self):
        super().__init__()
        self.parts, self.hidden = [], 0

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in self.HIDDEN
        self.parts.append(" ")

    def handle_endtag(self, tag):
        self.hidden -= tag in self.HIDDEN

    def handle_data(self, data):
        if self.hidden <= 0:
            self.parts.append(data)


def sentences_of(page):
    text = Text()
    text.feed(page.read_text(encoding="utf-8", errors="ignore"))
    return re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", "".join(text.parts)).strip())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prose", type=pathlib.Path, required=True)
    parser.add_argument("--sections", required=True, help="letters of the FAQ's sections")
    parser.add_argument("--characters", type=int, default=6600, help="of a passage: some 4.3 are a token")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--facts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    sections = arguments.sections.split(",")
    pages = sorted(page for section in sections for page in arguments.prose.glob(f"sec{section}[0-9]*.html"))
    if not pages:
        parser.error(f"no page of the sections {arguments.sections} in {arguments.prose}")
    pages = [sentences_of(page) for page in pages]
    pages = [page for page in pages if sum(map(len, page)) > 2 * arguments.characters]
    for _ in range(arguments.rows):
        page = draw.choice(pages)
        start, passage = draw.randrange(len(page)), []
        while sum(map(len, passage)) < arguments.characters:
            passage.append(page[start % len(page)])
            start += 1
        if arguments.facts == 0:
            print(json.dumps({"text": " ".join(passage)}))
            continue
        names = draw.sample(NAMES, arguments.facts)
        codes = [str(draw.randrange(1000, 10000)) for _ in names]
        for name, code in zip(names, codes):
            passage.insert(draw.randrange(1, int(0.7 * len(passage))), f"The secret code of the {name} warehouse is {code}.")
        asked = draw.randrange(arguments.facts)
        question = f"What is the secret code of the {names[asked]} warehouse? Answer with the number alone."
        user = f"Read this text and remember the secret codes in it.\n\n{' '.join(passage)}\n\n{question}"
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": codes[asked]}]
        print(json.dumps({"messages": messages}))


main()
