"""A script for TRL's SFTTrainer as a run here: conversations in, an adapter out.

    uv run python examples/sft_from_trl.py

It does what trl/scripts/sft.py of huggingface/trl does with LoRA at commit f2cd57710ae3. What was

    trainer = SFTTrainer(
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        args=SFTConfig(learning_rate=5e-4, max_steps=12, per_device_train_batch_size=8,
                       assistant_only_loss=True, max_length=96),
        train_dataset=dataset,
        peft_config=LoraConfig(r=16, lora_alpha=32),
    )
    trainer.train()

becomes a config and one call; the rows stay as they are.
"""

import qerl_jax as qj

CITIES = {"Paris": "France", "Rome": "Italy", "Lima": "Peru", "Oslo": "Norway", "Cairo": "Egypt"}
FORMS = ("Where is {}?", "Which country is {} in?", "Name the country of {}.")


def conversation(city, country, form):
    """A conversation of two turns, whose answers are in a form that the model would not choose."""
    return {
        "messages": [
            {"role": "user", "content": form.format(city)},
            {"role": "assistant", "content": f"[{country.upper()}]"},
            {"role": "user", "content": "Are you sure?"},
            {"role": "assistant", "content": f"Yes: [{country.upper()}]"},
        ]
    }


def main():
    """Trains. `python -m experiments.sample RUN "Where is Madrid?"` asks for another city."""
    config = qj.get_config("sft:smollm2-135m")
    config.update_from_flattened_dict(
        {
            "optimizer.learning_rate": 5e-4,
            "steps": 12,
            "sft.rows_per_step": 8,
            "sft.max_tokens": 96,
            "lora.rank": 16,
            "lora.alpha": 32.0,
            "data.system_prompt": "",
            "eval.every": 0,
        }
    )
    dataset = [conversation(*pair, form) for pair in CITIES.items() for form in FORMS]
    return qj.train(config, problems=dataset, workdir="runs/sft_from_trl")


if __name__ == "__main__":
    main()
