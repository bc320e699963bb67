"""Token ids and masks of conversations with tools: those of TRL, for five families of templates."""

import numpy as np
import pytest
from recorded_conversations import FORMATS, RECORDED, tokenizer_of

from qerl_jax.environments.episodes import Contract, Environments, Episodes
from qerl_jax.environments.pool import Pool
from qerl_jax.environments.replies import ReplyWriter
from qerl_jax.environments.roles import ANSWER, Turn
from qerl_jax.environments.tools import tool_format
from qerl_jax.errors import UserError


@pytest.fixture(scope="module")
def pool():
    pool = Pool({"tools": "environment_cases:Calculator"})
    yield pool
    pool.close()


def converse(pool, family, turns):
    """Everything after the prompt of a conversation whose turns are given: ids and mask."""
    tokenizer = tokenizer_of(family)
    writer = ReplyWriter(tokenizer, {}, True)
    writer.check()
    environments = Environments(
        pool=pool,
        contracts={"tools": Contract("tools", tuple(RECORDED["tools"]))},
        writers={"tools": writer},
        form=tool_format(tokenizer.chat_template),
        tokenizer=tokenizer,
        max_turns=10,
        time_limit=30.0,
        processes=4,
    )
    ids, mask = [], []
    options = {"in_reasoning": [family == "qwen3_5_think"]}
    with Episodes(environments, [{"answer": "84"}], [0], [None], **options) as episodes:
        for text in turns:
            turn = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
            ids += turn
            mask += [1] * len(turn)
            episodes.submit(Turn(0, turn, complete=True, space=10_000))
            while not (replies := episodes.replies(10.0)):
                pass
            (reply,) = replies
            ids += reply.ids
            mask += [0] * len(reply.ids)
    return ids, mask, reply, episodes.episodes[0]


@pytest.mark.parametrize("family", FORMATS)
def test_ids_and_masks_are_those_of_trl(pool, family):
    case = RECORDED["families"][family]
    ids, mask, reply, episode = converse(pool, family, case["turns"])
    np.testing.assert_array_equal(ids, case["completion_ids"])
    np.testing.assert_array_equal(mask, case["mask"])
    assert reply.ending == ANSWER
    assert episode.messages == case.get("messages", episode.messages)
    rewards = {"qwen3": 3, "qwen3_5_think": 3}
    assert episode.reward == rewards.get(family, 2)


@pytest.mark.parametrize("family", FORMATS)
def test_prompts_with_tools_are_those_of_trl(family):
    tokenizer = tokenizer_of(family)
    text = tokenizer.apply_chat_template(RECORDED["prompt"], tools=RECORDED["tools"])
    assert tokenizer.encode(text) == RECORDED["families"][family]["prompt_ids"]
    assert tool_format(tokenizer.chat_template) == FORMATS[family]


@pytest.mark.parametrize(
    ("family", "calls", "system", "message"),
    [
        ("qwen2_5", False, "Be brief.", ""),
        ("llama3_1", False, "Be brief.", ""),
        ("mistral", False, "", ""),
        ("qwen3", False, "", "writes earlier turns in another way"),
        ("qwen3_5_think", False, "", "writes earlier turns in another way"),
        ("qwen3_5_think", True, "Be brief.", ""),
        ("mistral", False, "Be brief.", "writes earlier turns in another way"),
        ("mistral", True, "Be brief.", "writes earlier turns in another way"),
    ],
)
def test_templates_that_change_earlier_turns_are_refused(family, calls, system, message):
    writer = ReplyWriter(tokenizer_of(family), {}, calls, system)
    if not message:
        writer.check()
        return
    with pytest.raises(UserError, match=message):
        writer.check()


def test_texts_of_a_user_follow_the_end_of_the_turn():
    tokenizer = tokenizer_of("qwen2_5")
    ids = ReplyWriter(tokenizer, {}, False).write(["higher"])
    text = tokenizer.decode(ids, skip_special=False)
    assert text == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_ids[0] == ReplyWriter(tokenizer, {}, False).end_id()


@pytest.mark.parametrize("family", ["qwen2_5", "llama3_1"])
def test_a_long_text_is_cut_to_its_tokens(family):
    writer = ReplyWriter(tokenizer_of(family), {}, False)
    frame = len(writer.write([""]))
    for text in ("x" * 1_000_000, "é" * 1000):
        ids, cut = writer.fit([text], [], frame + 50)
        assert cut
        assert frame <= len(ids) <= frame + 50
    assert writer.fit(["abc"], [], frame + 3) == (writer.write(["abc"]), False)
    assert writer.fit(["abc"], [], frame - 1) == ([], True)
