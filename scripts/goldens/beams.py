"""Golden beam searches of transformers in float32, for tests/generation/test_beam_search.py.

Run in the environment that scripts/peers.sh makes (torch on CPU and transformers):

    python scripts/goldens/beams.py tests/data/beams.json

The model is the `llama` case of scripts/goldens/families.py.
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path

# The repository's root in place of this folder, whose tokenizers.py would hide the package.
sys.path[0] = str(Path(__file__).parents[2])

import numpy as np
import torch
import transformers

from scripts.goldens.families import build

MAX_NEW = 20
# End-of-sequence ids that this model likes at these prompts, so that beams end at many lengths.
STOPS = [[], [88], [88, 30, 4]]
PROMPT_LENGTHS = [5, 17]


def main(out: Path) -> None:
    cases = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model, _, _ = build("llama", Path(folder))
        model.generation_config.eos_token_id = None
        grid = itertools.product(
            PROMPT_LENGTHS, (1, 2, 5), STOPS, (0.0, 1.0, 2.5, -1.0), (False, True, "never")
        )
        for length, num_beams, stops, penalty, early in grid:
            if num_beams == 1:
                continue  # greedy in transformers
            prompt = np.random.RandomState(length).randint(3, 97, (1, length))
            ids = torch.from_numpy(prompt)
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=transformers.GenerationConfig(
                    do_sample=False,
                    num_beams=num_beams,
                    num_return_sequences=num_beams,
                    length_penalty=penalty,
                    early_stopping=early,
                    max_new_tokens=MAX_NEW,
                    eos_token_id=stops or None,
                    pad_token_id=96,
                    bos_token_id=1,
                    return_dict_in_generate=True,
                    output_scores=True,
                ),
            )
            sequences = found.sequences[:, length:].tolist()
            cases.append(
                dict(
                    prompt=prompt[0].tolist(),
                    num_beams=num_beams,
                    stop_token_ids=stops,
                    length_penalty=penalty,
                    early_stopping=early,
                    sequences=sequences,
                    scores=found.sequences_scores.tolist(),
                )
            )
    lengths = {len([t for t in s if t != 96]) for c in cases for s in c["sequences"]}
    print(f"{len(cases)} searches, sequences of {sorted(lengths)} tokens")
    versions = dict(transformers=transformers.__version__, torch=torch.__version__)
    out.write_text(json.dumps(dict(versions=versions, max_new=MAX_NEW, pad=96, cases=cases)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
