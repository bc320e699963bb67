"""No field of the config is dead: a run reads each of them."""

import dataclasses

import pytest
from ml_collections import ConfigDict

import qerl_jax.training.loop
from experiments import grpo_gsm8k
from experiments.configs.grpo_gsm8k import get_config

# What is read only where it is used.
CHANGES = {
    "steps": 1,
    "aqn.correction": "tis",
    "rl.dynamic_sampling": True,
    "rl.dynamic_sampling_rounds": 2,
}
# A table of options that a task of reasoning_gym reads.
TABLES = ("data.options",)


@dataclasses.dataclass
class Recorded:
    """A config that notes which of its fields are read; a copy of the whole is no read."""

    config: ConfigDict
    reads: set
    prefix: str = ""

    def __getattr__(self, name):
        return self[name] if name in self.config else getattr(self.config, name)

    def __getitem__(self, name):
        value, path = self.config[name], self.prefix + name
        if isinstance(value, ConfigDict) and path not in TABLES:
            return Recorded(value, self.reads, f"{path}.")
        self.reads.add(path)
        return value

    def __contains__(self, name):
        return name in self.config

    def __iter__(self):
        return iter(self.config)

    def items(self):
        return [(name, self[name]) for name in self.config]

    def values(self):
        return [self[name] for name in self.config]


def fields(config, prefix=""):
    """The paths of all fields of a config."""
    paths = set()
    for name, value in config.items():
        path = prefix + name
        if isinstance(value, ConfigDict) and path not in TABLES:
            paths |= fields(value, f"{path}.")
        else:
            paths.add(path)
    return paths


@pytest.fixture(scope="module")
def unread(tiny, tmp_path_factory):
    """The fields that a run did not read, of a config with one field that nothing knows."""
    config = tiny.config(CHANGES)
    with config.unlocked():
        config.rl.surprise = 1.0
    recorded = Recorded(config, set())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cwd"))
        # To compare a value with its limits is not to use it.
        validate = qerl_jax.training.loop.validate
        patch.setattr(qerl_jax.training.loop, "validate", lambda config: validate(config.config))
        grpo_gsm8k.run(recorded, None)
    return fields(config) - recorded.reads


def test_every_field_is_read(unread):
    assert unread - {"rl.surprise"} == set()


def test_a_dead_field_is_noticed(unread):
    assert "rl.surprise" in unread


def test_the_tiny_config_has_the_fields_of_the_shipped_one(tiny):
    assert fields(tiny.config()) == fields(get_config())
