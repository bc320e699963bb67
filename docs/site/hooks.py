"""Pages of the site whose source lies outside docs/: the README, notes for contributors, examples.

MkDocs calls the functions whose names begin with `on_`. Links and paths in backticks lead to the
pages, from wherever the text stands, so one source serves the repository and the site. Indented
blocks get the colors of their language.
"""

import ast
import json
import posixpath
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Where a file of the repository is on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CITATION.cff": "CITATION.cff",
}
_LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)")
_PATH = re.compile(r"(?<![\[`])`([\w./]+\.(?:md|py|ipynb))`(?![\]`])")
_INDENTED = re.compile(r"(?<=\n\n)(?:    .*\n|\n(?=    ))+")
_SHELL = re.compile(r"^(?:uv|pip|python|echo|sbatch|git|\.\.\.|--config\S+)(?= )", re.MULTILINE)
_CODE = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


def on_files(files, config):
    """Adds the pages that lie outside docs/."""
    from mkdocs.structure.files import File  # the tests of the other functions do without MkDocs

    for name, uri in ELSEWHERE.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text()))
    for path in _examples():
        files.append(File.generated(config, _uri(path), content=example_page(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Makes links and paths in backticks lead to pages of the site."""
    sources = {uri: name for name, uri in site_paths().items()}
    uri = page.file.src_uri
    return with_languages(with_links(markdown, sources.get(uri, f"docs/{uri}"), uri))


def site_paths():
    """Where a file that is not in docs/ is on the site, by its path in the repository."""
    examples = {path.relative_to(ROOT).as_posix(): _uri(path) for path in _examples()}
    return ELSEWHERE | examples


def with_links(markdown, source, uri):
    """The text of a page with links between pages of the site.

    Args:
        markdown: text with links between files of the repository.
        source: path of the file in the repository.
        uri: path of the page on the site.
    """

    def target(path, folder):
        path = posixpath.normpath(posixpath.join(folder, path))
        there = site_paths().get(path)
        if there is None and path.startswith("docs/") and (ROOT / path).exists():
            there = path.removeprefix("docs/")
        return there and posixpath.relpath(there, posixpath.dirname(uri) or ".")

    def link(match):
        there = target(match[1], posixpath.dirname(source))
        return f"]({there}{match[2] or ''})" if there else match[0]

    def path(match):
        there = target(match[1], "")
        return f"[{match[0]}]({there})" if there and there != "." else match[0]

    lines, in_block = [], False
    for line in markdown.split("\n"):
        in_block ^= line.startswith("```")
        is_code = in_block or line.startswith("    ")
        lines.append(line if is_code else _PATH.sub(path, _LINK.sub(link, line)))
    return "\n".join(lines)


def with_languages(markdown):
    """The text of a page whose indented blocks are fenced ones that name their language."""

    def fenced(match):
        _, _, before = match.string[: match.start()].rstrip().rpartition("\n")
        if re.match(r"\s|[-*] |\d+\. ", before):
            return match[0]  # It is a part of a list.
        code = textwrap.dedent(match[0]).rstrip()
        return f"```{_language(code)}\n{code}\n```\n"

    parts = re.split(r"(^```.*?^```$)", f"{markdown}\n", flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [_INDENTED.sub(fenced, part) for part in parts[::2]]
    return "".join(parts)


def _language(code):
    try:
        if any(isinstance(node, _CODE) for node in ast.parse(code).body):
            return "python"
    except SyntaxError:
        pass
    return "bash" if _SHELL.search(code) else "text"


def example_page(path):
    """An example as a page: a module's docstring and code, or the cells of a notebook."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        return "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"])
    module = ast.parse(text)
    title, _, rest = ast.get_docstring(module, clean=False).partition("\n")
    code = "\n".join(text.splitlines()[module.body[0].end_lineno :]).strip()
    text = f"# {title.rstrip('.')}\n{rest.rstrip()}\n\n## {path.relative_to(ROOT)}\n\n"
    return f"{text}```python\n{code}\n```\n"


def _cell(cell):
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    outputs = ["".join(output.get("text", ())) for output in cell["outputs"]]
    shown = "".join(f"\n\n```text\n{text.rstrip()}\n```" for text in outputs if text)
    return f"```python\n{source}\n```{shown}"


def _examples():
    return sorted(p for p in (ROOT / "examples").iterdir() if p.suffix in (".py", ".ipynb"))


def _uri(example):
    return f"examples/{example.stem}.md"
