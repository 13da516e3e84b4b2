"""Shapes of prefill and decode, and prompts for them."""

from collections.abc import Sequence
from dataclasses import dataclass

TEXT = """\
A river does not hurry, and yet it arrives. Above the village it is a brook that a child can \
step over; below the mill it turns wheels; at the harbour it carries ships. Ask twelve people \
what it is for and they will give 12 answers: water for the fields, a road, a border, a drain, a \
place to swim in July. The engineer counts cubic metres per second (about 310 in spring, 45 in \
August), the fisherman counts trout, the clerk counts tolls. None of them is wrong. In 1953 it \
rose six metres in two nights and took the lower bridge with it, the chapel's bell, 140 sheep, \
and the schoolmaster's piano, which was found a week later in an orchard, still in tune, or so \
the story goes. Since then there are dykes, a gauge that reports every 15 minutes, and a siren \
that is tested on the first Monday of the month. The old men say that the river has become \
smaller. The gauge says otherwise. What has changed is how often anyone looks: the young have \
the forecast on their telephones and look at the sky less, and at the water hardly ever. Still, \
when the siren sounds on a day that is no Monday, they come out of their houses and stand on the \
dyke together, and somebody always says that it was worse in 1953, and somebody else, who was \
not born then, agrees.
"""


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """A batch of equal prompts and how many tokens follow each."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def context(self) -> float:
        """Cached tokens that a decode step of this case reads on average."""
        return self.prompt_tokens + (self.new_tokens - 1) / 2


def prompt_rows(ids: Sequence[int], case: DecodeCase) -> list[list[int]]:
    """Return a batch of different prompts of one length: `ids`, repeated, from other starts."""
    step = 1 + len(ids) // case.batch
    row = lambda r: [ids[(r * step + i) % len(ids)] for i in range(case.prompt_tokens)]
    return [row(r) for r in range(case.batch)]
