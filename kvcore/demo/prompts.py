"""The prompts of the demo: ten short ones as they are, ten cut from one text at lengths that meet the edges of pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcore.demo.models import Tokenizer
from kvcore.errors import ConfigError

SHORT = (
    "A",
    "Hello",
    "The capital of France is",
    "Two plus two equals",
    "Write a haiku about the sea.",
    "Water boils at a temperature of",
    "Translate to German: good morning",
    "Once upon a time, in a village by a river,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Question: what do prefill and decode have in common?\nAnswer: they share",
)
LENGTHS = (16, 17, 33, 64, 65, 130, 200, 320, 512, 1050)

TEXT = """
The old lighthouse stood at the end of a narrow spit of land, and every evening its keeper climbed two hundred and twelve steps
to light the lamp. He had done so for thirty years. Ships passed far out, bound for harbours whose names he knew only from the
labels on crates: Valparaiso, Trieste, Yokohama, Aden. In winter the spray froze on the railings and the gulls sat in the lee of
the wall. In summer children came from the village with nets and buckets, and he told them which pools held crabs and which held
only weed. He kept a journal. Most days he wrote the height of the tide, the direction of the wind and the number of ships; on
some days he wrote a little more. On the third of March he noted that a barque had passed with her foremast gone. On the ninth of
June he noted a whale. When the inspector came to say that the lamp would soon be lit by a machine, the keeper asked what the
machine would write in the journal, and the inspector, who was a careful man, said that he would find out.
A machine was duly installed in the autumn. It was painted green, it hummed, and it needed oil once a week, which a boy brought
from the village on a bicycle. The keeper stayed on in the cottage, since nobody had told him to leave. He still woke at dusk. He
still counted ships, and found that there were fewer of them, or that they passed farther out, or that his eyes were no longer
what they had been. One night in November the humming stopped. The keeper took the matches from the shelf, climbed the steps one
by one, cleaned the glass with his sleeve and lit the old lamp, which he had kept filled all that time. Toward morning a steamer
sounded her horn twice, as if in greeting. He wrote that down, with the hour, and under it he wrote: lamp lit by hand.
In the spring a letter arrived, with a stamp from a country he had to look up. It was from the captain of the steamer, who wished
to thank whoever had been on duty. There had been, he wrote, forty passengers, a cargo of oranges and a piano on board, and a
second officer on his first voyage who had very nearly mistaken one light for another. The keeper read the letter to the boy with
the bicycle, then to the inspector, and in the end to the whole village, in the schoolroom, under a map on which the children had
marked every harbour he had ever named. Somebody asked him whether he would go and see one of those places now. He thought about
it for longer than they expected. Then he said that he would like to see where the oranges came from, but only for a week, and
only if the boy would promise to count the ships while he was away, and to write down the wind, and the tide, and anything else
that seemed worth a line. The boy promised. He bought a pencil the same afternoon and began to practise: wind from the south-west,
light; tide at four; three ships, one of them very large; a dog on the beach that belonged to nobody. The keeper read it over his
shoulder, corrected the spelling of one word, and said that it was a good beginning, and that the dog was exactly right.
He left on a Monday. The steamer that took him was the one whose captain had written, and the second officer, who had since grown
a beard, showed him the bridge, the charts and the place on the rail where he had stood that night. They passed the spit at dusk.
The lamp was lit, a little late, and on the rocks below it a small figure held up a book and waved with it until it was too dark
to see. The keeper looked at his watch, then at the water, and said that the tide was about to turn.
"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's text and its tokens, at least one."""

    text: str
    tokens: tuple[int, ...]


def default_prompts(tokenizer: Tokenizer) -> list[Prompt]:
    """Twenty prompts of 1 to 1050 tokens."""
    passage = tokenizer.encode(" ".join(TEXT.split()))
    while len(passage) < 2 * max(LENGTHS):
        passage = passage + passage
    cuts = [passage[11 * number :][:length] for number, length in enumerate(LENGTHS)]  # no two share a page
    return [_prompt(text, tokenizer) for text in SHORT] + [Prompt(tokenizer.decode(cut), tuple(cut)) for cut in cuts]


def prompts_from(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of a UTF-8 file, one a line, empty lines left out; raises ``ConfigError`` if there are none or it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts file {path} cannot be read ({error}); give a UTF-8 text file with one prompt a line") from error
    prompts = [_prompt(line, tokenizer) for line in lines if line.strip()]
    prompts = [prompt for prompt in prompts if prompt.tokens]
    if not prompts:
        raise ConfigError(f"prompts file {path} holds no prompt; write one a line")
    return prompts


def _prompt(text: str, tokenizer: Tokenizer) -> Prompt:
    return Prompt(text, tuple(tokenizer.encode(text)))
