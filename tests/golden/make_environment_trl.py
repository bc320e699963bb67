"""Writes environment_trl.json: token ids and masks that TRL makes of conversations with tools.

For Qwen2.5, Qwen3, Qwen3.5 and Llama 3.1, TRL's own loop over tool calls runs,
`GRPOTrainer._tool_call_loop`, with the texts of TURNS in place of what a model would generate. The
templates of Qwen3 and Qwen3.5 are not prefix-preserving, and TRL takes its training templates for
them. TRL knows no tools of Mistral: its ids are those of the whole conversation in the template,
where what the policy writes is exactly what the template writes; its mask follows from the parts.

    {family: {template, source, turns: [text], prompt_ids, completion_ids, mask, messages}}

`completion_ids` and `mask` are of everything after the prompt; the mask is 1 for what was sampled.
`messages` are what TRL gives rewards as the completion, but for Mistral.
The chat templates but Mistral's are those of the package trl==1.16.0 (trl/chat_templates);
Mistral's is that of Mistral-7B-Instruct-v0.3 as vllm-project/vllm has it
(examples/tool_chat_template_mistral_official.jinja), whose path is the argument.

Needs Python 3.11 or 3.12, torch (CPU), trl==1.16.0, transformers==5.24.0, accelerate, datasets:

    python tests/golden/make_environment_trl.py tool_chat_template_mistral_official.jinja
"""

import json
import pathlib
import sys
import tempfile
import types

import trl.chat_template_utils as templates
from environment_tokenizer import FAMILIES, write
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema
from trl.trainer.grpo_trainer import GRPOTrainer

PATH = pathlib.Path(__file__).parent / "environment_trl.json"
PROMPT = [{"role": "user", "content": "What is 17 + 25, and twice that? Use the tool."}]


class Calculator:
    """The environment of tests/environment_cases.py, as far as messages of errors name it."""

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: the first number.
            b: the second number.

        Returns:
            The sum.
        """
        return a + b


add = Calculator().add


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def xml(*calls):
    """Calls as Qwen3.5's template writes them."""

    def parameters(call):
        items = call["arguments"].items()
        return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in items)

    return "\n".join(
        f"<tool_call>\n<function={call['name']}>\n{parameters(call)}</function>\n</tool_call>"
        for call in calls
    )


FIRST = {"name": "add", "arguments": {"a": 17, "b": 25}}
SECOND = {"name": "add", "arguments": {"a": 42, "b": 42}}
WRONG = {"name": "add", "arguments": {"a": 42, "c": 42}}
UNKNOWN = {"name": "mul", "arguments": {"a": 42, "b": 2}}
THOUGHT = "<think>\nI add.\n</think>\n\n"
TURNS = {
    "qwen2_5": [
        f"Let me add.\n{hermes(FIRST)}",
        hermes(WRONG, UNKNOWN),
        hermes(SECOND),
        "It is 42, and twice that is 84.",
    ],
    "qwen3": [
        f"{THOUGHT}{hermes(FIRST)}",
        f"{THOUGHT}{hermes(SECOND, FIRST)}",
        f"{THOUGHT}It is 42, and twice that is 84.",
    ],
    "qwen3_5_think": [
        f"I add.\n</think>\n\n{xml(FIRST)}",
        f"I add.\n</think>\n\nOnce more.\n\n{xml(SECOND, FIRST)}",
        "I have it.\n</think>\n\nIt is 42, and twice that is 84.",
    ],
    "qwen3_5_nothink": [
        f"Let me add.\n\n{xml(FIRST)}",
        xml(WRONG, UNKNOWN),
        xml(SECOND),
        "It is 42, and twice that is 84.",
    ],
    "llama3_1": [
        '{"name": "add", "parameters": {"a": 17, "b": 25}}',
        '{"name": "add", "parameters": {"a": 42, "c": 42}}',
        '{"name": "add", "parameters": {"a": 42, "b": 42}}',
        "It is 42, and twice that is 84.",
    ],
    "mistral": [
        f"[TOOL_CALLS] [{json.dumps(FIRST | {'id': 'a1b2c3d4e'})}]",
        f"[TOOL_CALLS] [{json.dumps(SECOND | {'id': 'f1b2c3d4e'})}]",
        " It is 42, and twice that is 84.",
    ],
}


def tokenizer_of(family, template):
    bos, eos, _ = FAMILIES[family]
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder), family)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=f"{folder}/tokenizer.json", eos_token=eos, bos_token=bos or None
        )
    tokenizer.chat_template = template
    return tokenizer


def with_trl(family):
    """The loop of TRL, whose model writes the turns of the table."""
    original = getattr(templates, f"{family}_chat_template")
    tokenizer = templates.add_response_schema(tokenizer_of(family, original))
    template = None
    if not templates.is_chat_template_prefix_preserving(tokenizer):
        template = templates.get_training_chat_template(tokenizer)
    turns = [
        tokenizer(text + FAMILIES[family][1], add_special_tokens=False)["input_ids"]
        for text in TURNS[family]
    ]
    tools = [add]
    prompt_ids = tokenizer.apply_chat_template(
        PROMPT, tools=tools, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    later = iter(turns[1:])
    trainer = types.SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=template,
        chat_template_kwargs={},
        _is_vlm=False,
        use_vllm=False,
        tools=tools,
        max_tool_calling_iterations=10,
        max_completion_length=10_000,
        _sync_tool_dicts=[{"add": add}],
        _async_tool_dicts=[{}],
        environment_factories=None,
        model=types.SimpleNamespace(config=types.SimpleNamespace(max_position_embeddings=10**6)),
        _generate_single_turn=lambda ids, *_, **__: ([next(later)], None),
    )
    trainer._get_tool_suffix_ids = types.MethodType(GRPOTrainer._get_tool_suffix_ids, trainer)
    first = templates.parse_response(tokenizer, turns[0], prefix=prompt_ids, tools=tools)
    results = GRPOTrainer._tool_call_loop(
        trainer, [list(PROMPT)], [prompt_ids], [turns[0]], [[first]], None, None, {}
    )
    mask, messages, completion_ids = results[0][0], results[1][0], results[2][0]
    return {
        "template": original,
        "source": f"trl/chat_templates/{family}.jinja",
        "turns": TURNS[family],
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "mask": mask,
        "messages": messages,
    }


def with_template(template):
    """The whole conversation in Mistral's template, cut where the policy's turns begin and end."""
    tokenizer, eos = tokenizer_of("mistral", template), FAMILIES["mistral"][1]
    messages, ids, mask = list(PROMPT), [], []

    def render(messages):
        schemas = [get_json_schema(add)]
        return tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False)

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    before = prompt = render(messages)
    for text in TURNS["mistral"]:
        if text.startswith("[TOOL_CALLS]"):
            (call,) = json.loads(text.removeprefix("[TOOL_CALLS]"))
            number = call.pop("id")
            calls = [{"type": "function", "id": number, "function": call}]
            turn = {"role": "assistant", "tool_calls": calls}
            result = {"role": "tool", "content": str(add(**call["arguments"]))}
            replies = [result | {"tool_call_id": number}]
        else:
            turn, replies = {"role": "assistant", "content": text.removeprefix(" ")}, []
        assert render([*messages, turn]) == before + text + eos
        messages += [turn, *replies]
        after = render(messages)
        assert after.startswith(before + text + eos)
        for part, role in ((text + eos, 1), (after.removeprefix(before + text + eos), 0)):
            ids += encode(part)
            mask += [role] * len(encode(part))
        before = after
    assert encode(before) == encode(prompt) + ids
    return {
        "template": template,
        "source": "vllm-project/vllm, examples/tool_chat_template_mistral_official.jinja",
        "turns": TURNS["mistral"],
        "prompt_ids": encode(prompt),
        "completion_ids": ids,
        "mask": mask,
    }


def main():
    cases = {family: with_trl(family) for family in TURNS if family != "mistral"}
    cases["mistral"] = with_template(pathlib.Path(sys.argv[1]).read_text())
    schema = get_json_schema(add)
    content = {"prompt": PROMPT, "tools": [schema], "families": cases}
    PATH.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
