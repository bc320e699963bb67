"""Writes trl_fields.json: the fields of TRL's GRPOConfig and the arguments of its GRPOTrainer.

`own` are the fields that GRPOConfig itself declares, `inherited` those of its parents, `trainer`
the arguments of GRPOTrainer; names that begin with _ are left out. docs/from_trl.md names each of
`own` and `trainer`.

Needs trl==1.16.0, with transformers==5.23.0, peft==0.21.2 and torch==2.13.0:

    python tests/golden/make_trl_fields.py
"""

import dataclasses
import inspect
import json
import os
import pathlib

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import trl

PATH = pathlib.Path(__file__).with_name("trl_fields.json")


def main():
    own = trl.GRPOConfig.__annotations__
    fields = [field.name for field in dataclasses.fields(trl.GRPOConfig)]
    arguments = inspect.signature(trl.GRPOTrainer.__init__).parameters
    record = {
        "version": trl.__version__,
        "own": [name for name in fields if name in own],
        "inherited": [name for name in fields if name not in own],
        "trainer": [name for name in arguments if name != "self"],
    }
    PATH.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
