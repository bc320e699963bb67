"""Writes gguf.json: what llama.cpp's converters make of the tiny models of tests/gguf_cases.py.

Of each family convert_hf_to_gguf.py converts the model in bfloat16 to BF16 and to Q8_0, and of some
also the model in NVFP4, and convert_lora_to_gguf.py converts an adapter. The names of
pre-tokenizers are given: the converter recognizes those of published vocabularies alone.

Needs the source of llama-cpp-python==0.3.36, which holds llama.cpp, and torch==2.15.0 (CPU):

    uv run --with torch --with sentencepiece python tests/golden/make_gguf.py LLAMA_CPP_FOLDER
"""

import json
import pathlib
import runpy
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
PACKED = ("llama", "qwen2", "qwen3_moe")
PRE = {"llama": "llama-bpe", "mistral": "tekken", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35"}


def convert(llama_cpp, script, *arguments):
    sys.argv = [script, *map(str, arguments)]
    runpy.run_path(str(llama_cpp / script), run_name="__main__")


def main(llama_cpp):
    # llama.cpp has a later gguf than the one that is installed.
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py"), str(HERE.parent)]
    import gguf_cases
    from conversion.base import ModelBase, TextModel

    ModelBase.no_mtp = True
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for family in gguf_cases.FAMILIES:
            TextModel.get_vocab_base_pre = lambda self, _, f=family: PRE.get(f, "qwen2")
            for packed in (False, True) if family in PACKED else (False,):
                folder = pathlib.Path(scratch) / f"{family}{packed}"
                gguf_cases.write_folder(folder, family, packed=packed)
                for kind in ("bf16",) if packed else ("bf16", "q8_0"):
                    out = folder / "out.gguf"
                    arguments = folder, "--outfile", out, "--outtype", kind
                    convert(llama_cpp, "convert_hf_to_gguf.py", *arguments)
                    found[f"{family}/{'nvfp4' if packed else kind}"] = gguf_cases.describe(out)
            adapter = gguf_cases.write_adapter(pathlib.Path(scratch) / f"{family}-lora", family)
            arguments = adapter, "--base", pathlib.Path(scratch) / f"{family}False"
            convert(
                llama_cpp, "convert_lora_to_gguf.py", *arguments, "--outfile", adapter / "out.gguf"
            )
            found[f"{family}/lora"] = gguf_cases.describe(adapter / "out.gguf")
    text = json.dumps(found, indent=1, sort_keys=True)
    (HERE / "gguf.json").write_text(text + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
