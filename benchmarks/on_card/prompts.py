# SPDX-License-Identifier: Apache-2.0
"""32 prompts of :mod:`benchmarks.on_card.greedy`: facts, code, arithmetic, languages, formats and a long prompt."""

PROMPTS = (
    # Short facts.
    "The capital of Mongolia is",
    "Water boils at a lower temperature on a mountain because",
    "The four largest moons of Jupiter are",
    "Photosynthesis turns carbon dioxide and water into",
    "The author of the novel Middlemarch is",
    "In a leap year, the day after February 28 is",
    "The chemical symbol of tungsten is",
    "List the planets of the solar system in order of their distance from the sun:",
    # Arithmetic and reasoning.
    "17 * 23 =",
    "Question: A train covers 240 km in 3 hours. How far does it go in 5 hours at this speed? Answer:",
    "Question: Ana has 12 marbles, gives a third of them to Ben and buys 5 more. How many has she now? Think step by step.",
    "The first ten prime numbers are 2, 3,",
    "If all rivets are bolts and no bolt is made of wood, then a wooden rivet",
    "1, 1, 2, 3, 5, 8, 13,",
    "The derivative of x^3 * sin(x) with respect to x is",
    "Convert 0x2F to decimal:",
    # Code.
    "def is_palindrome(text: str) -> bool:\n",
    "# Python: merge two sorted lists into one sorted list\ndef merge(a, b):\n",
    "-- SQL: the three customers with the highest total of orders\nSELECT",
    "// C: count the bits that are set in an unsigned int\nint popcount(unsigned x) {\n",
    "#!/bin/sh\n# delete log files older than 30 days in the folder $1\n",
    'fn main() {\n    let words = vec!["pear", "apple", "fig"];\n    // print the words sorted by length\n',
    # Other languages, and between them.
    "Die drei größten Städte Österreichs sind",
    "La photosynthèse est le processus par lequel",
    "日本で一番高い山は",
    "中国最长的河流是",
    "Столица Казахстана — это",
    "عاصمة المغرب هي",
    'Translate into Spanish: "The library closes at six on Fridays, but the reading room stays open." Translation:',
    # Formats.
    'Return JSON with the keys "name", "year" and "country" for the first three Olympic Games of the modern era:\n[',
    "Write a limerick about a compiler that never finishes:\n",
    # A long prompt, whose prefill has more tokens than a decode call.
    "Minutes of the meeting of the harbor board, March 3.\n"
    "The board heard a report on the state of the eastern breakwater. The engineer, Ms. Okafor, said that the storm of "
    "January 12 moved eleven of the outer blocks and opened a gap of about four meters near the light. Divers found that "
    "the footing below the gap is sound. She proposed to place twenty new blocks of eight tons each before the autumn, at a "
    "cost of 310,000, and to move the light twelve meters inland. Mr. Lindqvist asked whether the fishing fleet could use "
    "the inner channel in the meantime. Ms. Okafor answered that boats with a draft of less than two meters could, at high "
    "water. The treasurer, Mr. Pereira, noted that 250,000 remain in the repair fund, and suggested a loan from the county "
    "for the rest. Ms. Tanaka objected to a loan and proposed to raise the mooring fee by four percent for two years "
    "instead. The board voted five to two for the fee. The work is to begin on June 1, after the nesting season of the "
    "terns on the breakwater has been checked by the county's biologist. The next meeting is on April 7.\n"
    "Summary in three sentences:",
)
