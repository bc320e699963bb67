"""Records which fields of a config are read."""

import dataclasses

from ml_collections import ConfigDict

# Tables whose keys a task of reasoning_gym, verifiers or a chat template reads; each counts as one
# field.
TABLES = ("data.options", "data.chat_template_args", "environment.options")


@dataclasses.dataclass
class Recorded:
    """A config that records which of its fields are read; copying the whole does not count."""

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

    def get(self, name, default=None):
        return self[name] if name in self.config else default

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
